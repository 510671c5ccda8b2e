# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the end-to-end tests start: a policy, data, a live service, and the real entrypoint in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

REPO = Path(__file__).parents[2]
_SERVICE = ["recipe.agent_env.env_service", "examples.sokoban.sokoban_env:SokobanEnv", "--name", "sokoban-v0"]
_MIXED_SERVICE = REPO / "examples/mixed/serve.sh"


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running environment service."""

    url: str
    log: Path
    """One JSON line per call, written by the service."""

    def live_sessions(self) -> int:
        """How many environments are open now."""
        return requests.get(f"{self.url}/stats", timeout=10).json()["live_sessions"]

    def calls(self) -> list[dict[str, Any]]:
        """What the service logged itself."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def sokoban_service(folder: Path) -> Iterator[Service]:
    """Serve Sokoban on a free loopback port."""
    with _serve([sys.executable, "-m", *_SERVICE], folder) as service:
        yield service


@contextmanager
def mixed_service(folder: Path) -> Iterator[Service]:
    """Serve Sokoban, FrozenLake and Countdown in one process on a free loopback port."""
    with _serve(["bash", str(_MIXED_SERVICE)], folder) as service:
        yield service


@contextmanager
def _serve(command: list[str], folder: Path) -> Iterator[Service]:
    log = folder / "service.jsonl"
    process = subprocess.Popen(
        [*command, "--port", "0", "--log-steps", str(log)],
        cwd=REPO,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        url = re.search(r"http://[\d.]+:\d+", said)
        assert url, f"the service said {said!r}"
        yield Service(url=url.group(), log=log)
    finally:
        process.terminate()
        process.wait(timeout=30)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of the entrypoint left behind."""

    folder: Path
    exit_code: int
    output: str
    metrics: dict[int, dict[str, float]]
    """Logged numbers by step."""

    def rows(self, step: int) -> list[dict[str, Any]]:
        """The trained rows of a step, from the run's own dump."""
        return [json.loads(line) for line in (self.folder / "dump" / f"{step}.jsonl").read_text().splitlines()]

    def engine_calls(self) -> list[dict[str, list[int]]]:
        """What vLLM was asked and returned, written down at vLLM's door."""
        return [json.loads(line) for line in (self.folder / "engine.jsonl").read_text().splitlines()]


def start_run(folder: Path, *overrides: str) -> subprocess.Popen:
    """Start the entrypoint on the CPU in a session of its own; its output goes to `folder/output.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    external = "recipe.agent_env.platform_cpu,tests.e2e.engine_recorder"
    command = [sys.executable, "-m", "recipe.agent_env.main_agent_ppo", "+platform=cpu"]
    command += [
        f"ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='{external}'",
        "trainer.logger=[console,file]",
        "trainer.project_name=e2e",
        "trainer.experiment_name=run",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.rollout_data_dir={folder / 'dump'}",
        f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "ENGINE_RECORD": str(folder / "engine.jsonl"),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    with open(folder / "output.txt", "w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish_run(process: subprocess.Popen, folder: Path, *, limit_s: float) -> Run:
    """Wait for a run and read what it left; past the limit it is interrupted and the test fails with its last lines."""
    try:
        exit_code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        raise AssertionError(f"no end within {limit_s:g} s:\n{_last_lines(folder)}") from None
    metrics: dict[int, dict[str, float]] = {}
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            metrics.setdefault(entry["step"], {}).update(entry["data"])
    return Run(folder=folder, exit_code=exit_code, output=(folder / "output.txt").read_text(), metrics=metrics)


def _last_lines(folder: Path) -> str:
    return "\n".join((folder / "output.txt").read_text().splitlines()[-40:])


def run(folder: Path, *overrides: str, limit_s: float = 600.0) -> Run:
    """Run the entrypoint to its end."""
    done = finish_run(start_run(folder, *overrides), folder, limit_s=limit_s)
    assert done.exit_code == 0, _last_lines(folder)
    return done
