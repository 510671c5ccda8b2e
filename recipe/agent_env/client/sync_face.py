# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The sync face of the environment client, on requests, for notebooks and checks.

Owns the life of sessions that one thread opens and closes. The wire format, the failure texts and the retry rules are
shared with the async face and live elsewhere.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from tenacity import Retrying

from recipe.agent_env.client.answers import (
    StepResult,
    read_allow_parallel,
    read_env_id,
    read_start,
    read_step,
    read_task_prompt,
    read_tools_schema,
)
from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.endpoints import EndpointChooser
from recipe.agent_env.client.errors import EnvError, EnvGoneError
from recipe.agent_env.client.messages import Message
from recipe.agent_env.client.protocol import ABSENT_CALL_STATUSES, Answer, Call, EnvProtocol
from recipe.agent_env.client.retry import retry_options
from recipe.agent_env.client.session import ClientStats, SessionState
from recipe.agent_env.client.sync_transport import SyncTransport

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARNING"))

_T = TypeVar("_T")


class EnvSession(SessionState):
    """One open environment, sync face; see `AsyncEnvSession` for what each call promises."""

    def __init__(self, client: EnvClient, env_name: str, env_id: str, protocol: EnvProtocol) -> None:
        super().__init__(env_name, env_id, protocol)
        self._client = client
        self._is_closed = False

    def step(self, action: Message) -> StepResult:
        """Play one assistant message; see `AsyncEnvSession.step`."""
        self.raise_if_closed(self._is_closed)
        call = self.next_step_call(action)
        try:
            result = self._client.perform(call, read_step)
        except EnvError as exc:
            self.end_step(exc)
            raise
        self.end_step()
        return result

    def reset(self, *, seed: int | None = None, options: object = None) -> list[Message]:
        """Start over; see `AsyncEnvSession.reset`."""
        self.raise_if_closed(self._is_closed)
        call = self.protocol.reset(self.env_name, self.env_id, seed=seed, options=options)
        self.take_start(self._client.perform(call, read_start))
        self._fetch_task()
        return self.observation

    def keepalive(self) -> None:
        """Restart the idle clock of a service that declares `keepalive`; this face has no background task for it."""
        self.raise_if_closed(self._is_closed)
        timeout_s = self._client.config.request_timeout_s
        call = self.protocol.keepalive(self.env_name, self.env_id, timeout_s=timeout_s)
        self._client.carry_out(call, lambda answer: self.protocol.check_status(call, answer))

    def close(self) -> None:
        """End the environment, once. Raises no EnvError: failures are counted."""
        if not self._is_closed:
            self._is_closed = True
            self._client.close_session(self)

    def _fetch_task(self) -> None:
        """Fetch prompt, tools and the parallel rule."""
        protocol, perform = self.protocol, self._client.perform
        prompt_call = protocol.fetch("task-prompt", self.env_name, self.env_id)
        self.task_prompt = perform(prompt_call, read_task_prompt)
        tools_call = protocol.fetch("tools-schema-openai", self.env_name, self.env_id)
        self.take_tools(perform(tools_call, read_tools_schema))
        parallel_call = protocol.fetch("allow-parallel-tool-call", self.env_name, self.env_id)
        try:
            self.allow_parallel_tool_call = perform(parallel_call, read_allow_parallel)
        except EnvError as exc:
            if exc.status not in ABSENT_CALL_STATUSES:
                raise
            self.allow_parallel_tool_call = False

    def __enter__(self) -> EnvSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EnvClient:
    """Sync face of the client, for notebooks and checks.

    Same names and errors as `AsyncEnvClient`. It does not bound the number of open environments, sends no keepalive by
    itself, and cannot hear the answer of an `initialize` that timed out.
    """

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
        """Which service an episode goes to; this face asks none for its free places."""
        self._transport = SyncTransport(config, self.protocol)
        self._live: set[EnvSession] = set()

    def open(self, *, env_name: str, seed: object = None, env_kwargs: object = None) -> EnvSession:
        """Make an environment and fetch its prompt and tools; see `AsyncEnvClient.open`."""
        calls = {
            endpoint: protocol.initialize(env_name=env_name, seed=seed, env_kwargs=env_kwargs)
            for endpoint, protocol in self.protocols.items()
        }

        def attempt() -> tuple[Call, Answer, str]:
            with self.endpoints.opening() as endpoint:
                answer = self._transport.send(calls[endpoint])
                return calls[endpoint], answer, self.protocol.read(calls[endpoint], answer, read_env_id)

        first_call = calls[self.config.endpoints[0]]
        options = retry_options(self.config, first_call, self._count_retry, self.endpoints.has_other)
        call, answer, env_id = Retrying(**options)(attempt)
        session = EnvSession(self, env_name, env_id, self.protocols[call.endpoint])
        self._live.add(session)
        self.stats.opened += 1
        try:
            start = self.protocol.read(call, answer, read_start)
            session.capabilities = start.capabilities
            session.take_start(start)
            session._fetch_task()
        except BaseException as exc:
            if isinstance(exc, EnvError):
                self.endpoints.note_failure(call.endpoint, exc)
            session.close()
            raise
        self.endpoints.note_opened(call.endpoint)
        return session

    def check_health(self) -> None:
        """Ask whether the service is up; raises EnvError when it is not, of several when none is."""
        failures = []
        for protocol in self.protocols.values():
            call = protocol.health()
            try:
                self.carry_out(call, functools.partial(protocol.check_status, call))
            except EnvError as exc:
                failures.append(exc)
        if len(failures) == len(self.protocols):
            raise failures[-1]

    def close(self) -> None:
        """Close every open environment, then drop all connections."""
        for session in list(self._live):
            session.close()
        self._transport.close()

    def perform(self, call: Call, parse: Callable[[dict[str, Any]], _T]) -> _T:
        """Carry out a call and read its answer's fields."""
        return self.carry_out(call, lambda answer: self.protocol.read(call, answer, parse))

    def carry_out(self, call: Call, read: Callable[[Answer], _T]) -> _T:
        """Send a call, again where the retry rules allow, and read the answer.

        Raises:
            EnvError: The last failure.
        """
        return Retrying(**retry_options(self.config, call, self._count_retry))(lambda: read(self._transport.send(call)))

    def close_session(self, session: EnvSession) -> None:
        """Send `close` and count how it went; raises no EnvError."""
        self._live.discard(session)
        self.endpoints.release(session.protocol.endpoint)
        call = session.protocol.close(session.env_name, session.env_id)
        try:
            self.carry_out(call, lambda answer: self.protocol.check_status(call, answer))
        except EnvGoneError:
            self.stats.closed += 1
        except EnvError as exc:
            self.stats.close_failures += 1
            logger.warning("environment not closed, its idle limit has to end it: %s", exc)
        else:
            self.stats.closed += 1

    def _count_retry(self) -> None:
        self.stats.retries += 1

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
