# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 2: what `EnvClient` costs on top of aiohttp, and that more episodes than files queue.

Both sides send the same bodies to the same cheap service in a process of its own, over as many connections as there
are open sessions, and read every answer as JSON.
"""

import asyncio
import functools
import json
import multiprocessing
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.figures import Figure, alternate, compare, run_script
from benchmarks.simulation import EpisodePlan, SimulatedService, allow_many_connections, open_http
from recipe.agent_env.env_client import AsyncEnvClient, AsyncEnvSession, EnvClientConfig

_fork = multiprocessing.get_context("fork")
_ACTION: dict[str, Any] = {
    "role": "assistant",
    "content": "The box is above me, so I push it up.",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": '{"direction": "up"}'}}
    ],
}


@contextmanager
def service_process() -> Iterator[str]:
    """A cheap service whose environments answer at once, in a process of its own; gives its URL."""
    here, there = _fork.Pipe()
    process = _fork.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    plan = EpisodePlan(reply_lengths=[1] * 100_000, step_s=[0.0] * 100_000, start_s=0.0)

    async def serve() -> None:
        async with SimulatedService([plan] * 4096) as service:
            pipe.send(service.url)
            await asyncio.Event().wait()

    asyncio.run(serve())


async def _time_steps(
    step: Callable[[Any], Awaitable[object]], sessions: list[Any], num_steps: int
) -> tuple[float, float]:
    """Wall and processor seconds of so many steps on every session, all sessions at once."""

    async def play(session: Any) -> None:
        for _ in range(num_steps):
            await step(session)

    for session in sessions[:8]:
        await step(session)
    started, cpu_started = time.perf_counter(), time.process_time()
    await asyncio.gather(*[play(session) for session in sessions])
    return time.perf_counter() - started, time.process_time() - cpu_started


async def _open_all(open_one: Callable[[int], Awaitable[Any]], count: int) -> list[Any]:
    """So many sessions, a few at a time: a burst of connections would measure the kernel's backlog."""
    sessions: list[Any] = []
    for start in range(0, count, 64):
        sessions += await asyncio.gather(*[open_one(seed) for seed in range(start, min(count, start + 64))])
    return sessions


async def client_steps(url: str, num_sessions: int, num_steps: int) -> tuple[float, float]:
    """Through `AsyncEnvClient`."""
    # As long as aiohttp keeps idle connections by itself: neither side is to connect anew between two steps.
    config = EnvClientConfig(
        endpoint=url,
        max_concurrent_episodes=num_sessions,
        keepalive_s=15.0,
        connect_timeout_s=300.0,
        request_timeout_s=300.0,
    )
    async with AsyncEnvClient(config) as client:
        sessions = await _open_all(lambda seed: client.open(env_name="boxes", seed=seed), num_sessions)

        async def step(session: AsyncEnvSession) -> None:
            result = await session.step(_ACTION)
            assert not result.terminated

        return await _time_steps(step, sessions, num_steps)


async def plain_steps(url: str, num_sessions: int, num_steps: int) -> tuple[float, float]:
    """Through aiohttp alone."""
    async with open_http(num_sessions) as http:

        async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with http.post(f"{url}/api/environment/{path}", json=body) as response:
                return json.loads(await response.read())

        async def start(seed: int) -> str:
            return (await post("initialize", {"env_name": "boxes", "seed": seed, "env_kwargs": {}}))["env_id"]

        async def step(env_id: str) -> None:
            answer = await post(f"{env_id}/step", {"action": _ACTION})
            assert not answer["done"]

        return await _time_steps(step, await _open_all(start, num_sessions), num_steps)


def measure(quick: bool) -> list[Figure]:
    """Throughput and processor time at each number of open sessions, then the file limit."""
    figures = []
    allow_many_connections(2048)
    with service_process() as url:
        for num_sessions in (64, 512) if quick else (64, 512, 2048):
            num_steps = max(2, (500 if quick else 1500) // num_sessions)
            total = num_sessions * num_steps
            cpu_ms: dict[str, list[float]] = {"ours": [], "plain": []}

            def side(
                name: str,
                num_sessions: int = num_sessions,
                num_steps: int = num_steps,
                cpu_ms: dict[str, list[float]] = cpu_ms,
            ) -> float:
                steps = client_steps if name == "ours" else plain_steps
                wall_s, cpu_s = asyncio.run(steps(url, num_sessions, num_steps))
                cpu_ms[name].append(1000 * cpu_s / (num_sessions * num_steps))
                return num_sessions * num_steps / wall_s

            measured = alternate(5, {name: functools.partial(side, name) for name in cpu_ms})
            figures.append(
                compare(
                    f"client_{num_sessions}_steps_per_s",
                    f"steps per second through EnvClient at {num_sessions} open sessions against bare aiohttp",
                    unit="steps/s",
                    ours=measured["ours"],
                    baseline=measured["plain"],
                    goal=">= 0.85",
                    details={"steps": total},
                )
            )
            figures.append(
                compare(
                    f"client_{num_sessions}_cpu",
                    f"processor time per step through EnvClient at {num_sessions} open sessions against bare aiohttp",
                    unit="ms",
                    ours=cpu_ms["ours"],
                    baseline=cpu_ms["plain"],
                    inverted=True,
                    goal=">= 0.85",
                )
            )
        figures.append(file_limit(url, 60 if quick else 600, 128 if quick else 512))
    return figures


def file_limit(url: str, num_episodes: int, num_files: int) -> Figure:
    """Share of episodes that succeed when there are more of them than the process may open files."""
    succeeded = []
    for _ in range(5):
        here, there = _fork.Pipe()
        process = _fork.Process(target=_play_with_few_files, args=(there, url, num_episodes, num_files))
        process.start()
        succeeded.append(float(here.recv()))
        process.join()
    return compare(
        "client_file_limit",
        f"episodes that succeed, of {num_episodes} under `ulimit -n {num_files}`, {num_files // 2} open at a time",
        unit="episodes",
        ours=succeeded,
        baseline=[float(num_episodes)] * len(succeeded),
        goal=">= 1.0",
    )


def _play_with_few_files(pipe: Connection, url: str, num_episodes: int, num_files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    async def play(client: AsyncEnvClient, seed: int) -> bool:
        try:
            async with await client.open(env_name="boxes", seed=seed) as session:
                for _ in range(3):
                    await session.step(_ACTION)
        except Exception as exc:
            print(f"episode {seed}: {exc}")
            return False
        return True

    async def play_all() -> int:
        config = EnvClientConfig(endpoint=url, max_concurrent_episodes=num_files // 2)
        async with AsyncEnvClient(config) as client:
            return sum(await asyncio.gather(*[play(client, seed) for seed in range(num_episodes)]))

    pipe.send(asyncio.run(play_all()))


if __name__ == "__main__":
    run_script(measure, __doc__)
