# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 3: requests per second of the environment service against a bare FastAPI handler, and many live sessions.

Both servers are one uvicorn process with the same options; the load comes from this process, over sockets and without
an HTTP library, so that it costs little. The bare handler reads the same bodies and answers the same fields.
"""

import asyncio
import functools
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.figures import Figure, alternate, compare, run_script
from benchmarks.simulation import BOARD, MOVE_TOOL, TASK_PROMPT, allow_many_connections
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.settings import ServiceSettings

_fork = multiprocessing.get_context("fork")
_ACTION = {
    "role": "assistant",
    "content": "The box is above me, so I push it up.",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": '{"direction": "up"}'}}
    ],
}
_STEP_BODY = json.dumps({"action": _ACTION}).encode()


class EchoEnv:
    """Answers every action with the same board, in no time."""

    task_prompt = TASK_PROMPT
    tools_schema = [MOVE_TOOL]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start over."""
        return BOARD, {}

    def step(self, action: dict[str, Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Say what the bare handler says."""
        return BOARD, -0.1, False, False, {}


def _our_app(max_sessions: int) -> Any:
    from recipe.agent_env.env_service.app import create_app

    registry = EnvironmentRegistry()
    registry.register("echo", EchoEnv)
    return create_app(registry, ServiceSettings(max_sessions=max_sessions))


def _bare_app(max_sessions: int) -> Any:
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/api/environment/initialize")
    async def initialize(body: dict[str, Any]) -> dict[str, Any]:
        return {"message": "open", "env_id": "1", "observation": [{"role": "user", "content": BOARD}], "info": {}}

    @app.post("/api/environment/{env_id}/step")
    async def step(env_id: str, body: dict[str, Any]) -> dict[str, Any]:
        call = body["action"]["tool_calls"][0]
        message = {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": BOARD,
        }
        return {"observation": [message], "reward": -0.1, "done": False, "truncated": False, "info": {}}

    return app


_APPS = {"ours": _our_app, "bare": _bare_app}


@contextmanager
def server_process(which: str, max_sessions: int = 4096) -> Iterator[tuple[str, int]]:
    """One of the two servers in a process of its own; gives its address and process id."""
    here, there = _fork.Pipe()
    process = _fork.Process(target=_serve, args=(there, which, max_sessions), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, which: str, max_sessions: int) -> None:
    import uvicorn

    config = uvicorn.Config(
        _APPS[which](max_sessions),
        port=0,
        log_level="warning",
        access_log=False,
        backlog=4096,
        server_header=False,
        timeout_keep_alive=75,  # as the service's own command line sets it
    )
    listener = config.bind_socket()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            pipe.send(f"127.0.0.1:{listener.getsockname()[1]}")

    Server(config).run(sockets=[listener])


# ---- load ------------------------------------------------------------------------------------------------------------


class _Caller(asyncio.Protocol):
    """One connection that sends requests one after the other."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._buffer = b""
        self._waiting: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._waiting is None:
            return
        head = self._buffer[:end].lower()
        length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) >= end + 4 + length:
            answer, self._buffer = self._buffer, b""
            self._waiting.set_result(answer)

    async def post(self, path: str, body: bytes) -> bytes:
        """Send one request.

        Returns:
            The body of the answer.

        Raises:
            RuntimeError: The answer was not 200.
        """
        self._waiting = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self._waiting
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:300].decode())
        return answer.split(b"\r\n\r\n", 1)[1]


async def _open_callers(address: str, count: int) -> list[tuple[_Caller, str]]:
    """Connections, each with a session of its own."""
    host, port = address.split(":")
    loop = asyncio.get_running_loop()

    async def open_one(seed: int) -> tuple[_Caller, str]:
        _, caller = await loop.create_connection(_Caller, host, int(port))
        body = json.dumps({"env_name": "echo", "seed": seed, "env_kwargs": {}}).encode()
        return caller, json.loads(await caller.post("/api/environment/initialize", body))["env_id"]

    callers = []
    for start in range(0, count, 128):  # a burst of thousands of connections would measure the kernel's backlog
        callers += await asyncio.gather(*[open_one(seed) for seed in range(start, min(count, start + 128))])
    return callers


async def drive(address: str, num_callers: int, num_steps: int) -> tuple[float, list[float]]:
    """Step all sessions at once, so many times each.

    Returns:
        seconds: From the first request to the last answer.
        latencies: Of each step, in seconds.
    """
    callers = await _open_callers(address, num_callers)
    latencies: list[float] = []

    async def play(caller: _Caller, env_id: str) -> None:
        path = f"/api/environment/{env_id}/step"
        for _ in range(num_steps):
            sent = time.perf_counter()
            await caller.post(path, _STEP_BODY)
            latencies.append(time.perf_counter() - sent)

    started = time.perf_counter()
    await asyncio.gather(*[play(caller, env_id) for caller, env_id in callers])
    seconds = time.perf_counter() - started
    for caller, _ in callers:
        caller._transport.close()
    return seconds, latencies


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- figures ---------------------------------------------------------------------------------------------------------


