# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The async face of the environment client, on aiohttp, for rollouts.

Owns the life of sessions on one event loop: slots, opening, stepping, keepalive, and the promise that whatever was
opened is closed, also when its opener was cancelled or gave up waiting. The wire format, the failure texts and the
retry rules are shared with the sync face and live elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying
from yarl import URL

from recipe.agent_env.client.answers import (
    StepResult,
    read_allow_parallel,
    read_env_id,
    read_num_free,
    read_render,
    read_start,
    read_step,
    read_task_prompt,
    read_tools_schema,
)
from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.endpoints import EndpointChooser
from recipe.agent_env.client.errors import EnvError, EnvGoneError, EnvTimeoutError, EnvUnreachableError
from recipe.agent_env.client.messages import Message
from recipe.agent_env.client.protocol import ABSENT_CALL_STATUSES, Answer, Call, EnvProtocol
from recipe.agent_env.client.retry import retry_options
from recipe.agent_env.client.session import ClientStats, SessionState

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARNING"))

_CHUNK_BYTES = 64 * 1024
_T = TypeVar("_T")


class AsyncEnvSession(SessionState):
    """One open environment. Calls on it must follow one another; `close` may come at any time."""

    def __init__(self, client: AsyncEnvClient, env_name: str, env_id: str, protocol: EnvProtocol) -> None:
        super().__init__(env_name, env_id, protocol)
        self._client = client
        self._close_task: asyncio.Task[None] | None = None
        self._keepalive_task: asyncio.Task[None] | None = None
        self._last_call_at = time.monotonic()

    async def step(self, action: Message) -> StepResult:
        """Play one assistant message.

        After a failure that may have been applied, only a service with `step_dedup` can be asked again.

        Args:
            action: `tool_calls` may be missing or null; it is always sent.

        Raises:
            EnvError: The service failed; whether it played the action is in `may_have_been_applied`.
            ValueError: The action cannot be sent.
            RuntimeError: The session is closed, or an earlier step of it failed and may have been applied.
        """
        self.raise_if_closed(self._close_task is not None)
        call = self.next_step_call(action)
        try:
            result = await self._client.perform(call, read_step)
        except EnvError as exc:
            self.end_step(exc)
            if isinstance(exc, EnvUnreachableError):
                self._client.endpoints.note_failure(call.endpoint, exc)
            raise
        self.end_step()
        self._last_call_at = time.monotonic()
        return result

    async def render(self) -> str:
        """The present state for people, as text or one self-contained fragment of HTML; "" where there is none.

        Raises:
            EnvError: The service failed.
            RuntimeError: The session is closed.
        """
        self.raise_if_closed(self._close_task is not None)
        if not self.capabilities.render:
            return ""
        try:
            picture = await self._client.perform(self.protocol.fetch("render", self.env_name, self.env_id), read_render)
        except EnvError as exc:
            if exc.status in ABSENT_CALL_STATUSES:
                return ""
            raise
        self._last_call_at = time.monotonic()
        return picture

    async def reset(self, *, seed: int | None = None, options: object = None) -> list[Message]:
        """Start over, and fetch prompt and tools anew, since a reset may change them. Episodes do not need it.

        Returns:
            The new first observation, also in `observation`.

        Raises:
            EnvError: The service failed.
            ValueError: Seed or options cannot be sent.
            RuntimeError: The session is closed.
        """
        self.raise_if_closed(self._close_task is not None)
        call = self.protocol.reset(self.env_name, self.env_id, seed=seed, options=options)
        self.take_start(await self._client.perform(call, read_start))
        await self._fetch_task()
        return self.observation

    async def close(self) -> None:
        """End the environment, once; later calls wait for the first. Raises no EnvError: failures are counted.

        A cancelled caller is cancelled, while the close itself goes on (see `AsyncEnvClient.aclose`).
        """
        await asyncio.shield(self.close_soon())

    def close_soon(self) -> asyncio.Task[None]:
        """Start closing without waiting; `AsyncEnvClient.aclose` waits for it."""
        if self._close_task is None:
            self._close_task = self._client.spawn(self._finish())
        return self._close_task

    async def _fetch_task(self) -> None:
        """Fetch prompt, tools and the parallel rule."""
        protocol, perform = self.protocol, self._client.perform
        prompt_call = protocol.fetch("task-prompt", self.env_name, self.env_id)
        self.task_prompt = await perform(prompt_call, read_task_prompt)
        tools_call = protocol.fetch("tools-schema-openai", self.env_name, self.env_id)
        self.take_tools(await perform(tools_call, read_tools_schema))
        parallel_call = protocol.fetch("allow-parallel-tool-call", self.env_name, self.env_id)
        try:
            self.allow_parallel_tool_call = await perform(parallel_call, read_allow_parallel)
        except EnvError as exc:
            if exc.status not in ABSENT_CALL_STATUSES:
                raise
            self.allow_parallel_tool_call = False
        self._last_call_at = time.monotonic()

    def _start_keepalive(self) -> None:
        """Keep the session from expiring while the model thinks, where the service has a call for that."""
        if self.capabilities.keepalive and self.capabilities.idle_timeout_s is not None:
            self._keepalive_task = asyncio.get_running_loop().create_task(
                self._keep_alive(self.capabilities.idle_timeout_s)
            )

    async def _keep_alive(self, idle_timeout_s: float) -> None:
        """Call keepalive after each third of the idle limit without a call, until cancelled or the session is gone."""
        interval_s = idle_timeout_s / 3
        timeout_s = min(idle_timeout_s - interval_s, self._client.config.request_timeout_s)
        call = self.protocol.keepalive(self.env_name, self.env_id, timeout_s=timeout_s)
        while True:
            idle_s = time.monotonic() - self._last_call_at
            if idle_s < interval_s:
                await asyncio.sleep(interval_s - idle_s)
                continue
            self._last_call_at = time.monotonic()
            try:
                await self._client.carry_out(call, lambda answer: self.protocol.check_status(call, answer))
            except EnvGoneError:
                self._client.stats.keepalive_failures += 1
                return
            except EnvError:
                self._client.stats.keepalive_failures += 1

    async def _finish(self) -> None:
        """The one close of this session."""
        if self._keepalive_task is not None:
            self._keepalive_task.cancel()
        try:
            await self._client.close_env(self.protocol.close(self.env_name, self.env_id))
        finally:
            self._client.forget(self)

    async def __aenter__(self) -> AsyncEnvSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncEnvClient:
    """Opens environments on one service or several, from one event loop; one HTTP session, however many episodes."""

    def __init__(self, config: EnvClientConfig) -> None:
        self.config = config
        """As given."""
        self.stats = ClientStats()
        """Counts so far."""
        self.protocols = {endpoint: EnvProtocol(config, endpoint) for endpoint in config.endpoints}
        """Build and read the calls of each service."""
        self.protocol = self.protocols[config.endpoints[0]]
        """The one of the first service."""
        self.endpoints = EndpointChooser(config.endpoints)
        """Which service an episode goes to."""
        self._headers = config.resolve_headers()
        self._proxies = {endpoint: config.resolve_proxy(endpoint) for endpoint in config.endpoints}
        self._ssl = config.ssl_context() if any(url.startswith("https") for url in config.endpoints) else None
        self._first_reports: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self._late_limit = max(1, config.max_concurrent_episodes // 8)
        self._late_count = 0
        self._live: set[AsyncEnvSession] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closed = False
        """Whether `aclose` was called: the run is ending, and nothing more can be opened."""

    async def open(self, *, env_name: str, seed: object = None, env_kwargs: object = None) -> AsyncEnvSession:
        """Make an environment and fetch its prompt and tools. Queues while `max_concurrent_episodes` are open.

        Args:
            env_name: Registered name at the service.
            seed: Whole number or None; numpy integers and whole floats are converted.
            env_kwargs: Object, JSON text of an object, or None; numpy values are converted.

        Raises:
            EnvError: The service failed; nothing stays open.
            ValueError: An argument cannot be sent; names the field.
            RuntimeError: The client is closed.
        """
        self._check_open()
        calls = {
            endpoint: protocol.initialize(env_name=env_name, seed=seed, env_kwargs=env_kwargs)
            for endpoint, protocol in self.protocols.items()
        }
        await self._slots.acquire()
        try:
            self._check_open()
            call, answer, env_id = await self._initialize(calls)
        except BaseException:
            self._slots.release()
            raise
        session = AsyncEnvSession(self, env_name, env_id, self.protocols[call.endpoint])
        self._live.add(session)
        self.stats.opened += 1
        try:
            self._check_open()
            start = self.protocol.read(call, answer, read_start)
            session.capabilities = start.capabilities
            session.take_start(start)
            await session._fetch_task()
            self._check_open()
        except BaseException as exc:
            if isinstance(exc, EnvError):
                self.endpoints.note_failure(call.endpoint, exc)
            session.close_soon()
            raise
        self.endpoints.note_opened(call.endpoint)
        session._start_keepalive()
        return session

    async def check_health(self) -> None:
        """Ask whether the service is up; raises EnvError when it is not, of several when none is."""

        async def check(protocol: EnvProtocol) -> None:
            call = protocol.health()
            await self.carry_out(call, lambda answer: protocol.check_status(call, answer))

        results = await asyncio.gather(*map(check, self.protocols.values()), return_exceptions=True)
        unforeseen = [result for result in results if not isinstance(result, EnvError | None)]
        if unforeseen or None not in results:
            failure = (unforeseen or results)[-1]
            assert failure is not None
            raise failure

    async def aclose(self, limit_s: float | None = None) -> None:
        """Close every open environment at once, wait for those that are just opening, then drop all connections.

        Args:
            limit_s: Longest wait, by default `close_timeout_s`; what is not done by then is cut off.
        """
        self.is_closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.config.close_timeout_s if limit_s is None else limit_s)
        try:
            while True:
                for session in list(self._live):
                    session.close_soon()
                left_s = deadline - loop.time()
                if not self._tasks or left_s <= 0:
                    break
                await asyncio.wait(set(self._tasks), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in set(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._http is not None:
                await self._http.close()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- for sessions

    async def perform(self, call: Call, parse: Callable[[dict[str, Any]], _T]) -> _T:
        """Carry out a call and read its answer's fields."""
        return await self.carry_out(call, lambda answer: self.protocol.read(call, answer, parse))

    async def carry_out(self, call: Call, read: Callable[[Answer], _T]) -> _T:
        """Send a call, again where the retry rules allow, and read the answer.

        Raises:
            EnvError: The last failure.
        """
        started = time.monotonic()
        try:
            return read(await self._send(call))
        except EnvError as exc:
            first_failure: EnvError | None = exc
        spent_s = time.monotonic() - started

        async def attempt() -> _T:
            nonlocal first_failure
            if first_failure is not None:
                failure, first_failure = first_failure, None
                raise failure
            return read(await self._send(call))

        # Tenacity costs as much as the request itself, so it is asked only once something has failed.
        return await AsyncRetrying(**retry_options(self.config, call, self._count_retry, spent_s=spent_s))(attempt)

    async def close_env(self, call: Call) -> None:
        """Send a `close` and count how it went; raises no EnvError."""
        try:
            await self.carry_out(call, lambda answer: self.protocol.check_status(call, answer))
        except EnvGoneError:
            self.stats.closed += 1
        except EnvError as exc:
            self.stats.close_failures += 1
            logger.warning("environment not closed, its idle limit has to end it: %s", exc)
        except BaseException:
            self.stats.close_failures += 1
            raise
        else:
            self.stats.closed += 1

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task that `aclose` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def forget(self, session: AsyncEnvSession) -> None:
        """Give a closed session's slot back."""
        self._live.discard(session)
        self.endpoints.release(session.protocol.endpoint)
        self._slots.release()

    # ---- opening

    async def _initialize(self, calls: dict[str, Call]) -> tuple[Call, Answer, str]:
        """Send `initialize` to a service with room, again and maybe elsewhere where the retry rules allow.

        Args:
            calls: The call, by endpoint.

        Returns:
            The call that worked, its answer, and the environment's id.
        """

        async def attempt() -> tuple[Call, Answer, str]:
            await self._ask_for_free_places()
            with self.endpoints.opening() as endpoint:
                answer = await self._send_initialize(calls[endpoint])
                return calls[endpoint], answer, self.protocol.read(calls[endpoint], answer, read_env_id)

        first_call = calls[self.config.endpoints[0]]
        options = retry_options(self.config, first_call, self._count_retry, self.endpoints.has_other)
        return await AsyncRetrying(**options)(attempt)

    async def _ask_for_free_places(self) -> None:
        """Keep the services' reports fresh; only the very first ones are waited for."""
        due = self.endpoints.due_reports()
        if due:
            asking = self.spawn(self._ask_all(due))
            if self._first_reports is None:
                self._first_reports = asking
        if self._first_reports is not None and not self._first_reports.done():
            await asyncio.wait({self._first_reports})

    async def _ask_all(self, endpoints: list[str]) -> None:
        await asyncio.gather(*map(self._ask, endpoints))

    async def _ask(self, endpoint: str) -> None:
        """Ask one service for its free places; one that does not answer is left out, as if it had failed to open."""
        protocol = self.protocols[endpoint]
        call = protocol.stats()
        try:
            num_free = protocol.read(call, await self._send(call), read_num_free)
        except EnvError as exc:
            num_free = None
            if isinstance(exc, (EnvUnreachableError, EnvTimeoutError)):
                self.endpoints.note_failure(endpoint, exc)
        self.endpoints.note_report(endpoint, num_free)

    # ---- one exchange

    async def _send_initialize(self, call: Call) -> Answer:
        """Send `initialize`, and keep listening in the background when the caller has to leave without the answer.

        The service may make the environment after our limit, or after a cancel. Its id is in the late answer only, and
        without the id nobody can close it.
        """
        task = self.spawn(self._send(call, patience_s=self.config.late_answer_s))
        try:
            await asyncio.wait({task}, timeout=call.timeout_s)
        except asyncio.CancelledError:
            self._late_count += 1
            self.spawn(self._close_late(call, task))
            raise
        if task.cancelled():
            raise self.protocol.abandoned(call)
        if task.done():
            return task.result()
        if self._late_count < self._late_limit:
            self._late_count += 1
            self.spawn(self._close_late(call, task))
        else:
            task.cancel()
        raise self.protocol.timed_out(call, was_sent=True, limit_s=call.timeout_s)

    async def _close_late(self, call: Call, task: asyncio.Task[Answer]) -> None:
        """Close the environment of an `initialize` that nobody waits for any more."""
        try:
            env_id = self.protocol.read(call, await task, read_env_id)
        except EnvError:
            return
        finally:
            self._late_count -= 1
        self.stats.opened += 1
        await self.close_env(self.protocols[call.endpoint].close(call.env_name or "", env_id))

    async def _send(self, call: Call, *, patience_s: float = 0.0) -> Answer:
        """Send one request and read its whole answer, within the call's limit plus `patience_s`.

        Raises:
            EnvUnreachableError, EnvTimeoutError, EnvProtocolError: No answer, not in time, or too long.
        """
        limit_s = call.timeout_s + patience_s
        connect_limit_s = min(self.config.connect_timeout_s, limit_s)
        headers = call.headers
        if call.body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            async with self._http_session(call).request(
                call.method,
                URL(call.url, encoded=True),
                data=call.body,
                headers=headers,
                timeout=_make_timeout(limit_s, connect_limit_s),
                allow_redirects=False,
                proxy=self._proxies[call.endpoint],
            ) as response:
                return Answer(
                    status=response.status,
                    body=await self._read(response, call),
                    retry_after=response.headers.get("Retry-After"),
                    location=response.headers.get("Location"),
                )
        except aiohttp.ConnectionTimeoutError as exc:
            raise self.protocol.timed_out(call, was_sent=False, limit_s=connect_limit_s) from exc
        except asyncio.TimeoutError as exc:
            raise self.protocol.timed_out(call, was_sent=True, limit_s=limit_s) from exc
        except (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError) as exc:
            raise self.protocol.unreachable(call, exc, was_sent=False) from exc
        except aiohttp.ClientResponseError as exc:
            raise self.protocol.not_http(call, exc) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self.protocol.unreachable(call, exc, was_sent=True) from exc

    async def _read(self, response: aiohttp.ClientResponse, call: Call) -> bytes:
        """The whole body, within the size limit."""
        length = response.content_length
        is_plain = "Content-Encoding" not in response.headers
        if is_plain and length is not None and length <= self.config.max_response_bytes:
            return await response.read()
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if len(body) > self.config.max_response_bytes:
                raise self.protocol.too_long(call)
        return bytes(body)

    def _http_session(self, call: Call) -> aiohttp.ClientSession:
        """The one HTTP session, made on first use since it belongs to the running loop."""
        if self._http is not None and self._http.closed:
            raise self.protocol.abandoned(call)
        if self._http is None:
            connector = aiohttp.TCPConnector(
                limit=self.config.max_concurrent_episodes + self._late_limit,
                keepalive_timeout=self.config.keepalive_s,
                ssl=self._ssl if self._ssl is not None else True,
            )
            self._http = aiohttp.ClientSession(
                connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        return self._http

    def _count_retry(self) -> None:
        self.stats.retries += 1

    def _reap(self, task: asyncio.Task[Any]) -> None:
        """Forget a finished task; its failure was handled by whoever awaited it."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed; make a new one")


@functools.lru_cache(maxsize=64)
def _make_timeout(limit_s: float, connect_limit_s: float) -> aiohttp.ClientTimeout:
    """aiohttp's form of a call's limits; the same few for all calls, and making one is slow."""
    return aiohttp.ClientTimeout(total=limit_s, sock_connect=connect_limit_s, ceil_threshold=math.inf)
