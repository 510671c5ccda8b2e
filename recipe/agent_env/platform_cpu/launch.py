# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What an entrypoint calls to run on the CPU. Nothing happens in a run on GPUs.

    prepare_process(config)            before verl is imported in the driver, when verl starts Ray
    start_ray(config)                  instead of both, faster: Ray's processes import while the driver does
    replace_workers(mapping, config)   after verl filled `role_worker_mapping`

Owns the decision "is this a CPU run" (`trainer.device=cpu`, set by the overlay `platform/cpu.yaml`) and how processes
start. Importing it imports neither verl nor torch nor ray.
"""

import importlib
import os
from importlib import metadata
from typing import Any

from omegaconf import DictConfig, OmegaConf

_RAY_INIT = "ray_kwargs.ray_init"
_ENV_VARS = f"{_RAY_INIT}.runtime_env.env_vars"

_RAY_SETTINGS = {
    # What idle workers import before they are asked for: whoever holds a handle of the vLLM server imports its module.
    "RAY_preload_python_modules": "verl.experimental.agent_loop,verl.experimental.reward_loop,"
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    # How many may start at the same time. The default is the number of cores, and Ray never starts the others.
    "RAY_worker_maximum_startup_concurrency": "16",
    # How many Ray keeps although they are idle. The default is the number of logical CPUs; those that wait for their
    # turn would be killed as soon as a training worker starts.
    "RAY_num_workers_soft_limit": "32",
    # Ray takes a worker for dead that has not reported by then, in seconds; imports on a busy machine take long.
    "RAY_worker_register_timeout_seconds": "300",
}


def is_cpu_run(config: DictConfig) -> bool:
    """Return True when the config asks for the CPU platform."""
    return OmegaConf.select(config, "trainer.device") == "cpu"


def prepare_process(config: DictConfig) -> None:
    """Make this process one of a CPU run: its environment, which its children inherit, and verl's platform.

    Has to come before anything else imports verl: verl chooses its platform once, at the first question.

    Raises:
        ValueError: `trainer.device=cpu` without the overlay.
        RuntimeError: vLLM's CPU build is not installed completely.
    """
    if not is_cpu_run(config):
        return
    _set_environment(config)
    _register_platform()


def start_ray(config: DictConfig) -> None:
    """Start Ray on this machine, with the processes that verl will ask for already importing.

    Imports are most of a small run's time, every process pays for them again, and verl starts its processes one after
    the other. Ray starts as many idle workers as it has logical CPUs, lets them import what `_RAY_SETTINGS` names, and
    puts actors that have no environment of their own into these. That is why the
    environment is inherited here and not sent as Ray's `runtime_env`, and why the task runner is best run in this very
    process: as a Ray actor it would be one process more.

    Raises:
        ValueError: `trainer.device=cpu` without the overlay.
        RuntimeError: vLLM's CPU build is not installed completely.
    """
    if not is_cpu_run(config):
        return
    _set_environment(config)
    os.environ.update(_RAY_SETTINGS)
    import ray

    kwargs: Any = OmegaConf.to_container(OmegaConf.select(config, _RAY_INIT), resolve=True)
    runtime_env = kwargs.pop("runtime_env")
    kept = {key: value for key, value in runtime_env.items() if key != "env_vars" and value is not None}
    if kept:
        kwargs["runtime_env"] = kept
    ray.init(**kwargs)
    _register_platform()


def _set_environment(config: DictConfig) -> None:
    env_vars = OmegaConf.select(config, _ENV_VARS) or {}
    if env_vars.get("VERL_PLATFORM") != "cpu":
        raise ValueError(
            f"trainer.device=cpu, but {_ENV_VARS}.VERL_PLATFORM is {env_vars.get('VERL_PLATFORM')!r}: "
            "add +platform=cpu, which sets all that a CPU run needs"
        )
    check_vllm_distribution()
    for name, value in env_vars.items():
        os.environ[str(name)] = str(value)


def _register_platform() -> None:
    # The package was imported before the variable was set, so its own registration was skipped in this process.
    importlib.import_module("recipe.agent_env.platform_cpu.platform")


def check_vllm_distribution() -> None:
    """Raise RuntimeError unless the distribution name `vllm` carries a CPU version, see `vllm_metadata.py`."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = "missing"
    if "cpu" not in version:
        raise RuntimeError(
            f"distribution 'vllm' is {version}, expected a version with '+cpu': run "
            "`python -m recipe.agent_env.platform_cpu.vllm_metadata` (make setup does)"
        )


def replace_workers(role_worker_mapping: dict[Any, Any], config: DictConfig) -> None:
    """Put the CPU workers in the place of verl's, in the mapping that a `BaseTaskRunner` filled.

    Args:
        role_worker_mapping: `Role` to Ray actor class; changed in place.
        config: The composed config.
    """
    if not is_cpu_run(config):
        return
    import ray
    from verl.trainer.ppo.utils import Role

    from recipe.agent_env.platform_cpu.workers import CPUActorRolloutRefWorker, CPUTrainingWorker

    for role in role_worker_mapping:
        worker = CPUTrainingWorker if role == Role.Critic else CPUActorRolloutRefWorker
        role_worker_mapping[role] = ray.remote(worker)
