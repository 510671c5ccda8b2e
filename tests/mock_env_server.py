# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A scripted environment service on a loopback port, with faults that can be switched on and off.

Owns a real HTTP server in a thread of its own, what its environments answer, the faults, and a ledger of what it
received and what it really applied. Knows nothing of the client. Use it as a context manager:

    with MockEnvServer() as server:
        server.script("game", EnvScript(steps=[Step(reward=0.5), Step(reward=1.0, done=True)]))
        server.fault("drop", call="step", step=1, after=True)
        ...
        assert server.episodes[0].rewards == [0.5, 1.0]

All attributes may be read, and all methods called, from the test's thread while the server runs.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

FaultKind = Literal["status", "delay", "hang", "drop", "slow_body", "slow_headers", "truncated", "html", "raw", "patch"]

ABSENT = object()
"""For `EnvScript.allow_parallel`: the service has no such route. For `patch`: the field is left out."""

MOVE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one step.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": ["up", "down", "left", "right"]}},
            "required": ["direction"],
        },
    },
}


@dataclass(kw_only=True)
class Step:
    """What one step answers."""

    observation: Any = field(default_factory=lambda: [{"role": "user", "content": "You moved."}])
    reward: Any = 0.0
    done: Any = False
    truncated: Any = False
    info: Any = field(default_factory=dict)


@dataclass(kw_only=True)
class EnvScript:
    """How the environments of one name behave. Values are sent as they are, also wrong ones."""

    observation: Any = field(default_factory=lambda: [{"role": "user", "content": "You stand at the start."}])
    info: Any = field(default_factory=dict)
    task_prompt: Any = "Reach the goal."
    tools_schema: Any = field(default_factory=lambda: [MOVE_TOOL])
    allow_parallel: Any = False
    """`ABSENT`: the route is missing (404)."""
    capabilities: Any = None
    """None: not declared."""
    start: dict[str, Any] = field(default_factory=dict)
    """Further fields of `initialize`'s answer, e.g. `{"done": True}`."""
    steps: list[Step] | Callable[[MockEpisode, dict[str, Any]], Step] = field(
        default_factory=lambda: [Step(reward=0.25), Step(reward=0.5), Step(reward=1.0, done=True)]
    )
    """In order, the last one again and again; or a function of the episode so far and the action."""


@dataclass(kw_only=True)
class Fault:
    """One thing that goes wrong, for the calls that match every given field."""

    kind: FaultKind
    call: str | None = None
    """`initialize`, `reset`, `step`, `close`, `task-prompt`, `tools-schema-openai`, ...; None: any."""
    env_name: str | None = None
    seed: int | None = None
    episode: int | None = None
    """Ordinal of the environment at this server, from 0; for `initialize`, the one it would become."""
    attempt: int | None = None
    """Ordinal among the environments of the same name and seed, from 0."""
    step: int | None = None
    """0-based index of the step within its environment."""
    times: int | None = 1
    """How many calls it hits; None: all."""
    after: bool = False
    """Whether the call is applied before it fails; `patch`, `truncated` and the slow kinds always apply it."""
    status: int = 500
    body: str | bytes = "Internal Server Error"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 1.0
    """Of a delay, or between two bytes."""
    patch: dict[str, Any] = field(default_factory=dict)
    """Fields of the answer to replace, or to leave out (`ABSENT`)."""
    hits: int = 0
    """How many calls it hit so far."""


