# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Entrypoint: `python -m recipe.agent_env.main_agent_ppo key=value ...` (Hydra overrides on
config/agent_ppo_trainer.yaml).

Owns the order of things before and after training: the config is finished and checked before Ray starts, and however
the run ends, no environment stays open at the service. SIGTERM (preemption) ends it in order: episodes are broken off,
finished steps are saved. Ctrl-C, or a second SIGTERM, does not wait for that. verl, Ray and torch are imported only
after the checks.
"""

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

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
    from recipe.agent_env.rollout.agent_loop import RunStoppedError

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        with ProgressDisplay():
            run_ppo(config, task_runner_class=_StoppedBySigterm(AgentTaskRunner))
    except RunStoppedError as exc:
        logger.warning("%s", getattr(exc, "cause", exc))  # Ray's copy quotes its traceback
        sys.exit(130)
    except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into SystemExit where it was started last
        _close_environments()
        sys.exit(130)
    finally:
        ray.shutdown()


class _StoppedBySigterm:
    """The task runner's actor class as `run_ppo` uses it. Ray has just replaced the handler of SIGTERM at that point.

    Args:
        actor_class: What `ray.remote` returned.
    """

    def __init__(self, actor_class: Any):
        self._actor_class = actor_class

    def options(self, **options: Any) -> "_StoppedBySigterm":
        """The same with options of Ray's."""
        return _StoppedBySigterm(self._actor_class.options(**options))

    def remote(self) -> Any:
        """Start the actor."""
        signal.signal(signal.SIGTERM, _stop)
        return self._actor_class.remote()


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """Ends the run as Ctrl-C does."""
    raise KeyboardInterrupt


def _stop(signum: int, frame: FrameType | None) -> None:
    """Tell the agent workers to stop; the trainer then saves and ends, and so does the wait for it in this thread."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    threading.Thread(target=_stop_agent_workers, daemon=True).start()


def _stop_agent_workers() -> None:
    from recipe.agent_env.progress_display import agent_workers

    logger.warning("SIGTERM: episodes are broken off, finished steps are saved; a second SIGTERM does not wait for it")
    workers = agent_workers()
    if not workers:  # nothing was played yet
        os.kill(os.getpid(), signal.SIGINT)
    for worker in workers:
        worker.stop.remote()


def _close_environments() -> None:
    """Ask every agent worker of this run to close what it has open; a broken-off trainer cannot."""
    import ray

    from recipe.agent_env.progress_display import agent_workers

    pending = [worker.close.remote() for worker in agent_workers()]
    done, late = ray.wait(pending, num_returns=len(pending), timeout=_CLOSE_TIMEOUT_S) if pending else ([], [])
    if late:
        logger.warning("%d of %d agent workers did not close their environments in time", len(late), len(pending))


if __name__ == "__main__":
    main()
