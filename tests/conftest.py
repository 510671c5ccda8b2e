# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What every test session needs: no hub is ever asked, and no process outlives the session.

Fixtures of one subject live in that subject's folder, not here.
"""

import os

import psutil
import pytest

# Before anything imports huggingface_hub or transformers, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# multiprocessing keeps these two for the life of the interpreter that started them.
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

LEAKED = pytest.StashKey[list[str]]()


def leaked_processes() -> list[str]:
    """List the command lines of child processes, at any depth, that still run after the last test."""
    leaked = []
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            is_running = child.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if is_running and not any(name in command for name in KEPT_BY_PYTHON):
            leaked.append(f"{child.pid} {command[:200]}")
    return leaked


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session whose tests all passed but left a process behind."""
    session.config.stash[LEAKED] = leaked_processes()
    if session.config.stash[LEAKED] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the processes that were left behind."""
    for line in config.stash.get(LEAKED, []):
        terminalreporter.write_line(f"left running after the last test: {line}", red=True)
