# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Child processes of the demo: their output, their end, their memory, and orphans that chose a session of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.sokoban import processes

_ROOT = Path(__file__).resolve().parents[2]


def _wait_for(path: Path) -> str:
    for _ in processes.wait_until(30.0, poll_s=0.05):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
    raise AssertionError(f"{path} was not written")


def test_start_writes_both_streams_to_the_log_and_makes_a_session(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid()); print('oops', file=sys.stderr)"
    process = processes.start([sys.executable, "-u", "-c", code], tmp_path / "deep" / "log")
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "deep" / "log").read_text() == "True\noops\n"


def test_stop_ends_by_sigterm_and_says_so(tmp_path: Path) -> None:
    process = processes.start([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    assert processes.stop(process, 30.0)
    assert process.returncode == -signal.SIGTERM


def test_stop_reports_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    process = processes.start([sys.executable, "-c", code], tmp_path / "log")
    _wait_for(tmp_path / "log")
    try:
        assert not processes.stop(process, 0.2)
    finally:
        process.kill()
        process.wait()


def test_orphans_in_their_own_session_are_found_and_ended(tmp_path: Path) -> None:
    """A daemon that its parent left behind is what Ray's processes are when the driver dies."""
    pid_path = tmp_path / "pid"
    daemon = f"import os, time; open({str(pid_path)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session=True)"
    script = (
        "import subprocess, sys\nfrom examples.sokoban import processes\nprocesses.adopt_orphans()\n"
        f"subprocess.run([sys.executable, '-c', {parent!r}], check=True)\n"
        f"import pathlib\nwhile not pathlib.Path({str(pid_path)!r}).exists(): pass\n"
        "print(len(processes.end_descendants(grace_s=0.2)), len(processes.descendants()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["1", "0"], result.stderr
    assert not psutil.pid_exists(int(_wait_for(pid_path)))


def test_orphans_that_have_ended_are_reaped(tmp_path: Path) -> None:
    """Else each stays in the process table, where a check for leftovers finds it, as long as the demo runs."""
    parent = "import subprocess; subprocess.Popen(['sleep', '0.2'], start_new_session=True)"
    script = (
        "import psutil, subprocess, sys\nfrom examples.sokoban import processes\nprocesses.adopt_orphans()\n"
        f"subprocess.run([sys.executable, '-c', {parent!r}], check=True)\n"
        "[orphan] = psutil.Process().children()\n"
        "while orphan.status() != psutil.STATUS_ZOMBIE: pass\n"
        "print(processes.end_descendants(grace_s=0.2), psutil.Process().children())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["[]", "[]"], result.stderr


def test_memory_counts_children(tmp_path: Path) -> None:
    before = processes.measure_bytes()
    code = "block = bytearray(200_000_000); print('ready', flush=True); import time; time.sleep(600)"
    process = processes.start([sys.executable, "-c", code], tmp_path / "log")
    _wait_for(tmp_path / "log")
    try:
        assert processes.measure_bytes() - before > 190_000_000
    finally:
        processes.stop(process, 30.0)


def test_sigterm_interrupts_within_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), processes.sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert signal.getsignal(signal.SIGTERM) is before


def test_held_signals_do_nothing() -> None:
    with processes.signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
