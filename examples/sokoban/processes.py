# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Child processes of the demo: started apart, watched, and all gone at the end.

Owns groups, signals and memory figures. On Linux this process adopts its orphans, so what a child leaves behind is
found and ended too, whatever session it started. Refuses to know what the children do, and to touch any other process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 2.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends.

    Raises:
        OSError: The kernel refused; Linux does this since 3.4.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed; this needs Linux 3.4 or newer")


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that one path cleans up after both."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Within the block SIGINT and SIGTERM are ignored: cleaning up is not cut short by a second Ctrl-C."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(command: list[str], log_path: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Start a command in a session of its own (a Ctrl-C in the terminal does not reach it) with its output in a file.

    Args:
        command: Program and arguments.
        log_path: Gets stdout and stderr; written anew.
        env: The whole environment; None for this process's own.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def stop(process: subprocess.Popen, timeout_s: float) -> bool:
    """Ask a process to end by SIGTERM, and wait.

    Returns:
        Whether it ended by itself. Else `end_descendants` has to do it.
    """
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def descendants() -> list[psutil.Process]:
    """Everything this process started, directly or not, that still runs."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def end_descendants(grace_s: float) -> list[str]:
    """End everything this process started.

    Args:
        grace_s: How long to let them end by themselves before they are killed.

    Returns:
        Command lines of the processes that had to be killed.
    """
    psutil.wait_procs(descendants(), timeout=grace_s)
    killed = []
    # Children of a killed process become ours, so look again until nothing is left.
    while left := descendants():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed.append(" ".join(process.cmdline())[:120] or process.name())
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
    # Adopted ones that have ended still hold a place in the process table until their parent, now this process, asks.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return killed


class MemoryWatch:
    """Measures the memory of this process and its descendants together, in the background.

    Counts the proportional share (PSS) of each process: what several share is counted once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def peak_gb(self) -> float:
        """Highest sum seen so far, in 10^9 bytes."""
        return self.peak_bytes / 1e9

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_S):
            self.peak_bytes = max(self.peak_bytes, measure_bytes())


def measure_bytes() -> int:
    """Memory of this process and its descendants, in bytes of PSS."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


def wait_until(deadline_s: float, poll_s: float = 0.2) -> Iterator[float]:
    """Yield elapsed seconds every `poll_s` until `deadline_s` have passed; for loops that wait for something."""
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < deadline_s:
        yield elapsed
        time.sleep(poll_s)
