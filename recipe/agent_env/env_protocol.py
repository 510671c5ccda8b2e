# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment protocol as pure functions: build a call, judge an answer, read it into typed results.

Owns paths, bodies, headers, field rules, and the text of every failure. Opens no connection and keeps no state: the two
faces of `env_client` send what is built here and hand back what came.
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

from recipe.agent_env.env_config import EnvClientConfig
from recipe.agent_env.env_errors import (
    EnvCrashedError,
    EnvError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
    EnvTimeoutError,
    EnvUnreachableError,
)
from recipe.agent_env.env_messages import (
    MalformedAnswer,
    Message,
    build_action,
    describe,
    normalise_observation,
    scrub_surrogates,
    to_plain_object,
    to_plain_seed,
)

STEP_INDEX_HEADER = "X-Env-Step-Index"
"""0-based index of a step since `initialize` or the last `reset`; sent only to services that declare `step_dedup`."""

ABSENT_CALL_STATUSES = frozenset({404, 405, 500, 501})
"""What services without `allow-parallel-tool-call` were seen to answer."""

_EXCERPT_CHARS = 200
_MAX_ID_CHARS = 512
_TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
_T = TypeVar("_T")
_E = TypeVar("_E", bound=EnvError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a service declares beyond the protocol; the defaults are those of a service that declares nothing."""

    step_dedup: bool = False
    """A step sent twice with one step index is applied once and answered twice."""
    keepalive: bool = False
    """`POST /api/environment/{id}/keepalive` restarts the session's idle clock."""
    idle_timeout_s: float | None = None
    """Seconds without a call after which the service drops a session; None: not declared."""
    name: str = ""
    """The environment's name and ..."""
    version: str = ""
    """... version, for logs and checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReply:
    """What `initialize` and `reset` answer."""

    observation: list[Message]
    """The first observation, normalised."""
    info: dict[str, Any]
    """Never for the model."""
    is_terminated: bool
    """The start is already solved or lost."""
    capabilities: Capabilities
    """Only `initialize` declares them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did."""

    observation: list[Message]
    """What the model reads next, normalised."""
    reward: float
    """Finite."""
    terminated: bool
    """The task ended itself (`done` on the wire)."""
    truncated: bool
    """The environment's own limit ended the episode."""
    info: dict[str, Any]
    """Never for the model; may hold the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request of the protocol, ready to send."""

    name: str
    """`initialize`, `reset`, `step`, `close`, `task-prompt`, `tools-schema-openai`, ..."""
    method: str
    """`GET` or `POST`."""
    url: str
    """Complete, percent-encoded."""
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

    def __init__(self, config: EnvClientConfig) -> None:
        self._config = config
        self._secrets = config.secrets()

    # ---- calls

    def health(self) -> Call:
        """Ask whether the service is up."""
        return Call(
            name="health", method="GET", url=f"{self._config.endpoint}/", timeout_s=self._config.request_timeout_s
        )

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
            url=f"{self._config.endpoint}/api/environment/initialize",
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
        """One of the GETs: `task-prompt`, `tools-schema-openai`, `allow-parallel-tool-call`."""
        return self._session_call(name, env_name, env_id, method="GET")

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
            url=f"{self._config.endpoint}/api/environment/{quote(env_id, safe='')}/{name}",
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


# ---- readers: a decoded answer in, a typed result out; MalformedAnswer where it breaks the protocol


def read_env_id(reply: dict[str, Any]) -> str:
    """The id in `initialize`'s answer; a number becomes its text."""
    env_id = _required(reply, "env_id")
    if isinstance(env_id, int) and not isinstance(env_id, bool):
        env_id = str(env_id)
    if not isinstance(env_id, str) or not 0 < len(env_id) <= _MAX_ID_CHARS or env_id in (".", ".."):
        raise MalformedAnswer(f"'env_id' as non-empty text of at most {_MAX_ID_CHARS} letters", describe(env_id))
    return env_id


def read_start(reply: dict[str, Any]) -> StartReply:
    """What `initialize` and `reset` say about the start; both may say `done`, few do."""
    return StartReply(
        observation=normalise_observation(_required(reply, "observation")),
        info=_read_info(reply),
        is_terminated=_read_flag(reply, "done") if reply.get("done") is not None else False,
        capabilities=read_capabilities(reply.get("capabilities")),
    )


def read_step(reply: dict[str, Any]) -> StepResult:
    """What a step did. `observation`, `reward`, `done` and `truncated` must be there; `info` may be missing."""
    return StepResult(
        observation=normalise_observation(_required(reply, "observation")),
        reward=read_reward(_required(reply, "reward")),
        terminated=_read_flag(reply, "done"),
        truncated=_read_flag(reply, "truncated"),
        info=_read_info(reply),
    )


def read_reward(reward: object) -> float:
    """A reward as a float: any finite number; true is 1.0 and false 0.0; text, null, NaN and infinity are refused."""
    if isinstance(reward, (bool, int, float)):
        try:
            value = float(reward)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
    raise MalformedAnswer("'reward' as a finite number", describe(reward))


def read_task_prompt(reply: dict[str, Any]) -> str:
    """The task prompt; null is `""`."""
    prompt = _required(reply, "task_prompt")
    if prompt is None:
        return ""
    if not isinstance(prompt, str):
        raise MalformedAnswer("'task_prompt' as text", describe(prompt))
    return prompt


def read_tools_schema(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools; null is `[]`."""
    schema = _required(reply, "tools_schema")
    if schema is None:
        return []
    if not isinstance(schema, list) or not all(isinstance(tool, dict) for tool in schema):
        raise MalformedAnswer("'tools_schema' as a list of objects", describe(schema))
    return schema


def read_allow_parallel(reply: dict[str, Any]) -> bool:
    """Whether several calls in one turn are allowed; missing or null is False."""
    if reply.get("allow_parallel_tool_call") is None:
        return False
    return _read_flag(reply, "allow_parallel_tool_call")


def read_capabilities(declared: object) -> Capabilities:
    """Capabilities by a lenient rule: they are optional, so what is unknown or of the wrong type counts as absent."""
    if not isinstance(declared, dict):
        return Capabilities()
    idle = declared.get("idle_timeout_s")
    has_idle = isinstance(idle, (int, float)) and not isinstance(idle, bool) and 0 < idle < math.inf
    return Capabilities(
        step_dedup=declared.get("step_dedup") is True,
        keepalive=declared.get("keepalive") is True,
        idle_timeout_s=float(idle) if has_idle and isinstance(idle, (int, float)) and idle < 1e9 else None,
        name=declared["name"] if isinstance(declared.get("name"), str) else "",
        version=declared["version"] if isinstance(declared.get("version"), str) else "",
    )


def _required(reply: dict[str, Any], key: str) -> object:
    """A field that must be there, null or not."""
    if key not in reply:
        raise MalformedAnswer(f"an object with {key!r}", f"no {key!r} among {sorted(reply)[:20]}")
    return reply[key]


def _read_flag(reply: dict[str, Any], key: str) -> bool:
    """A bool; the integers 0 and 1 count, text never does (`"false"` is true to Python)."""
    flag = _required(reply, key)
    if isinstance(flag, bool) or (isinstance(flag, int) and flag in (0, 1)):
        return bool(flag)
    raise MalformedAnswer(f"{key!r} as true or false", describe(flag))


def _read_info(reply: dict[str, Any]) -> dict[str, Any]:
    """`info`; missing or null is `{}`."""
    info = reply.get("info")
    if info is None:
        return {}
    if not isinstance(info, dict):
        raise MalformedAnswer("'info' as an object", describe(info))
    return info


def _encode(body: dict[str, Any]) -> bytes:
    """A request body."""
    return json.dumps(body, allow_nan=False).encode("ascii")


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
