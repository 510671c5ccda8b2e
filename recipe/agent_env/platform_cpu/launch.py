# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What an entrypoint calls to run on the CPU; functions that do nothing in a run on GPUs.

    prepare_process(config)            before verl is imported in the driver
    replace_workers(mapping, config)   after verl filled `role_worker_mapping`

Owns the decision "is this a CPU run" (`trainer.device=cpu`, set by the overlay `platform/cpu.yaml`). Importing it
imports neither verl nor torch nor ray.
"""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

_ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"


def is_cpu_run(config: DictConfig) -> bool:
    """Return True when the config asks for the CPU platform."""
    return OmegaConf.select(config, "trainer.device") == "cpu"


def prepare_process(config: DictConfig) -> None:
    """Put the run's environment variables into this process, whose children inherit them.

    Has to come before the first import of verl: verl chooses its platform once, at the first question. Variables that
    are already set are kept, so a shell can override the overlay.

    Raises:
        ValueError: `trainer.device=cpu` without the overlay.
        RuntimeError: vLLM's CPU build is not installed completely.
    """
    if not is_cpu_run(config):
        return
    env_vars = OmegaConf.select(config, _ENV_VARS) or {}
    if env_vars.get("VERL_PLATFORM") != "cpu":
        raise ValueError(
            f"trainer.device=cpu, but {_ENV_VARS}.VERL_PLATFORM is {env_vars.get('VERL_PLATFORM')!r}: "
            "add +platform=cpu, which sets all that a CPU run needs"
        )
    check_vllm_distribution()
    for name, value in env_vars.items():
        os.environ.setdefault(str(name), str(value))
    # The package was imported before the variable was set, so its own registration was skipped in this process.
    from recipe.agent_env.platform_cpu import platform  # noqa: F401


def check_vllm_distribution() -> None:
    """Raise RuntimeError unless the name `vllm` carries a CPU version, see `vllm_metadata.py`."""
    from importlib import metadata

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
