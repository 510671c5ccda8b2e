# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Writes down when our parts of a training run start and what processor time they take.

verl imports this module in every process of a run (`VERL_USE_EXTERNAL_MODULES`). It waits until the modules below are
imported and wraps their functions; without the environment variable OWN_TIME_RECORD, which names the file, it does
nothing.
"""

import functools
import inspect
import json
import os
import time
from typing import Any

import wrapt

_RECORD = os.environ.get("OWN_TIME_RECORD")
_TIMED = {
    "recipe.agent_env.agent_dataset": ["AgentDataset.__init__", "EpisodeTokenizer.from_config"],
    "recipe.agent_env.client.async_face": ["AsyncEnvClient.__init__", "AsyncEnvClient.open"],
    "recipe.agent_env.rollout.agent_loop": [
        "EnvAgentLoopWorker.__init__",
        "EnvAgentLoopWorker.generate_sequences",
        "EnvAgentLoopManager.generate_sequences",
    ],
    "recipe.agent_env.agent_task_runner": ["AgentTaskRunnerBase.run", "AgentTaskRunnerBase.build_trainer"],
    "recipe.agent_env.agent_ray_trainer": [
        "AgentRayPPOTrainer.init_workers",
        "AgentRayPPOTrainer.fit",
        "AgentRayPPOTrainer._log_rollout_data",
    ],
}
PATCHED = ("compute_advantage", "apply_kl_penalty", "compute_data_metrics")
"""verl's functions that run through a wrapper of ours on the driver."""


def _write(name: str, started: float, cpu_started: float) -> None:
    entry = {
        "name": name,
        "started": started,
        "wall_s": time.time() - started,
        "cpu_s": time.process_time() - cpu_started,
        "pid": os.getpid(),
    }
    assert _RECORD is not None
    with open(_RECORD, "a") as file:
        file.write(json.dumps(entry) + "\n")


def _timed(name: str, function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            started, cpu_started = time.time(), time.process_time()
            try:
                return await function(*args, **kwargs)
            finally:
                _write(name, started, cpu_started)

        return timed_async

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started, cpu_started = time.time(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            _write(name, started, cpu_started)

    return timed


def _wrap_all(names: list[str], module: Any) -> None:
    for name in names:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, module)
        plain = inspect.getattr_static(owner, last)
        if isinstance(plain, classmethod):
            setattr(owner, last, classmethod(_timed(name, plain.__func__)))
        else:
            setattr(owner, last, _timed(name, plain))


def _time_patches(module: Any) -> None:
    wrap = module._wrap
    module._wrap = lambda function, wrapper: (
        _timed(function.__name__, wrap(function, wrapper)) if function.__name__ in PATCHED else wrap(function, wrapper)
    )


if _RECORD:
    wrapt.register_post_import_hook(_time_patches, "recipe.agent_env.verl_patches")
    for _module, _names in _TIMED.items():
        wrapt.register_post_import_hook(functools.partial(_wrap_all, _names), _module)