def measure(quick: bool) -> list[Figure]:
    """Throughput against the bare handler, then thousands of sessions."""
    allow_many_connections(4096)
    figures = throughput(num_callers=64, num_steps=15 if quick else 30)
    figures.append(many_sessions(256 if quick else 2048))
    figures.append(full_service(512 if quick else 4096))
    return figures


def throughput(num_callers: int, num_steps: int) -> list[Figure]:
    """Requests per second and processor time per request of both servers."""
    cpu_ms: dict[str, list[float]] = {name: [] for name in _APPS}
    with server_process("ours") as ours, server_process("bare") as bare:
        servers = {"ours": ours, "bare": bare}

        def side(name: str) -> float:
            address, pid = servers[name]
            before = cpu_seconds(pid)
            seconds, latencies = asyncio.run(drive(address, num_callers, num_steps))
            cpu_ms[name].append(1000 * (cpu_seconds(pid) - before) / len(latencies))
            return len(latencies) / seconds

        for name in servers:
            side(name)  # imports and caches of the servers
            cpu_ms[name].clear()
        measured = alternate(5, {name: functools.partial(side, name) for name in servers})
    return [
        compare(
            "service_requests_per_s",
            f"steps per second of the service against a bare FastAPI handler, {num_callers} callers, one process",
            unit="requests/s",
            ours=measured["ours"],
            baseline=measured["bare"],
            goal=">= 0.7",
        ),
        compare(
            "service_cpu",
            "processor time per step of the service against a bare FastAPI handler",
            unit="ms",
            ours=cpu_ms["ours"],
            baseline=cpu_ms["bare"],
            inverted=True,
            goal=">= 0.7",
        ),
    ]


def many_sessions(count: int) -> Figure:
    """Share of steps that succeed with so many live sessions, and how long they take."""
    p50s, p99s, shares = [], [], []
    for _ in range(5):
        with server_process("ours", max_sessions=count) as (address, _):
            _, latencies = asyncio.run(drive(address, count, 3))
        shares.append(len(latencies) / (3 * count))
        latencies.sort()
        p50s.append(1000 * latencies[len(latencies) // 2])
        p99s.append(1000 * latencies[int(len(latencies) * 0.99)])
    return compare(
        f"service_{count}_sessions",
        f"share of steps that succeed with {count} live sessions, all stepping at once",
        unit="share",
        ours=shares,
        baseline=[1.0] * len(shares),
        goal=">= 1.0",
        details={"step_p50_ms": sorted(p50s)[2], "step_p99_ms": sorted(p99s)[2]},
    )


def full_service(count: int) -> Figure:
    """Episodes that succeed, through `EnvClient`, when twice as many come as the service has places."""

    async def play_all(url: str) -> int:
        # Thousands of connections at once take longer than the default limits on a machine that is busy besides.
        config = EnvClientConfig(
            endpoint=url,
            max_concurrent_episodes=count,
            busy_wait_s=600.0,
            connect_timeout_s=300.0,
            request_timeout_s=300.0,
        )

        async def play(client: AsyncEnvClient, seed: int) -> None:
            async with await client.open(env_name="echo", seed=seed) as session:
                await session.step(_ACTION)

        async with AsyncEnvClient(config) as client:
            played = await asyncio.gather(*[play(client, seed) for seed in range(count)], return_exceptions=True)
        failures = [failure for failure in played if failure is not None]
        if failures:
            print(f"{len(failures)} of {count} episodes failed, the first one with: {failures[0]}")
        return count - len(failures)

    succeeded, seconds = [], []
    with server_process("ours", max_sessions=count // 2) as (address, _):
        for _ in range(5):
            started = time.perf_counter()
            succeeded.append(float(asyncio.run(play_all(f"http://{address}"))))
            seconds.append(time.perf_counter() - started)
    return compare(
        f"service_{count}_episodes_on_{count // 2}_places",
        f"episodes that succeed, of {count} at once on a service with {count // 2} places",
        unit="episodes",
        ours=succeeded,
        baseline=[float(count)] * len(succeeded),
        goal=">= 1.0",
        details={"seconds": sorted(seconds)[2]},
    )


if __name__ == "__main__":
    run_script(measure, __doc__)
