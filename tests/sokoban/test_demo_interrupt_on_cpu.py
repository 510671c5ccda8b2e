# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The whole demo, broken off in the middle of a rollout: nothing runs on, nothing stays open."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests

from examples.sokoban import demo, processes

_ROOT = Path(__file__).resolve().parents[2]
_SMALL_POLICY = """
from examples.sokoban import demo
small = demo.WarmStartConfig(num_episodes=16, num_epochs=1, hidden_size=64, num_layers=1, num_heads=2)
demo.WarmStartConfig = lambda **options: small
raise SystemExit(demo.main())
"""


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupt_in_mid_rollout_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    log_path = tmp_path / "demo.log"
    code = f"import sys; sys.argv = ['demo', '--out-dir', {str(tmp_path / 'out')!r}]{_SMALL_POLICY}"
    process = processes.start([sys.executable, "-u", "-c", code], log_path)
    try:
        _wait_for_open_environments(tmp_path / "out/ppo_seed1/service.log", process)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) > 5  # Ray's own processes, workers, service
        process.send_signal(number)
        assert process.wait(timeout=300) == 130
    finally:
        if process.poll() is None:
            process.kill()
    output = log_path.read_text()
    assert "environments still open at the service: 0" in output
    assert "had to be killed" not in output
    assert not [child for child in started if child.is_running()]


def _wait_for_open_environments(service_log: Path, process: subprocess.Popen) -> None:
    for _ in processes.wait_until(600.0, poll_s=0.1):
        assert process.poll() is None
        found = demo._SERVICE_LINE.search(service_log.read_text()) if service_log.exists() else None
        if found and requests.get(f"{found[1]}/stats", timeout=10).json()["live_sessions"] > 10:
            return
    raise AssertionError("no environment was opened")
