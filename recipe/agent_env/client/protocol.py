# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment protocol as pure functions: build a call, judge its answer.

Owns paths, bodies, headers, what a status means, and the text of every failure; the fields of an answer are the concern
of `answers`. Opens no connection and keeps no state: the two faces of `env_client` send what is built here and hand
back what came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote

from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.errors import (
    EnvCrashedError,
    EnvError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
    EnvTimeoutError,
    EnvUnreachableError,
)
from recipe.agent_env.client.messages import (
    MalformedAnswer,
    Message,
    build_action,
    describe,
    scrub_surrogates,
    to_plain_object,
    to_plain_seed,
)

STEP_INDEX_HEADER = "X-Env-Step-Index"
"""0-based index of a step since `initialize` or the last `reset`; sent only to services that declare `step_dedup`."""

ABSENT_CALL_STATUSES = frozenset({404, 405, 500, 501})
"""What services without `allow-parallel-tool-call` were seen to answer."""

_EXCERPT_CHARS = 200
_STATS_TIMEOUT_S = 2.0
_HEALTH_RETRY_S = 3.0
"""Whoever asks for health wants to hear of an outage, not to sit it out."""
_TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
_encoder = json.JSONEncoder(allow_nan=False)
_T = TypeVar("_T")
_E = TypeVar("_E", bound=EnvError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request of the protocol, ready to send."""

    name: str
    """`initialize`, `reset`, `step`, `close`, `task-prompt`, `tools-schema-openai`, ..."""
    method: str
    """`GET` or `POST`."""
    url: str
    """Complete, percent-encoded."""
    endpoint: str
    """Root URL of the service that it goes to."""
    body: bytes | None = None
    """UTF-8 JSON; None for no body."""
    headers: dict[str, str] = field(default_factory=dict)
    """On top of the client's own headers."""
    env_name: str | None = None
    """For error messages."""
    env_id: str | None = None
    """For error messages."""
    is_repeatable: bool = True
    """Whether sending it twice does no harm."""
    timeout_s: float
    """Longest wait for its answer."""
    retry_time_s: float = math.inf
    """No retry of it starts later than this, where that is shorter than the client's own limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One HTTP answer, read to its end."""

    status: int
    """HTTP status."""
    body: bytes
    """Decompressed."""
    retry_after: str | None = None
    """The `Retry-After` header, verbatim."""
    location: str | None = None
    """The `Location` header, verbatim."""


class EnvProtocol:
    """Builds calls for one service and turns its answers, or their absence, into results and errors."""

    def __init__(self, config: EnvClientConfig, endpoint: str) -> None:
        self._config = config
        self.endpoint = endpoint
        """Root URL of the service."""
        self._secrets = config.secrets()

    # ---- calls

    def health(self) -> Call:
        """Ask whether the service is up."""
        return self._service_call("health", "", timeout_s=self._config.request_timeout_s, retry_time_s=_HEALTH_RETRY_S)

    def stats(self) -> Call:
        """Ask how many places are free; only some services know this call. Nobody waits long for the answer."""
        timeout_s = min(_STATS_TIMEOUT_S, self._config.request_timeout_s)
        return self._service_call("stats", "stats", timeout_s=timeout_s, retry_time_s=0.0)

    def initialize(self, *, env_name: str, seed: object, env_kwargs: object) -> Call:
        """Make a new environment.

        Raises:
            ValueError: Name, seed or kwargs cannot be sent; names the field.
        """
        if not isinstance(env_name, str) or not env_name:
            raise ValueError(f"env_name must be a non-empty string, not {describe(env_name)}")
        body = {
            "env_name": str(env_name),
            "seed": to_plain_seed(seed),
            "env_kwargs": to_plain_object(env_kwargs, "env_kwargs"),
        }
        return Call(
            name="initialize",
            method="POST",
            url=f"{self.endpoint}/api/environment/initialize",
            endpoint=self.endpoint,
            body=_encode(body),
            env_name=str(env_name),
            timeout_s=self._config.request_timeout_s,
        )

    def reset(self, env_name: str, env_id: str, *, seed: object, options: object) -> Call:
        """Start the environment over.

        Raises:
            ValueError: Seed or options cannot be sent; names the field.
        """
        body = {"seed": to_plain_seed(seed), "options": to_plain_object(options, "options")}
        return self._session_call("reset", env_name, env_id, body=_encode(body))

    def step(self, env_name: str, env_id: str, action: Message, *, step_index: int | None) -> Call:
        """Play one assistant message.

        Args:
            action: See `build_action`.
            step_index: Given only when the service declared `step_dedup`; makes the call repeatable.

        Raises:
            ValueError: The action cannot be sent.
        """
        headers = {} if step_index is None else {STEP_INDEX_HEADER: str(step_index)}
        body = _encode({"action": build_action(action)})
        is_repeatable = step_index is not None
        return self._session_call("step", env_name, env_id, body=body, headers=headers, is_repeatable=is_repeatable)

    def close(self, env_name: str, env_id: str) -> Call:
        """End the environment."""
        limit_s = self._config.close_timeout_s
        return self._session_call("close", env_name, env_id, body=b"{}", timeout_s=limit_s, retry_time_s=limit_s)

    def keepalive(self, env_name: str, env_id: str, *, timeout_s: float) -> Call:
        """Restart the session's idle clock; only for services that declare `keepalive`."""
        return self._session_call("keepalive", env_name, env_id, body=b"{}", timeout_s=timeout_s, retry_time_s=0.0)

    def fetch(self, name: str, env_name: str, env_id: str) -> Call:
        """One of the GETs: `task-prompt`, `tools-schema-openai`, `allow-parallel-tool-call`, `render`."""
        return self._session_call(name, env_name, env_id, method="GET")

    def _service_call(self, name: str, path: str, *, timeout_s: float, retry_time_s: float) -> Call:
        """A GET that concerns no session."""
        return Call(
            name=name,
            method="GET",
            url=f"{self.endpoint}/{path}",
            endpoint=self.endpoint,
            timeout_s=timeout_s,
            retry_time_s=retry_time_s,
        )

    def _session_call(
        self,
        name: str,
        env_name: str,
        env_id: str,
        *,
        method: str = "POST",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        is_repeatable: bool = True,
        timeout_s: float | None = None,
        retry_time_s: float = math.inf,
    ) -> Call:
        """A call on one session."""
        return Call(
            name=name,
            method=method,
            url=f"{self.endpoint}/api/environment/{quote(env_id, safe='')}/{name}",
            endpoint=self.endpoint,
            body=body,
            headers=headers or {},
            env_name=env_name,
            env_id=env_id,
            is_repeatable=is_repeatable,
            timeout_s=self._config.request_timeout_s if timeout_s is None else timeout_s,
            retry_time_s=retry_time_s,
        )

    # ---- answers

    def read(self, call: Call, answer: Answer, parse: Callable[[dict[str, Any]], _T]) -> _T:
        """Judge an answer's status, decode it, and read it.

        Raises:
            EnvRejectedError, EnvGoneError, EnvCrashedError: By status.
            EnvProtocolError: Not a JSON object, or `parse` found it malformed.
        """
        self.check_status(call, answer)
        try:
            return parse(_decode(answer.body))
        except MalformedAnswer as exc:
            raise self._malformed(call, answer, exc.expected, exc.got) from exc
        except RecursionError as exc:
            raise self._malformed(call, answer, "an answer of sane depth", "one nested too deeply to read") from exc

    def unreachable(self, call: Call, cause: BaseException, *, was_sent: bool) -> EnvUnreachableError:
        """The error for a call without an answer."""
        got = f"{type(cause).__name__}: {self._redact(str(cause))[:_EXCERPT_CHARS] or 'no reason given'}"
        if "Too many open files" in got or getattr(cause, "errno", None) == 24:
            advice = "raise `ulimit -n` or lower max_concurrent_episodes"
        elif was_sent:
            advice = "the connection broke after the request was sent: see the service's log for a crash or restart"
        else:
            advice = "check that the service runs and that the endpoint is right"
        return self._error(
            EnvUnreachableError, call, "an answer", got, advice, may_have_been_applied=was_sent, is_transient=True
        )

    def timed_out(self, call: Call, *, was_sent: bool, limit_s: float) -> EnvTimeoutError:
        """The error for a call whose answer did not come in time."""
        if was_sent:
            got = f"no complete answer within {limit_s:g} s of sending it"
            advice = "see what the service was doing, or raise request_timeout_s"
        else:
            got = f"no connection within {limit_s:g} s"
            advice = "check host, port and firewall, or raise connect_timeout_s"
        return self._error(
            EnvTimeoutError, call, "an answer", got, advice, may_have_been_applied=was_sent, is_transient=not was_sent
        )

    def abandoned(self, call: Call) -> EnvUnreachableError:
        """The error for a call that our own side gave up because the client was closed."""
        advice = "close the client only after its episodes"
        return self._error(EnvUnreachableError, call, "an answer", "nothing, the client was closed meanwhile", advice)

    def too_long(self, call: Call) -> EnvProtocolError:
        """The error for an answer above the size limit."""
        limit = self._config.max_response_bytes
        return self._error(
            EnvProtocolError,
            call,
            f"an answer of at most {limit} bytes",
            "a longer one",
            "make the environment's observation or info smaller, or raise max_response_bytes",
        )

    def not_http(self, call: Call, cause: BaseException) -> EnvProtocolError:
        """The error for bytes that are no HTTP answer."""
        got = f"{type(cause).__name__}: {self._redact(str(cause))[:_EXCERPT_CHARS]}"
        return self._error(EnvProtocolError, call, "an HTTP answer", got, "check what listens at this address")

    def check_status(self, call: Call, answer: Answer) -> None:
        """Raise unless the service said 2xx; a call of which only the status matters needs no more.

        Raises:
            EnvRejectedError, EnvGoneError, EnvCrashedError: By status.
        """
        status = answer.status
        if 200 <= status < 300:
            return
        got = f"HTTP {status} {self._excerpt(answer.body)}"
        retry_after_s = _parse_retry_after(answer.retry_after)
        kind: type[EnvError] = EnvRejectedError
        applied = False
        if status < 400:
            advice = f"set the endpoint to where it redirects: {self._redact(str(answer.location))[:_EXCERPT_CHARS]}"
        elif status in (401, 403):
            advice = "check the bearer token and headers"
        elif status in (404, 410) and call.env_id is not None:
            kind = EnvGoneError
            advice = "the service lost the session (idle limit or restart): play the episode on a fresh environment"
        elif status == 404:
            advice = "check env_name, and that the endpoint is the service's root URL"
        elif status == 429:
            advice = "the service is full: lower max_concurrent_episodes or raise its capacity"
        elif status < 500:
            applied = status == 408
            advice = "compare what was sent with what the service accepts; its reason stands above"
        else:
            kind = EnvCrashedError
            applied = not (status == 503 and retry_after_s is not None)
            advice = "see the service's log"
        raise self._error(
            kind,
            call,
            "HTTP 200",
            got,
            advice,
            status=status,
            may_have_been_applied=applied,
            is_transient=status in _TRANSIENT_STATUSES,
            retry_after_s=retry_after_s,
        )

    def _malformed(self, call: Call, answer: Answer, expected: str, got: str) -> EnvProtocolError:
        """The error for an answer outside the agreed shape."""
        return self._error(
            EnvProtocolError,
            call,
            expected,
            f"{self._redact(got)} in the answer {self._excerpt(answer.body)}",
            "compare the service with the protocol table in the README",
            status=answer.status,
        )

    def _error(
        self,
        kind: type[_E],
        call: Call,
        expected: str,
        got: str,
        advice: str,
        *,
        status: int | None = None,
        may_have_been_applied: bool = True,
        is_transient: bool = False,
        retry_after_s: float | None = None,
    ) -> _E:
        """Put a failure's facts into one exception."""
        where = f"{call.name} at {call.url}"
        if call.env_name is not None:
            where += f" (environment {call.env_name!r}, id {call.env_id!r})"
        return kind(
            f"{where}: expected {expected}; got {got}; next: {advice}",
            call=call.name,
            url=call.url,
            env_name=call.env_name,
            env_id=call.env_id,
            status=status,
            may_have_been_applied=may_have_been_applied,
            is_transient=is_transient,
            retry_after_s=retry_after_s,
        )

    def _excerpt(self, body: bytes) -> str:
        """The first bytes of an answer, on one line and without secrets."""
        text = self._redact(body[: 8 * _EXCERPT_CHARS].decode("utf-8", "replace"))
        text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
        if not text:
            return "(empty)"
        return f"'{text}'" if len(text) <= _EXCERPT_CHARS else f"'{text[:_EXCERPT_CHARS]}...'"

    def _redact(self, text: str) -> str:
        """Text without our secrets: services were seen to echo request headers in error pages."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _encode(body: dict[str, Any]) -> bytes:
    """A request body."""
    return _encoder.encode(body).encode("ascii")


def _decode(body: bytes) -> dict[str, Any]:
    """An answer's JSON object."""
    try:
        text = body.decode("utf-8").removeprefix("\ufeff")
        reply = json.loads(text)
    except ValueError as exc:  # covers bad UTF-8, bad JSON and integers of absurd length
        raise MalformedAnswer("a JSON object in UTF-8", f"{type(exc).__name__}: {str(exc)[:80]}") from exc
    if "\\ud" in text or "\\uD" in text:
        reply = scrub_surrogates(reply)
    if not isinstance(reply, dict):
        raise MalformedAnswer("a JSON object", describe(reply))
    return reply


def _parse_retry_after(header: str | None) -> float | None:
    """Seconds to wait, from a number or an HTTP date; None when the header is missing or unreadable."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except ValueError:
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        seconds = (when - datetime.now(timezone.utc)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
