# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The fields of the environment protocol's answers: a decoded JSON object in, a typed result out.

Owns the rule for each field, and what a service may leave out. Pure functions; where an answer breaks the protocol they
raise `MalformedAnswer`, and whoever knows the call makes an error of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from recipe.agent_env.client.messages import MalformedAnswer, Message, describe, normalise_observation

_MAX_ID_CHARS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a service declares beyond the protocol; the defaults are those of a service that declares nothing."""

    step_dedup: bool = False
    """A step sent twice with one step index is applied once and answered twice."""
    keepalive: bool = False
    """`POST /api/environment/{id}/keepalive` restarts the session's idle clock."""
    render: bool = False
    """`GET /api/environment/{id}/render` shows the present state to people."""
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


def read_render(reply: dict[str, Any]) -> str:
    """The state for people, as text or a fragment of HTML."""
    picture = _required(reply, "render")
    if not isinstance(picture, str):
        raise MalformedAnswer("'render' as text", describe(picture))
    return picture


def read_num_free(reply: dict[str, Any]) -> int | None:
    """Free places in a `stats` answer; None where it does not tell, since the call is no part of the protocol."""
    counts = [reply.get(key, 0) for key in ("max_sessions", "live_sessions", "waiting")]
    if "max_sessions" not in reply or not all(isinstance(n, int) and not isinstance(n, bool) for n in counts):
        return None
    return counts[0] - counts[1] - counts[2]


def read_capabilities(declared: object) -> Capabilities:
    """Capabilities by a lenient rule: they are optional, so what is unknown or of the wrong type counts as absent."""
    if not isinstance(declared, dict):
        return Capabilities()
    idle = declared.get("idle_timeout_s")
    has_idle = isinstance(idle, (int, float)) and not isinstance(idle, bool) and 0 < idle < math.inf
    return Capabilities(
        step_dedup=declared.get("step_dedup") is True,
        keepalive=declared.get("keepalive") is True,
        render=declared.get("render") is True,
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
