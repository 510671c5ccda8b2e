# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`scripts/run_contained.py` passes exit codes on and lets no process slip away."""

import subprocess
import sys
import tempfile

import psutil
import pytest

from tests.packaging.locks import ROOT

# The same program with no patience, so that these tests take no time.
CONTAINED = "import scripts.run_contained as m, sys; m.GRACE_S = 0.0; sys.exit(m.main())"


def run_contained(*command: str) -> subprocess.CompletedProcess:
    """Run a command under the script."""
    return subprocess.run(
        [sys.executable, "-c", CONTAINED, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_is_passed_on(code):
    result = run_contained("sh", "-c", f"echo out; exit {code}")
    assert (result.returncode, result.stdout, result.stderr) == (code, "out\n", "")


def test_command_ended_by_a_signal_is_reported_as_by_a_shell():
    assert run_contained("sh", "-c", "kill -TERM $$").returncode == 143


def test_process_that_left_its_session_is_named_killed_and_fails_the_run():
    result = run_contained("sh", "-c", "setsid sleep 987 >/dev/null 2>&1 & echo $!")
    assert result.returncode == 70
    assert "sleep 987" in result.stderr
    assert not any(process.info["cmdline"] == ["sleep", "987"] for process in psutil.process_iter(["cmdline"]))


def test_orphans_that_ended_are_collected_while_the_command_runs():
    """A zombie would look alive to a clean-up that waits for a process to go."""
    wait = 'while kill -0 $(cat "$0") 2>/dev/null; do sleep 0.02; done'
    start = 'sh -c "sleep 0.1 & echo \\$! >$0"'
    with tempfile.NamedTemporaryFile() as pid_file:
        result = run_contained("sh", "-c", f"{start}; {wait}; echo gone", pid_file.name)
    assert (result.returncode, result.stdout) == (0, "gone\n")


def test_failing_command_keeps_its_code_when_it_leaves_a_process():
    result = run_contained("sh", "-c", "setsid sleep 986 >/dev/null 2>&1 & exit 5")
    assert result.returncode == 5
    assert "sleep 986" in result.stderr
