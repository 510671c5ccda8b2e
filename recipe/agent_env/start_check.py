# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Does the seed of a row decide how its episode starts? Asked once, before workers are started.

Rollouts of one row are compared with each other; a service that ignores seeds gives each another task, and the
comparison teaches noise. Owns the question and what follows from the answer; shared with the doctor. Imports no verl.
"""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from recipe.agent_env.agent_dataset import AgentDataset, EpisodeSpec
from recipe.agent_env.algorithms.catalog import compares_rollouts
from recipe.agent_env.env_client import EnvClient, EnvClientConfig, EnvError, EnvSession
from recipe.agent_env.episode_settings import env_client_config

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class SeedIgnoredError(RuntimeError):
    """Two environments made with one seed start differently, and the estimator compares rollouts of one row."""


def start_difference(first: EnvSession, second: EnvSession) -> str | None:
    """Where two starts part, short; None where they are the same to the model."""
    for what in ("observation", "task_prompt", "tools_schema"):
        one, other = (json.dumps(getattr(session, what), ensure_ascii=False) for session in (first, second))
        if one != other:
            start = max(0, len(os.path.commonprefix([one, other])) - 20)
            return f"({what}): ...{one[start : start + 60]} / ...{other[start : start + 60]}"
    return None


def check_seeds(config: DictConfig, dataset: AgentDataset) -> None:
    """Open a few rows of each environment twice and compare; `env.seed_check_rows` and `env.seed_check_time_s`.

    Args:
        config: The whole config.
        dataset: Training rows.

    Raises:
        SeedIgnoredError: A seed gave two starts and the estimator compares rollouts of one row; otherwise a warning.
    """
    env = config.env
    specs = _first_rows((dataset.spec(i) for i in range(len(dataset))), env.seed_check_rows)
    name, num_rollouts = str(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    deadline = time.monotonic() + env.seed_check_time_s
    for spec in specs:
        where = f"environment {spec.env_name!r} at {env.environment_endpoint}, seed {spec.seed}"
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            logger.warning(
                "seeds not looked at from %s on: env.seed_check_time_s=%g is over", where, env.seed_check_time_s
            )
            return
        try:
            difference = _open_twice(spec, _within(env_client_config(config), left_s))
        except EnvError as exc:
            logger.warning("seeds not looked at, %s cannot be opened: %s", where, exc)
            continue
        if difference is None:
            continue
        text = f"{where} gave two different starts {difference}"
        if compares_rollouts(name, num_rollouts):
            raise SeedIgnoredError(
                f"{text}. algorithm.adv_estimator={name} compares rollouts of one row, which are then different tasks: "
                "let the seed decide everything random in reset, take an estimator without a group (gae), or set "
                "env.seed_check_rows=0 if the difference does not matter"
            )
        logger.warning("%s: episodes cannot be played again, and validation is not comparable between steps", text)


def _first_rows(specs: Iterable[EpisodeSpec], num_rows: int) -> list[EpisodeSpec]:
    """The first rows of each environment."""
    rows: dict[str, list[EpisodeSpec]] = {}
    for spec in specs:
        of_environment = rows.setdefault(spec.env_name, [])
        if len(of_environment) < num_rows:
            of_environment.append(spec)
    return [spec for of_environment in rows.values() for spec in of_environment]


def _within(config: EnvClientConfig, limit_s: float) -> EnvClientConfig:
    """The same client, none of whose waits is longer than the limit."""
    waits: Sequence[str] = ("request_timeout_s", "connect_timeout_s", "retry_time_s", "busy_wait_s")
    return dataclasses.replace(config, **{wait: min(getattr(config, wait), limit_s) for wait in waits})


def _open_twice(spec: EpisodeSpec, config: EnvClientConfig) -> str | None:
    """Raises EnvError where the service does not play along."""
    with EnvClient(config) as client:

        def open_once() -> EnvSession:
            return client.open(env_name=spec.env_name, seed=spec.seed, env_kwargs=spec.env_kwargs)

        with open_once() as first, open_once() as second:
            return start_difference(first, second)
