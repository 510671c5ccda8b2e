# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What travels over HTTP: request models, strict JSON in and out, and the checks of both sides.

Owns: the shapes of DESIGN's protocol table, and the words of every "malformed" answer.
Refuses to know: sessions, and how a request got here.
"""

import functools
import json
import math
from numbers import Real
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from recipe.agent_env.env_service.errors import ServiceError, one_line

# ---- request models ----------------------------------------------------------------------------------------------


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class InitializeRequest(_Request):
    """Open an environment and start its first episode."""

    env_name: str
    seed: int | None = None
    env_kwargs: dict[str, Any] | None = None


class ResetRequest(_Request):
    """Start another episode in an open environment."""

    seed: int | None = None
    options: dict[str, Any] | None = None


class FunctionCall(_Request):
    """Name of a tool and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ToolCallMessage(_Request):
    """One tool call in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ActionMessage(BaseModel):
    """An assistant message. Further fields reach the environment as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None


class StepRequest(_Request):
    """Apply one assistant message."""

    action: ActionMessage


# ---- answer models (documentation; answers are written by `encode`) -------------------------------------------------


class Capabilities(BaseModel):
    """What this service offers beyond the common protocol."""

    step_dedup: bool = True
    keepalive: bool = True
    idle_timeout_s: float
    render: bool
    name: str
    version: str


class InitializeAnswer(BaseModel):
    """An open environment and its first observation."""

    message: str
    env_id: str
    observation: list[dict[str, Any]]
    info: dict[str, Any]
    done: bool
    capabilities: Capabilities


class ResetAnswer(BaseModel):
    """The first observation of an episode; `done` when the start is already the end."""

    observation: list[dict[str, Any]]
    info: dict[str, Any]
    done: bool


class StepAnswer(BaseModel):
    """What one action led to. `done` is the environment's own end, `truncated` a limit."""

    observation: list[dict[str, Any]]
    reward: float
    done: bool
    truncated: bool
    info: dict[str, Any]


class TaskPromptAnswer(BaseModel):
    """The task prompt of the present episode."""

    task_prompt: str


class ToolsSchemaAnswer(BaseModel):
    """The tools of the present episode in OpenAI's format."""

    tools_schema: list[dict[str, Any]]


class ParallelAnswer(BaseModel):
    """Whether an action may hold several calls."""

    allow_parallel_tool_call: bool


class MessageAnswer(BaseModel):
    """A short confirmation."""

    message: str


class RenderAnswer(BaseModel):
    """The present state for people: text or an HTML fragment."""

    render: str


class ErrorAnswer(BaseModel):
    """Why a request was refused or failed: one word and one line."""

    error: str
    message: str


