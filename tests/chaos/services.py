# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Real services as processes that can be killed and started again at the same address.

Owns the processes. Refuses to know: proxies, episodes, what is checked.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.ledger_env import LEDGER_VARIABLE
from tests.env_service.service import REPOSITORY


class RestartableService:
    """One service of `LedgerEnv`.

    Args:
        ledger: File that its environments write to.
        options: Further arguments of its command line.
    """

    def __init__(self, ledger: Path, *options: str) -> None:
        self._environment = {**os.environ, LEDGER_VARIABLE: str(ledger), "PYTHONPATH": str(REPOSITORY)}
        self._options = options
        self._process: Process | None = None
        self._port = "0"
        self.url = ""
        """Root URL, the same after a restart."""
        self.is_up = False
        """Whether it has been started and not been stopped since."""

    async def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: It ended instead.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "recipe.agent_env.env_service", "ledger=tests.chaos.ledger_env:LedgerEnv"),
            *("--port", self._port, *self._options),
            env=self._environment,
            cwd=REPOSITORY,
            stdout=PIPE,
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if " at http" not in line:
            raise RuntimeError("the service did not start; see its output above")
        self.url = line.split(" at ")[1].split()[0]
        self._port = self.url.rpartition(":")[2]
        self.is_up = True

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        self.is_up = False
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await self._process.wait()

    async def stats(self) -> dict[str, Any]:
        """Its `/stats`."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/stats") as answer:
            return await answer.json()
