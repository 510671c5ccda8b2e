# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Workers are found by the name that verl gives them, and one that is busy or gone hangs nothing."""

import asyncio
import os

import pytest
import ray

from recipe.agent_env import progress_display
from recipe.agent_env.progress_display import WORKER_NAME, ask_workers
from recipe.agent_env.rollout.progress import RolloutProgress

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Worker:
    """Counts as an agent worker does."""

    def __init__(self, num_in_flight: int):
        self._progress = RolloutProgress(num_rows=8, num_in_flight=num_in_flight)
        self._is_slow = False

    async def progress(self) -> dict[str, int]:
        """As `EnvAgentLoopWorker.progress`."""
        if self._is_slow:
            await asyncio.sleep(60)
        return self._progress.snapshot()

    async def get_slow(self) -> None:
        """Answer no more."""
        self._is_slow = True

    async def die(self) -> None:
        """As if it were out of memory."""
        os._exit(1)


def test_workers_of_a_run_are_asked(monkeypatch):
    assert ask_workers() is None
    monkeypatch.setattr(progress_display, "_ASK_TIMEOUT_S", 2.0)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        assert ask_workers() is None
        actor = ray.remote(num_cpus=0)(Worker)
        workers = [actor.options(name=f"{WORKER_NAME}{i}_abc").remote(i + 1) for i in range(2)]
        actor.options(name="something_else").remote(100)
        ray.get([worker.progress.remote() for worker in workers])
        assert ask_workers() == RolloutProgress(num_rows=16, num_in_flight=3)
        ray.get(workers[0].get_slow.remote())
        assert ask_workers() is None
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(workers[0].die.remote())
        assert ask_workers() == RolloutProgress(num_rows=8, num_in_flight=2)
    finally:
        ray.shutdown()
