# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a run script would start, without starting it.

Owns: running a script with a stand-in for Python that writes its arguments down, and composing the config from them.
Refuses to know: what the scripts set. Nothing is curated, no model is loaded, no GPU is needed.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from recipe.agent_env.config_checks import finish_config, register_resolvers

_ENTRYPOINT = "recipe.agent_env.main_agent_ppo"
_END = "\x1e"
_STAND_IN = f"""#!/bin/sh
printf '%s\\n' "$@" '{_END}' >> "$CALLS"
"""


def read_calls(script: Path, arguments: list[str], variables: dict[str, str] | None = None) -> list[list[str]]:
    """The command lines with which a run script calls Python.

    Args:
        script: A bash script that takes its interpreter from the variable PYTHON and writes only under RUN_DIR.
        arguments: Given to the script.
        variables: Set in its environment besides those.

    Returns:
        The arguments of each call, in order.

    Raises:
        ValueError: The script failed; the text ends with what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_in, calls = folder / "python", folder / "calls"
        stand_in.write_text(_STAND_IN)
        stand_in.chmod(0o755)
        own = {"PYTHON": str(stand_in), "CALLS": str(calls), "RUN_DIR": name, "DATA_DIR": f"{name}/data"}
        done = subprocess.run(
            ["bash", str(script), *arguments],
            env={**os.environ, **own, **(variables or {})},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or not calls.exists():
            raise ValueError(f"{script} ended with exit status {done.returncode}:\n{done.stderr[-2000:]}")
        return [call.strip("\n").split("\n") for call in calls.read_text().split(_END) if call.strip()]


def read_overrides(script: Path, arguments: list[str], variables: dict[str, str] | None = None) -> list[str]:
    """The Hydra overrides with which a run script starts the entrypoint; see `read_calls`.

    Raises:
        ValueError: The script failed, or does not end by starting the entrypoint.
    """
    last = read_calls(script, arguments, variables)[-1]
    if last[:2] != ["-m", _ENTRYPOINT]:
        raise ValueError(
            f"{script}: expected its last call of Python to be -m {_ENTRYPOINT}, got {' '.join(last)[:200]}"
        )
    return last[2:]


def compose_config(overrides: list[str]) -> DictConfig:
    """The config that the entrypoint would run with.

    Raises:
        hydra.errors.HydraException: A key does not exist, or a value cannot be read.
        ConfigError: The config cannot work.
    """
    register_resolvers()
    with initialize_config_module("recipe.agent_env.config", version_base=None):
        return finish_config(compose("agent_ppo_trainer", overrides=overrides))
