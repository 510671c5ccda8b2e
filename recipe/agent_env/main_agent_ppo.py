# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Entrypoint: `python -m recipe.agent_env.main_agent_ppo key=value ...` (Hydra overrides on
config/agent_ppo_trainer.yaml).

Owns the order of things before and after training: the config is finished and checked before Ray starts, and however
the run ends, no environment stays open at the service. verl, Ray and torch are imported only after the checks.
"""

import logging
import signal
import sys
from types import FrameType

import hydra
from omegaconf import DictConfig

from recipe.agent_env.config_checks import ConfigError, describe, finish_config, register_resolvers

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 15.0
"""Longest wait for the agent workers to close their environments when the run is broken off, in seconds."""

register_resolvers()


@hydra.main(config_path="config", config_name="agent_ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train; exits with 2 on a config that cannot work."""
    try:
        config = finish_config(config)
    except ConfigError as exc:
        sys.exit(f"Config error, nothing was started.\n{exc}")
    for what, value in describe(config).items():
        logger.info("%s: %s", what, value)
    run(config)


def run(config: DictConfig) -> None:
    """Start Ray, train, and leave nothing behind.

    Args:
        config: Finished config, see `config_checks.finish_config`.
    """
    from recipe.agent_env.platform_cpu.launch import start_ray

    start_ray(config)  # on the CPU only, where imports are most of a small run; elsewhere verl starts Ray below

    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from recipe.agent_env.agent_task_runner import AgentTaskRunner
    from recipe.agent_env.progress_display import ProgressDisplay

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        with ProgressDisplay():
            run_ppo(config, task_runner_class=AgentTaskRunner)
    except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into SystemExit where it was started last
        _close_environments()
        sys.exit(130)
    finally:
        ray.shutdown()


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as Ctrl-C does."""
    raise KeyboardInterrupt


def _close_environments() -> None:
    """Ask every agent worker of this run to close what it has open; a broken-off trainer cannot."""
    import ray

    from recipe.agent_env.progress_display import WORKER_NAME

    if not ray.is_initialized():
        return
    names = [name for name in ray.util.list_named_actors() if name.startswith(WORKER_NAME)]
    pending = [ray.get_actor(name).close.remote() for name in names]
    done, late = ray.wait(pending, num_returns=len(pending), timeout=_CLOSE_TIMEOUT_S) if pending else ([], [])
    if late:
        logger.warning("%d of %d agent workers did not close their environments in time", len(late), len(pending))


if __name__ == "__main__":
    main()
