# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Run a command and fail when it leaves processes running.

Owns the adoption of orphans: on Linux a "child subreaper" becomes the parent of every descendant whose own parent is
gone, also of those that started a session of their own, so nothing that the command started can slip away. What is left
after a grace period is named and killed. Refuses to touch any process that the command did not start.

    python scripts/run_contained.py make demo
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36

# A server that was told to stop may take this long to do so.
GRACE_S = 20.0

LEFT_RUNNING = 70
"""Exit code of a command that succeeded and left processes behind (EX_SOFTWARE)."""


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants.

    Raises:
        OSError: The kernel refused; it has done this since Linux 3.4.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed; this script needs Linux 3.4 or newer")


def descendants() -> dict[int, str]:
    """Map the process ids of everything below this process to their command lines, zombies left out."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold spaces; state and parent follow it.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    below: set[int] = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= found
    commands = {}
    for pid in below - {os.getpid()}:
        try:
            commands[pid] = (
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            )
        except OSError:
            continue
    return commands


def wait_for(pid: int) -> int:
    """Wait for one child and collect adopted ones meanwhile: whoever waits for an orphan to go must not see a zombie.

    Returns:
        The exit code as a shell reports it, 128 plus the signal's number when a signal ended the child.
    """
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def reap() -> None:
    """Collect adopted children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_leftovers(grace_s: float) -> list[str]:
    """Wait for what is still running, then kill it.

    Args:
        grace_s: How long to wait before killing, in seconds.

    Returns:
        One line for each process that had to be killed.
    """
    deadline = time.monotonic() + grace_s
    while descendants() and time.monotonic() < deadline:
        reap()
        time.sleep(0.2)
    killed = []
    # Children of a killed process become ours, so look again until nothing is left.
    while leftovers := descendants():
        for pid, command in leftovers.items():
            line = f"{pid} {command[:200]}"
            killed += [line] if line not in killed else []
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.1)
    return killed


def main() -> int:
    """Run the command line given, pass its exit code on, and see to what it left."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return os.EX_USAGE
    adopt_orphans()
    pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    # Ctrl-C reaches the command by itself (same terminal); a SIGTERM sent to this process only has to be passed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
    code = wait_for(pid)
    killed = kill_leftovers(GRACE_S)
    for line in killed:
        print(f"left running: {line}", file=sys.stderr)
    return code or (LEFT_RUNNING if killed else 0)


if __name__ == "__main__":
    sys.exit(main())