@dataclass(kw_only=True)
class MockEpisode:
    """One environment, as the server really played it."""

    ordinal: int
    attempt: int
    env_id: str
    env_name: str
    seed: Any
    env_kwargs: Any
    script: EnvScript
    actions: list[dict[str, Any]] = field(default_factory=list)
    """Applied ones only, in order."""
    rewards: list[Any] = field(default_factory=list)
    """Of the applied actions."""
    steps_since_reset: int = 0
    resets: int = 0
    closes: int = 0
    keepalives: int = 0
    is_live: bool = True
    step_answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By step index, for services that declare `step_dedup`."""


@dataclass(kw_only=True)
class Received:
    """One request, whether it was answered or not."""

    call: str
    env_id: str | None
    env_name: str | None
    body: Any
    headers: dict[str, str]
    peer: Any
    fault: Fault | None = None


class MockEnvServer:
    """The service. Options are plain attributes and may be changed while it runs."""

    def __init__(
        self, *, keepalive_timeout_s: float = 75.0, ssl_context: ssl.SSLContext | None = None, path_prefix: str = ""
    ) -> None:
        self.episodes: list[MockEpisode] = []
        """Every environment ever made, in order."""
        self.received: list[Received] = []
        """Every request ever received, in order."""
        self.peak_live = 0
        """Most environments that were live at once."""
        self.peak_requests = 0
        """Most requests that were in work at once."""
        self.capacity: int | None = None
        """Most live environments; above it `initialize` is a 503 with `Retry-After`."""
        self.retry_after: str = "0.05"
        """What that header says."""
        self.bearer_token: str | None = None
        """When set, requests without it are a 401."""
        self.gone_status = 404
        """Answer for ids that are not live; many real services say 500."""
        self.is_strict_about_tool_calls = True
        """Index `action["tool_calls"]`, as many real environments do: a 500 when it is missing or null."""
        self.latency_s = 0.0
        """Added to every request."""
        self._scripts: dict[str, EnvScript] = {}
        self._default_script = EnvScript()
        self._faults: list[Fault] = []
        self._by_id: dict[str, MockEpisode] = {}
        self._keepalive_timeout_s = keepalive_timeout_s
        self._ssl_context = ssl_context
        self._path_prefix = path_prefix
        self._port = 0
        self._requests_in_work = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop_event: asyncio.Event | None = None

    # ---- for tests

    @property
    def url(self) -> str:
        """Root URL, without a trailing slash."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://127.0.0.1:{self._port}{self._path_prefix}"

    @property
    def live_count(self) -> int:
        """Environments that are live now."""
        return sum(episode.is_live for episode in self.episodes)

    def script(self, env_name: str, script: EnvScript) -> None:
        """Say how environments of one name behave. Without any script, every name works, as `EnvScript()` says."""
        self._scripts[env_name] = script

    def fault(self, kind: FaultKind, **fields: Any) -> Fault:
        """Switch a fault on; the first that matches a call hits it. Returns it, so that a test can read `hits`."""
        added = Fault(kind=kind, **fields)
        self._faults.append(added)
        return added

    def clear_faults(self) -> None:
        """Switch all faults off."""
        self._faults.clear()

    def calls(self, name: str) -> list[Received]:
        """The requests of one name, in order."""
        return [request for request in self.received if request.call == name]

    def wait_until(self, condition: Callable[[], bool], *, limit_s: float = 30.0) -> None:
        """Block until a condition holds; AssertionError when it does not within the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    def lose_sessions(self) -> None:
        """Forget all environments, as a restart does."""
        for episode in self.episodes:
            episode.is_live = False
        self._by_id.clear()

    def start(self) -> None:
        """Listen; on the same port as before when it was stopped."""
        is_ready = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(is_ready))
            except BaseException as exc:
                failures.append(exc)
                is_ready.set()

        self._thread = threading.Thread(target=run, name="mock-env-server", daemon=True)
        self._thread.start()
        is_ready.wait()
        if failures:
            raise failures[0]

    def stop(self) -> None:
        """Stop listening and drop every connection; sessions are lost."""
        if self._thread is not None and self._loop is not None and self._stop_event is not None:
            self._loop.call_soon_threadsafe(self._stop_event.set)
            self._thread.join()
            self._thread = None
            self.lose_sessions()

    def restart(self) -> None:
        """Stop and start again: same address, no sessions."""
        self.stop()
        self.start()

    def __enter__(self) -> MockEnvServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- the server

    async def _serve(self, is_ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_event = asyncio.Event()
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, keepalive_timeout=self._keepalive_timeout_s, shutdown_timeout=0.01, access_log=None)
        await runner.setup()
        site = web.TCPSite(
            runner, "127.0.0.1", self._port, ssl_context=self._ssl_context, reuse_address=True, backlog=1024
        )
        await site.start()
        self._port = runner.addresses[0][1]
        is_ready.set()
        await self._stop_event.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._requests_in_work += 1
        self.peak_requests = max(self.peak_requests, self._requests_in_work)
        try:
            return await self._answer(request)
        finally:
            self._requests_in_work -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        call, env_id = self._route(request)
        body = json.loads(raw) if raw else None
        episode = self._by_id.get(env_id) if env_id is not None else None
        name = episode.env_name if episode is not None else (body or {}).get("env_name")
        received = Received(
            call=call,
            env_id=env_id,
            env_name=name,
            body=body,
            headers=dict(request.headers),
            peer=request.transport.get_extra_info("peername") if request.transport is not None else None,
        )
        received.fault = fault = self._match(received, episode)
        self.received.append(received)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.bearer_token is not None and request.headers.get("Authorization") != f"Bearer {self.bearer_token}":
            return web.json_response({"detail": "missing or wrong bearer token"}, status=401)
        if fault is None:
            return self._apply(request, received, episode)
        return await self._fail(request, received, episode, fault)

    def _route(self, request: web.Request) -> tuple[str, str | None]:
        """Name of the call and id of the session."""
        prefix = f"{self._path_prefix}/api/environment/"
        if request.path == f"{self._path_prefix}/":
            return "health", None
        if request.path == f"{prefix}initialize":
            return "initialize", None
        env_id, _, call = request.path.removeprefix(prefix).rpartition("/")
        if not request.path.startswith(prefix) or not env_id:
            return "unknown", None
        return call, env_id

    def _match(self, received: Received, episode: MockEpisode | None) -> Fault | None:
        """The first fault that hits this call."""
        seed = episode.seed if episode is not None else (received.body or {}).get("seed")
        if episode is not None:
            ordinal, attempt, step = episode.ordinal, episode.attempt, episode.steps_since_reset
        else:
            ordinal, attempt, step = len(self.episodes), self._attempts(received.env_name, seed), 0
        facts = {
            "call": received.call,
            "env_name": received.env_name,
            "seed": seed,
            "episode": ordinal,
            "attempt": attempt,
            "step": step if received.call == "step" else None,
        }
        for fault in self._faults:
            is_left = fault.times is None or fault.hits < fault.times
            if is_left and all(getattr(fault, key) in (None, value) for key, value in facts.items()):
                fault.hits += 1
                return fault
        return None

    def _attempts(self, env_name: str | None, seed: Any) -> int:
        """How many environments of this name and seed there were."""
        return sum(episode.env_name == env_name and episode.seed == seed for episode in self.episodes)

    async def _fail(
        self, request: web.Request, received: Received, episode: MockEpisode | None, fault: Fault
    ) -> web.StreamResponse:
        """Answer, or do not, as a fault says."""
        if fault.kind == "delay" and not fault.after:
            await asyncio.sleep(fault.seconds)
            return self._apply(request, received, episode)
        answer = web.Response(text="not applied")
        if fault.after or fault.kind in ("patch", "truncated", "slow_body", "slow_headers"):
            answer = self._apply(request, received, episode)
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
            return answer
        if fault.kind == "hang":
            assert self._stop_event is not None
            await self._stop_event.wait()
        if fault.kind in ("hang", "drop"):
            return _drop(request)
        if fault.kind == "status":
            body = fault.body if isinstance(fault.body, bytes) else fault.body.encode()
            return web.Response(status=fault.status, body=body, headers=fault.headers)
        if fault.kind == "html":
            return web.Response(text="<html><body>Bad gateway, try later</body></html>", content_type="text/html")
        if fault.kind == "raw":
            body = fault.body if isinstance(fault.body, bytes) else fault.body.encode()
            return web.Response(body=body, headers={"Content-Type": "application/json", **fault.headers})
        assert isinstance(answer.body, bytes)
        if fault.kind == "patch":
            patched = {**json.loads(answer.body), **fault.patch}
            return _json({key: value for key, value in patched.items() if value is not ABSENT}, status=answer.status)
        return await self._send_badly(request, answer.body, fault)

    async def _send_badly(self, request: web.Request, body: bytes, fault: Fault) -> web.StreamResponse:
        """Send half an answer, or a whole one byte by byte."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        transport = request.transport
        assert transport is not None
        if fault.kind == "truncated":
            transport.write(head + body[: len(body) // 2])
            return _drop(request)
        at_once, slowly = (head, body) if fault.kind == "slow_body" else (head[:9], head[9:] + body)
        transport.write(at_once)
        for index in range(len(slowly)):
            if transport.is_closing():
                break
            transport.write(slowly[index : index + 1])
            await asyncio.sleep(fault.seconds)
        return _drop(request)

    # ---- the environments

    def _apply(self, request: web.Request, received: Received, episode: MockEpisode | None) -> web.Response:
        """Do what a call asks for."""
        if received.call == "health":
            return _json({"status": "ok"})
        if received.call == "unknown":
            return _json({"detail": "Not Found"}, status=404)
        if received.call == "initialize":
            return self._initialize(received)
        if episode is None or not episode.is_live:
            if received.call == "close":
                return _json({"message": "closed"})
            return web.Response(status=self.gone_status, text="no such environment")
        return self._session_call(request, received, episode)

    def _initialize(self, received: Received) -> web.Response:
        body = received.body
        if not isinstance(body.get("env_kwargs"), dict):
            return _json({"detail": "env_kwargs: Input should be a valid dictionary"}, status=422)
        if self._scripts and body["env_name"] not in self._scripts:
            return web.Response(status=500, text="Internal Server Error")
        if self.capacity is not None and self.live_count >= self.capacity:
            return web.Response(status=503, text="at capacity", headers={"Retry-After": self.retry_after})
        script = self._scripts.get(body["env_name"], self._default_script)
        episode = MockEpisode(
            ordinal=len(self.episodes),
            attempt=self._attempts(body["env_name"], body["seed"]),
            env_id=uuid.uuid4().hex,
            env_name=body["env_name"],
            seed=body["seed"],
            env_kwargs=body["env_kwargs"],
            script=script,
        )
        self.episodes.append(episode)
        self._by_id[episode.env_id] = episode
        self.peak_live = max(self.peak_live, self.live_count)
        answer = {"message": "ok", "env_id": episode.env_id, "observation": script.observation, "info": script.info}
        if script.capabilities is not None:
            answer["capabilities"] = script.capabilities
        return _json({**answer, **script.start})

    def _session_call(self, request: web.Request, received: Received, episode: MockEpisode) -> web.Response:
        script = episode.script
        if received.call == "step":
            return self._step(request, received, episode)
        if received.call == "reset":
            episode.resets += 1
            episode.steps_since_reset = 0
            episode.step_answers.clear()
            return _json({"observation": script.observation, "info": script.info})
        if received.call == "close":
            episode.closes += 1
            episode.is_live = False
            return _json({"message": "closed"})
        if received.call == "keepalive":
            episode.keepalives += 1
            return _json({"message": "ok"})
        if received.call == "task-prompt":
            return _json({"task_prompt": script.task_prompt})
        if received.call == "tools-schema-openai":
            return _json({"tools_schema": script.tools_schema})
        if received.call == "allow-parallel-tool-call" and script.allow_parallel is not ABSENT:
            return _json({"allow_parallel_tool_call": script.allow_parallel})
        return _json({"detail": "Not Found"}, status=404)

    def _step(self, request: web.Request, received: Received, episode: MockEpisode) -> web.Response:
        step_index = request.headers.get("X-Env-Step-Index")
        if step_index is not None and step_index in episode.step_answers:
            return _json(episode.step_answers[step_index])
        action = received.body["action"]
        if self.is_strict_about_tool_calls and not isinstance(action.get("tool_calls"), list):
            return web.Response(status=500, text="Internal Server Error")
        steps = episode.script.steps
        if callable(steps):
            step = steps(episode, action)
        else:
            step = steps[min(episode.steps_since_reset, len(steps) - 1)]
        episode.actions.append(action)
        episode.rewards.append(step.reward)
        episode.steps_since_reset += 1
        answer = {
            "observation": step.observation,
            "reward": step.reward,
            "done": step.done,
            "truncated": step.truncated,
            "info": step.info,
        }
        if step_index is not None:
            episode.step_answers[step_index] = answer
        return _json(answer)


def _json(answer: Any, *, status: int = 200) -> web.Response:
    """A JSON answer; NaN and infinity go out as Python writes them, as careless services do."""
    return web.Response(status=status, body=json.dumps(answer).encode(), content_type="application/json")


def _drop(request: web.Request) -> web.Response:
    """Close the connection without a further byte."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()