# ---- requests ------------------------------------------------------------------------------------------------------


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is too large")
    return value


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a request body as a JSON object; an empty body is `{}`.

    Raises:
        ServiceError: 400, not JSON or not an object.
    """
    if not body:
        return {}
    try:
        parsed = _decoder.decode(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ServiceError(400, "bad_json", f"body is not JSON: {reason}") from None
    if not isinstance(parsed, dict):
        raise ServiceError(400, "bad_json", f"body: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _bad_request(error: ValidationError) -> ServiceError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    came = one_line(repr(first.get("input")), 60)
    return ServiceError(422, "bad_request", f"{where}: {first['msg']}, got {came}")


def parse_initialize(body: bytes) -> tuple[str, int | None, dict[str, Any]]:
    """Read `(env_name, seed, env_kwargs)`.

    Raises:
        ServiceError: 400 or 422.
    """
    try:
        request = InitializeRequest.model_validate(parse_object(body))
    except ValidationError as error:
        raise _bad_request(error) from None
    return request.env_name, request.seed, request.env_kwargs or {}


def parse_reset(body: bytes) -> tuple[int | None, dict[str, Any] | None]:
    """Read `(seed, options)`.

    Raises:
        ServiceError: 400 or 422.
    """
    try:
        request = ResetRequest.model_validate(parse_object(body))
    except ValidationError as error:
        raise _bad_request(error) from None
    return request.seed, request.options


def parse_step(body: bytes) -> dict[str, Any]:
    """Read the action, with `content` a text and `tool_calls` a list whatever came.

    Raises:
        ServiceError: 400 or 422.
    """
    raw = parse_object(body)
    try:
        StepRequest.model_validate(raw)
    except ValidationError as error:
        raise _bad_request(error) from None
    action = raw["action"]
    action.setdefault("role", "assistant")
    action["content"] = action.get("content") or ""
    action["tool_calls"] = action.get("tool_calls") or []
    return action


def parse_step_index(header: str | None) -> int | None:
    """Read the `X-Env-Step-Index` header.

    Raises:
        ServiceError: 422, not a count.
    """
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal() and len(header) < 10):
        raise ServiceError(422, "bad_step_index", f"X-Env-Step-Index: expected a count from 0, got {header[:20]!r}")
    return int(header)


# ---- tools ---------------------------------------------------------------------------------------------------------


class ToolChecker:
    """Checks the calls of an action against the tools of one environment.

    Raises:
        ValueError: The environment's own schema is malformed.
    """

    def __init__(self, tools_schema: list[dict[str, Any]]) -> None:
        self._validators: dict[str, Any] = {}
        for entry in tools_schema:
            try:
                function = entry["function"]
                name, parameters = function["name"], function.get("parameters") or {}
            except (TypeError, KeyError, AttributeError):
                raise ValueError(
                    f"tools_schema: expected OpenAI function entries, got {one_line(repr(entry))}"
                ) from None
            self._validators[name] = _make_validator(name, parameters)

    def check(self, tool_calls: list[dict[str, Any]], allow_parallel: bool) -> None:
        """Refuse calls that the environment could not take.

        Raises:
            ServiceError: 422, naming the call.
        """
        if len(tool_calls) > 1 and not allow_parallel:
            raise ServiceError(
                422, "parallel_tool_calls", f"expected at most one tool call in an action, got {len(tool_calls)}"
            )
        for call in tool_calls:
            name = call["function"]["name"]
            if name not in self._validators:
                raise ServiceError(422, "unknown_tool", f"no tool {name[:80]!r}; known: {sorted(self._validators)}")
            try:
                arguments = _decoder.decode(call["function"]["arguments"])
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise ServiceError(422, "bad_tool_arguments", f"{name}: arguments are not the JSON text of an object")
            validator = self._validators[name]
            if validator is not None:
                problem = next(validator.iter_errors(arguments), None)
                if problem is not None:
                    raise ServiceError(422, "bad_tool_arguments", f"{name}: {problem.message}")


def _make_validator(name: str, parameters: dict[str, Any]) -> Any:
    """A compiled schema, or None where every object fits."""
    if not any(parameters.get(key) for key in parameters if key not in ("type", "description", "title")):
        return None
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ValueError(f"tools_schema: parameters of {name!r}: {error.message}") from None
    return jsonschema.Draft202012Validator(parameters)


@functools.lru_cache(maxsize=256)
def checker_for(tools_schema_json: str) -> ToolChecker:
    """The checker of a tools schema given as JSON text; most sessions share one schema.

    Raises:
        ValueError: The schema is malformed.
    """
    return ToolChecker(json.loads(tools_schema_json))


# ---- answers -------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Plain Python for numpy-like scalars and arrays, and for tuples of them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))


def encode(payload: Any) -> bytes:
    """Write JSON. Half surrogates (from escapes in tool arguments) become question marks: they are no text.

    Raises:
        ValueError: A number is not finite, or the value contains itself.
        TypeError: A value has no JSON form.
    """
    return _encoder.encode(payload).encode("utf-8", errors="replace")


def normalise_observation(observation: Any, action: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Turn what an environment returned into chat messages.

    Args:
        observation: A text or a list of messages.
        action: What it answers; None after a reset.

    Raises:
        ValueError: Neither, or a message without role and text.
    """
    if isinstance(observation, str):
        calls = action["tool_calls"] if action else []
        if not calls:
            return [{"role": "user", "content": observation}]
        if len(calls) > 1:
            raise ValueError(f"observation: a text cannot answer {len(calls)} calls; return a list of messages")
        call = calls[0]
        return [{"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": observation}]
    if not isinstance(observation, list):
        raise ValueError(f"observation: expected a text or a list of messages, got {type(observation).__name__}")
    for position, message in enumerate(observation):
        if not isinstance(message, dict):
            raise ValueError(f"observation[{position}]: expected a message object, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"observation[{position}]: no text in 'role'")
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"observation[{position}]: no text in 'content', got {type(message.get('content')).__name__}"
            )
    return observation


def normalise_info(info: Any) -> dict[str, Any]:
    """Check an info object; None is `{}`.

    Raises:
        ValueError: Not a dict.
    """
    if info is None:
        return {}
    if not isinstance(info, dict):
        raise ValueError(f"info: expected a dict, got {type(info).__name__}")
    return info


def normalise_reward(reward: Any) -> float:
    """Check a reward.

    Raises:
        ValueError: Not a finite number.
    """
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise ValueError(f"reward: expected a number, got {one_line(repr(reward), 60)}")
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"reward: expected a finite number, got {value}")
    return value


def normalise_flag(name: str, flag: Any) -> bool:
    """Check `terminated` or `truncated`; numpy's booleans pass.

    Raises:
        ValueError: Not a boolean.
    """
    if isinstance(flag, bool):
        return flag
    if type(flag).__module__ == "numpy" and type(flag).__name__ in ("bool", "bool_"):
        return bool(flag)
    raise ValueError(f"{name}: expected True or False, got {one_line(repr(flag), 60)}")
