# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The sessions of one process: open environments, who may call them when, and when they go.

Owns: environment objects, one lock per session, step deduplication, capacity, idle limits, counters, the step log.
Refuses to know: HTTP and where the process runs. Every call takes the raw request body and returns the raw answer
body, so that a front may pass both through unread to another process.
"""

import asyncio
import inspect
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from recipe.agent_env.env_service import wire
from recipe.agent_env.env_service.capacity import CapacityGate
from recipe.agent_env.env_service.counters import Counters
from recipe.agent_env.env_service.errors import ServiceError, describe_exception
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.settings import ServiceSettings
from recipe.agent_env.env_service.threads import CallTimeoutError, ThreadPool

logger = logging.getLogger(__name__)

_MAX_TOMBSTONES = 4096


class _InvalidAnswerError(Exception):
    """The environment returned something outside its interface."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The body of a successful call."""

    body: bytes
    """JSON text."""

    env_id: str | None = None
    """The new session's id, after `initialize` only."""


class Session:
    """One open environment. All fields are touched on the event loop only."""

    __slots__ = (
        "allow_parallel",
        "checker",
        "env",
        "env_id",
        "env_name",
        "is_closed",
        "is_env_closed",
        "is_hung",
        "is_over",
        "last_answer",
        "last_body",
        "last_used",
        "lock",
        "num_steps",
        "seed",
        "task_prompt",
        "tools_schema",
    )

    def __init__(self, env_id: str, env_name: str, env: Any, now: float) -> None:
        self.env_id = env_id
        self.env_name = env_name
        self.env = env
        self.seed: int | None = None
        self.lock = asyncio.Lock()
        self.last_used = now
        self.num_steps = 0
        self.last_body: bytes | None = None
        self.last_answer: bytes | None = None
        self.is_over = False
        self.is_closed = False
        self.is_env_closed = False
        self.is_hung = False
        self.task_prompt = ""
        self.tools_schema: list[dict[str, Any]] = []
        self.allow_parallel = False
        self.checker = wire.checker_for("[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What a reset led to, checked."""

    observation: list[dict[str, Any]]
    info: dict[str, Any]
    is_over: bool
    task_prompt: str
    tools_schema: list[dict[str, Any]]
    allow_parallel: bool
    checker: wire.ToolChecker


class SessionStore:
    """Everything the protocol does, for the environments of this process.

    Args:
        registry: The environments on offer.
        settings: Limits; `max_sessions` is this store's share.
        id_prefix: Put before every session id, so that a front can route by it.
        clock: Seconds, monotonic; for idle limits.
        on_removed: Called whenever a session has left the table.
    """

    def __init__(
        self,
        registry: EnvironmentRegistry,
        settings: ServiceSettings,
        id_prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_removed: Callable[[], None] = lambda: None,
    ) -> None:
        self.counters = Counters()
        self.gate = CapacityGate(settings.max_sessions)
        self._registry = registry
        self._settings = settings
        self._id_prefix = id_prefix
        self._clock = clock
        self._on_removed = on_removed
        self._pool = ThreadPool(settings.max_threads)
        self._sessions: dict[str, Session] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._background: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._is_draining = False
        self._log_file: int | None = None
        self._operations: dict[str, Callable[..., Any]] = {
            "reset": self._reset,
            "step": self._step,
            "close": self._close,
            "keepalive": self._keepalive,
            "render": self._render,
            "task-prompt": self._task_prompt,
            "tools-schema-openai": self._tools_schema,
            "allow-parallel-tool-call": self._allow_parallel,
        }

    # ---- life of the store -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the step log and start looking for idle sessions."""
        if self._settings.step_log_path is not None:
            self._log_file = os.open(self._settings.step_log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._reaper = asyncio.create_task(self._reap_for_ever())

    async def shutdown(self) -> None:
        """Refuse new sessions and close every one that is open, within `close_timeout_s`."""
        self._is_draining = True
        if self._reaper is not None:
            self._reaper.cancel()
        for session in list(self._sessions.values()):
            self._remove(session, "closed", "the service shut down")
        if self._background:
            await asyncio.wait(self._background, timeout=self._settings.close_timeout_s)
        self._pool.shutdown()
        if self._log_file is not None:
            os.close(self._log_file)
            self._log_file = None

    # ---- the protocol ----------------------------------------------------------------------------------------------

    async def call(self, operation: str, env_id: str, body: bytes, step_index: str | None = None) -> Answer:
        """Answer one request.

        Args:
            operation: `initialize`, or the last part of a path of the protocol.
            env_id: The session; empty for `initialize`.
            body: The request's body as it came.
            step_index: The `X-Env-Step-Index` header, if any.

        Raises:
            ServiceError: The answer is an error.
        """
        if operation == "step":
            return Answer(body=await self._step(self._find(env_id), body, step_index))
        if operation == "initialize":
            return await self._initialize(body)
        if operation == "close" and env_id not in self._sessions:
            # Closing twice is safe, as clients that lost the first answer expect.
            return Answer(body=wire.encode({"message": "already closed, or never open"}))
        answer = self._operations[operation](self._find(env_id), body)
        return Answer(body=await answer if inspect.isawaitable(answer) else answer)

    async def _initialize(self, body: bytes) -> Answer:
        env_name, seed, env_kwargs = wire.parse_initialize(body)
        self._registry.check(env_name, env_kwargs)
        self._refuse_when_draining()
        if not await self.gate.acquire(self._settings.queue_wait_s):
            self.counters.add("refused")
            raise ServiceError(
                503,
                "at_capacity",
                f"{self.gate.limit} environments are open, which is the limit",
                self._settings.retry_after_s,
            )
        try:
            session, start = await self._open(env_name, seed, env_kwargs)
        except BaseException:
            self.gate.release()
            raise
        self._sessions[session.env_id] = session
        self.counters.add("opened")
        self.counters.change_live(env_name, +1)
        try:
            self._refuse_when_draining()
        except ServiceError:
            self._remove(session, "closed", "the service shut down")
            raise
        answer = {
            "message": f"{env_name} is open",
            "env_id": session.env_id,
            "observation": start.observation,
            "info": start.info,
            "done": start.is_over,
            "capabilities": {
                "step_dedup": True,
                "keepalive": True,
                "idle_timeout_s": self._settings.idle_timeout_s,
                "render": callable(getattr(session.env, "render", None)),
                "name": env_name,
                "version": str(getattr(session.env, "version", "0")),
            },
        }
        if self._log_file is not None:
            self._log(
                "initialize", session, env_kwargs=env_kwargs, observation=start.observation, terminated=start.is_over
            )
        return Answer(body=wire.encode(answer), env_id=session.env_id)

    async def _step(self, session: Session, body: bytes, step_index: str | None) -> bytes:
        index = wire.parse_step_index(step_index)
        action = wire.parse_step(body)
        async with session.lock:
            self._touch(session)
            if index is not None and index != session.num_steps:
                return self._replay(session, index, body)
            if session.is_over:
                raise ServiceError(409, "episode_over", "the episode has ended; reset or close the environment")
            session.checker.check(action["tool_calls"], session.allow_parallel)
            seconds, payload, answer = await self._call_env(session, "step", _run_step, _run_step_async, action)
            session.num_steps += 1
            session.last_body, session.last_answer = body, answer
            session.is_over = payload["done"] or payload["truncated"]
            session.last_used = self._clock()
            self.counters.record_step(seconds)
            if self._log_file is not None:
                self._log(
                    "step",
                    session,
                    index=session.num_steps - 1,
                    action=action,
                    terminated=payload.pop("done"),
                    **payload,
                )
            return answer

    def _replay(self, session: Session, index: int, body: bytes) -> bytes:
        """The stored answer of the last step, when that is what was asked for again."""
        if index == session.num_steps - 1 and session.last_answer is not None:
            if body != session.last_body:
                raise ServiceError(409, "step_conflict", f"step {index} was already applied with another action")
            self.counters.add("replayed_steps")
            return session.last_answer
        raise ServiceError(
            409,
            "step_out_of_order",
            f"X-Env-Step-Index: expected {session.num_steps}, got {index}",
            expected=session.num_steps,
        )

    async def _reset(self, session: Session, body: bytes) -> bytes:
        seed, options = wire.parse_reset(body)
        async with session.lock:
            self._touch(session)
            start = await self._call_env(session, "reset", _run_reset, _run_reset_async, seed, options)
            self._apply_start(session, start, seed)
            if self._log_file is not None:
                self._log("reset", session, options=options, **_start_fields(start))
            return wire.encode({"observation": start.observation, "info": start.info, "done": start.is_over})

    async def _close(self, session: Session, body: bytes) -> bytes:
        is_busy = session.lock.locked()
        closing = self._remove(session, "closed", "it was closed")
        if not is_busy:
            await asyncio.shield(closing)
        return wire.encode({"message": f"{session.env_name} is closed"})

    def _keepalive(self, session: Session, body: bytes) -> bytes:
        self._touch(session)
        return wire.encode({"message": "alive"})

    def _task_prompt(self, session: Session, body: bytes) -> bytes:
        self._touch(session)
        return wire.encode({"task_prompt": session.task_prompt})

    def _tools_schema(self, session: Session, body: bytes) -> bytes:
        self._touch(session)
        return wire.encode({"tools_schema": session.tools_schema})

    def _allow_parallel(self, session: Session, body: bytes) -> bytes:
        self._touch(session)
        return wire.encode({"allow_parallel_tool_call": session.allow_parallel})

    async def _render(self, session: Session, body: bytes) -> bytes:
        if not callable(getattr(session.env, "render", None)):
            raise ServiceError(404, "no_rendering", f"{session.env_name} has no rendering")
        async with session.lock:
            self._touch(session)
            picture = await self._call_env(session, "render", _run_render, None)
        if picture is None:
            raise ServiceError(404, "no_rendering", f"{session.env_name} has no rendering")
        return picture

    # ---- calls into environments -----------------------------------------------------------------------------------

    async def _open(self, env_name: str, seed: int | None, env_kwargs: dict[str, Any]) -> tuple[Session, _Start]:
        """Build an environment and reset it; what fails half-way is closed."""
        settings = self._settings
        created: list[Any] = []

        def close_late() -> None:
            for env in created:
                self._spawn(self._close_env(Session("", env_name, env, 0.0)))

        def create() -> bool:
            env = self._registry.create(env_name, env_kwargs)
            created.append(env)
            for method in ("reset", "step"):
                if not callable(getattr(env, method, None)):
                    raise _InvalidAnswerError(f"{type(env).__name__} has no method {method!r}")
            return inspect.iscoroutinefunction(env.reset)

        def create_and_reset() -> _Start | None:
            return None if create() else _run_reset(created[0], seed, None)

        try:
            start = await self._pool.run(settings.call_timeout_s, create_and_reset, on_late=close_late)
            if start is None:
                start = await self._await(_run_reset_async(created[0], seed, None), close_late)
        except CallTimeoutError:
            self.counters.add("timed_out")
            raise ServiceError(
                504, "environment_timeout", f"{env_name}: no start within {settings.call_timeout_s:g} s"
            ) from None
        except Exception as error:
            close_late()
            if isinstance(error, ServiceError):
                raise  # an environment behind another service, which has no place left
            if isinstance(error, ValueError):
                raise ServiceError(422, "bad_options", f"{env_name}: {error}") from None
            self.counters.add("crashed")
            raise _to_service_error(env_name, "initialize", error) from error
        session = Session(self._id_prefix + secrets.token_urlsafe(18), env_name, created[0], self._clock())
        self._apply_start(session, start, seed)
        return session, start

    async def _call_env(
        self,
        session: Session,
        method: str,
        run: Callable[..., Any],
        run_async: Callable[..., Coroutine[Any, Any, Any]] | None,
        *args: Any,
    ) -> Any:
        """Call into an environment, whose lock is held, and turn every way to fail into the end of its session."""

        def close_late() -> None:
            session.is_hung = False
            self._spawn(self._close_env(session))

        env = session.env
        try:
            if run_async is not None and inspect.iscoroutinefunction(getattr(env, method)):
                return await self._await(run_async(env, *args), close_late)
            return await self._pool.run(self._settings.call_timeout_s, run, env, *args, on_late=close_late)
        except CallTimeoutError:
            session.is_hung = True
            self._remove(session, "timed_out", f"its {method} ran past {self._settings.call_timeout_s:g} s")
            raise ServiceError(
                504,
                "environment_timeout",
                f"{session.env_name}: {method} ran past {self._settings.call_timeout_s:g} s; the session is lost",
            ) from None
        except asyncio.CancelledError:
            session.is_hung = True
            raise
        except Exception as error:
            if method == "reset" and isinstance(error, ValueError):
                raise ServiceError(422, "bad_options", f"{session.env_name}: {error}") from None
            failure = _to_service_error(session.env_name, method, error)
            self._remove(session, "crashed", failure.text)
            raise failure from error

    async def _await(self, coroutine: Coroutine[Any, Any, Any], on_late: Callable[[], None]) -> Any:
        """Await an environment's coroutine within the call limit.

        Raises:
            CallTimeoutError: Past the limit; the coroutine is cancelled and `on_late` follows once it has ended.
        """
        task = asyncio.create_task(coroutine)
        done, _ = await asyncio.wait({task}, timeout=self._settings.call_timeout_s)
        if done:
            if task.cancelled():
                raise RuntimeError("the environment cancelled its own task")
            return task.result()

        def ended(ended_task: "asyncio.Task[Any]") -> None:
            if not ended_task.cancelled():
                ended_task.exception()  # mark as seen
            on_late()

        task.add_done_callback(ended)
        task.cancel()
        raise CallTimeoutError()

    async def _close_env(self, session: Session) -> None:
        """Call the environment's `close` once, after whatever runs in it now."""
        async with session.lock:
            if session.is_env_closed or session.is_hung:
                return  # hung: comes back here when the call has ended
            session.is_env_closed = True
            close = getattr(session.env, "close", None)
            if close is None:
                return
            try:
                if inspect.iscoroutinefunction(close):
                    await asyncio.wait_for(close(), self._settings.close_timeout_s)
                else:
                    await self._pool.run(self._settings.close_timeout_s, close)
            except Exception as error:
                self.counters.add("close_failures")
                logger.warning("%s: close failed: %s", session.env_name, describe_exception(error))

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    def _find(self, env_id: str) -> Session:
        session = self._sessions.get(env_id)
        if session is None:
            reason = self._tombstones.get(env_id)
            if reason is None:
                raise ServiceError(404, "unknown_session", f"no environment with id {env_id[:60]!r} is open here")
            raise ServiceError(410, "session_gone", f"the environment is gone: {reason}")
        return session

    def _refuse_when_draining(self) -> None:
        if self._is_draining:
            raise ServiceError(503, "shutting_down", "the service is shutting down", self._settings.retry_after_s)

    def _touch(self, session: Session) -> None:
        """Count the request as a sign of life; refuse it when the session went while it waited for the lock."""
        if session.is_closed:
            self._find(session.env_id)
        session.last_used = self._clock()

    def _apply_start(self, session: Session, start: _Start, seed: int | None) -> None:
        session.seed = seed
        session.num_steps = 0
        session.last_body = session.last_answer = None
        session.is_over = start.is_over
        session.task_prompt = start.task_prompt
        session.tools_schema = start.tools_schema
        session.allow_parallel = start.allow_parallel
        session.checker = start.checker
        session.last_used = self._clock()

    def _remove(self, session: Session, count: str, reason: str) -> Awaitable[None]:
        """Take a session out of the table and close its environment in the background.

        Returns:
            Done when the environment is closed.
        """
        if not session.is_closed:
            session.is_closed = True
            del self._sessions[session.env_id]
            self._tombstones[session.env_id] = reason
            if len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
            self.counters.add(count)
            self.counters.change_live(session.env_name, -1)
            self.gate.release()
            self._on_removed()
            if self._log_file is not None:
                self._log("close", session, how=count, num_steps=session.num_steps)
        return self._spawn(self._close_env(session))

    async def _reap_for_ever(self) -> None:
        idle_timeout_s = self._settings.idle_timeout_s
        while True:
            await asyncio.sleep(min(1.0, idle_timeout_s / 4))
            self.reap()

    def reap(self) -> None:
        """Close every session that is idle for longer than the limit."""
        oldest = self._clock() - self._settings.idle_timeout_s
        for session in list(self._sessions.values()):
            if session.last_used < oldest and not session.lock.locked():
                self._remove(session, "reaped", f"no request came for {self._settings.idle_timeout_s:g} s")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _log(self, event: str, session: Session, **fields: Any) -> None:
        """Append one line to the step log. One write per line, so that several processes can share the file."""
        assert self._log_file is not None
        line = {
            "time": time.time(),
            "event": event,
            "env_id": session.env_id,
            "env_name": session.env_name,
            "seed": session.seed,
            **fields,
        }
        os.write(self._log_file, wire.encode(line) + b"\n")


# ---- what runs inside a thread or a task, on one environment --------------------------------------------------------


def _start_fields(start: _Start) -> dict[str, Any]:
    return {"observation": start.observation, "terminated": start.is_over}


def _run_reset(env: Any, seed: int | None, options: dict[str, Any] | None) -> _Start:
    return _check_start(env, env.reset(seed=seed, options=options))


async def _run_reset_async(env: Any, seed: int | None, options: dict[str, Any] | None) -> _Start:
    return _check_start(env, await env.reset(seed=seed, options=options))


def _check_start(env: Any, result: Any) -> _Start:
    try:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"reset: expected (observation, info), got {_shape(result)}")
        observation = wire.normalise_observation(result[0], None)
        info = wire.normalise_info(result[1])
        wire.encode([observation, info])
        task_prompt = getattr(env, "task_prompt", "")
        if not isinstance(task_prompt, str):
            raise ValueError(f"task_prompt: expected a text, got {type(task_prompt).__name__}")
        tools_schema = getattr(env, "tools_schema", [])
        if not isinstance(tools_schema, list):
            raise ValueError(f"tools_schema: expected a list, got {type(tools_schema).__name__}")
        return _Start(
            observation=observation,
            info=info,
            is_over=wire.normalise_flag("is_over", getattr(env, "is_over", False)),
            task_prompt=task_prompt,
            tools_schema=tools_schema,
            allow_parallel=bool(getattr(env, "allow_parallel_tool_call", False)),
            checker=wire.checker_for(wire.encode(tools_schema).decode()),
        )
    except (ValueError, TypeError) as error:
        raise _InvalidAnswerError(str(error)) from None


def _run_step(env: Any, action: dict[str, Any]) -> tuple[float, dict[str, Any], bytes]:
    started = time.perf_counter()
    result = env.step(action)
    seconds = time.perf_counter() - started
    return seconds, *_check_step(action, result)


async def _run_step_async(env: Any, action: dict[str, Any]) -> tuple[float, dict[str, Any], bytes]:
    started = time.perf_counter()
    result = await env.step(action)
    seconds = time.perf_counter() - started
    return seconds, *_check_step(action, result)


def _check_step(action: dict[str, Any], result: Any) -> tuple[dict[str, Any], bytes]:
    try:
        if not isinstance(result, tuple) or len(result) != 5:
            raise ValueError(f"step: expected (observation, reward, terminated, truncated, info), got {_shape(result)}")
        observation, reward, terminated, truncated, info = result
        payload = {
            "observation": wire.normalise_observation(observation, action),
            "reward": wire.normalise_reward(reward),
            "done": wire.normalise_flag("terminated", terminated),
            "truncated": wire.normalise_flag("truncated", truncated),
            "info": wire.normalise_info(info),
        }
        return payload, wire.encode(payload)
    except (ValueError, TypeError) as error:
        raise _InvalidAnswerError(str(error)) from None


def _run_render(env: Any) -> bytes | None:
    picture = env.render()
    if picture is None:
        return None
    if not isinstance(picture, str):
        raise _InvalidAnswerError(f"render: expected a text, got {type(picture).__name__}")
    return wire.encode({"render": picture})


def _shape(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


def _to_service_error(env_name: str, method: str, error: Exception) -> ServiceError:
    if isinstance(error, _InvalidAnswerError):
        return ServiceError(500, "environment_invalid_answer", f"{env_name}: {error}")
    logger.warning("%s: %s raised", env_name, method, exc_info=error)
    return ServiceError(500, "environment_crashed", f"{env_name}: {method} raised {describe_exception(error)}")
