# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One run of the chaos suite: services, proxies, the real client and episode loop, then the check of every row.

Owns the order of things and the numbers of the report. Refuses to know: how they are shown.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipe.agent_env.agent_dataset import EpisodeSpec
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.rollout.batch import assemble
from recipe.agent_env.rollout.episode import EndReason, Episode, play_episode
from tests.chaos.fault_proxy import PROXY_FAULTS, FaultProxy
from tests.chaos.policy import ChaosPolicy
from tests.chaos.row_check import find_wrong_rows, read_ledger
from tests.chaos.services import RestartableService
from tests.rollout.scripted_policy import make_rules, make_tokenizer

_TIME_LIMIT_S = 4.0
_IDLE_LIMIT_S = 10.0
_BATCH_SIZE = 250
_NUM_AT_ONCE = 48
_NUM_PLACES = (16, 24)
"""Of the two services; fewer than episodes want, so that both are full at times."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What was played and what the check of it found."""

    episodes: list[Episode]
    """In the order of the rows."""
    policies: list[ChaosPolicy]
    """The sampler of each row."""
    ledger: Path
    """What the environments wrote."""
    report: dict[str, Any] = field(default_factory=dict)
    """The numbers; see `docs/reliability.md`."""


async def run_chaos(
    folder: Path,
    *,
    num_episodes: int,
    fault_rate: float,
    num_restarts: int,
    seed: int,
    kinds: tuple[str, ...] = PROXY_FAULTS,
) -> Outcome:
    """Play and check.

    Args:
        folder: For the ledger.
        num_episodes: How many rows.
        fault_rate: Share of requests that meet a fault, 0 to 1, spread evenly over `kinds`.
        num_restarts: How often a service is killed and started again meanwhile.
        seed: Of faults and replies.
        kinds: Faults of the proxy that are switched on.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    ledger = folder / "ledger.jsonl"
    ledger.unlink(missing_ok=True)
    options = ("--idle-timeout-s", str(_IDLE_LIMIT_S), "--queue-wait-s", "0.2")
    services = [RestartableService(ledger, "--max-sessions", str(places), *options) for places in _NUM_PLACES]
    rates = {kind: fault_rate / len(kinds) for kind in kinds}
    proxies = [
        FaultProxy(
            service,
            rates,
            time_limit_s=_TIME_LIMIT_S,
            hides_dedup=number == 1,
            rng=random.Random(f"{seed}-{number}"),
        )
        for number, service in enumerate(services)
    ]
    try:
        await asyncio.gather(*(service.start() for service in services))
        for proxy in proxies:
            await proxy.start()
        outcome, client, restarts = await _play(proxies, services, ledger, num_episodes, num_restarts, seed)
        sessions_left = await _count_sessions_left(services) + client.stats.live
    finally:
        for proxy in proxies:
            with suppress(AssertionError):
                await proxy.stop()
        await asyncio.gather(*(service.stop() for service in services))
    wrong = find_wrong_rows(outcome.episodes, outcome.policies, read_ledger(ledger))
    injected = sum((proxy.injected for proxy in proxies), Counter(restart=restarts))
    outcome.report = {
        "episodes": num_episodes,
        "faults_injected": {"total": sum(injected.values()), **dict(sorted(injected.items()))},
        "finished": sum(episode.end_reason is not EndReason.FAILED for episode in outcome.episodes),
        "replayed": sum(episode.num_restarts > 0 for episode in outcome.episodes),
        "masked": sum(episode.end_reason is EndReason.FAILED for episode in outcome.episodes),
        "rows_wrong_or_lost": len(wrong) + num_episodes - len(outcome.episodes),
        "wrong_rows": {str(number): text for number, text in list(wrong.items())[:20]},
        "sessions_left": sessions_left,
        "environments": len(read_ledger(ledger)),
        "calls_sent_again": client.stats.retries,
        "closes_failed": client.stats.close_failures,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    return outcome


async def _play(
    proxies: list[FaultProxy],
    services: list[RestartableService],
    ledger: Path,
    num_episodes: int,
    num_restarts: int,
    seed: int,
) -> tuple[Outcome, AsyncEnvClient, int]:
    """All episodes, in batches as training has them, while services are restarted."""
    config = EnvClientConfig(
        endpoint=[proxy.url for proxy in proxies],
        request_timeout_s=_TIME_LIMIT_S,
        close_timeout_s=_TIME_LIMIT_S,
        late_answer_s=_TIME_LIMIT_S,
        retry_wait_s=0.05,
        retry_max_wait_s=0.5,
        max_retry_after_s=0.5,
        max_concurrent_episodes=_NUM_AT_ONCE,
    )
    tokenizer = make_tokenizer()
    rules = make_rules(max_turn=6, max_episode_restarts=3)
    policies = [ChaosPolicy(f"{seed}-{number}") for number in range(num_episodes)]
    progress = _Progress(num_episodes)
    restarting = asyncio.create_task(_restart_services(services, progress, num_restarts))
    client = AsyncEnvClient(config)

    async def play(number: int) -> Episode:
        episode = await play_episode(
            EpisodeSpec(env_name="ledger", seed=number, env_kwargs={}),
            client=client,
            tokenizer=tokenizer,
            sample=policies[number],
            rules=rules,
        )
        progress.count()
        return episode

    episodes: list[Episode] = []
    try:
        for first in range(0, num_episodes, _BATCH_SIZE):
            numbers = range(first, min(first + _BATCH_SIZE, num_episodes))
            batch = await asyncio.gather(*map(play, numbers))
            assemble(batch, pad_token_id=0, passed_on={"index": np.asarray(numbers)})  # raises where records differ
            episodes += batch
        restarts = await restarting
    finally:
        restarting.cancel()
        await client.aclose(2 * _TIME_LIMIT_S)
    return Outcome(episodes=episodes, policies=policies, ledger=ledger), client, restarts


class _Progress:
    """How many episodes are over, for whoever waits for a number of them."""

    def __init__(self, num_episodes: int) -> None:
        self.num_episodes = num_episodes
        self._num_over = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def count(self) -> None:
        """One more is over."""
        self._num_over += 1
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reach(self, num_over: int) -> None:
        """Wait until so many are over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_over >= num_over)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _restart_services(services: list[RestartableService], progress: _Progress, num_restarts: int) -> int:
    """Kill one service after the other in mid-batch, by turns with SIGKILL and SIGTERM, and start it again."""
    for number in range(num_restarts):
        await progress.reach((number + 1) * progress.num_episodes // (num_restarts + 1))
        service = services[number % len(services)]
        await service.stop(signal.SIGTERM if number % 4 >= 2 else signal.SIGKILL)
        await service.start()
    return num_restarts


async def _count_sessions_left(services: list[RestartableService]) -> int:
    """Live sessions once the idle limit has ended what lost answers have orphaned."""
    deadline = time.monotonic() + 3 * _IDLE_LIMIT_S
    while True:
        stats = await asyncio.gather(*(service.stats() for service in services))
        num_left = sum(stat["live_sessions"] for stat in stats)
        if num_left == 0 or time.monotonic() > deadline:
            return num_left
        await asyncio.sleep(0.25)
