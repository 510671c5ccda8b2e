# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of an environment that the service can host, and small helpers for writing one.

Owns: what the service calls on an environment object, in which order, and what it expects back.
Refuses to know: HTTP, sessions, threads. An environment file that imports only this one can be tested without a server.

The smallest environment is a class with `reset` and `step`; deriving from `Environment` is optional, since the
service looks at the names below and falls back to the defaults given here. The life of one object:

    env = MyEnv(**env_kwargs)                       # `env_kwargs` of the data row; raise ValueError for what you refuse
    observation, info = env.reset(seed=seed, options=None)
    env.task_prompt, env.tools_schema, env.allow_parallel_tool_call, env.is_over      # read after every reset
    observation, reward, terminated, truncated, info = env.step(action)               # until one of the flags is true
    env.close()                                     # exactly once, also after a failure

Calls on one object never overlap. Synchronous methods run on a thread, so they may block; `async def` methods run on
the service's event loop, so they must not. An exception out of `step` ends the session: the policy's mistakes belong
in the observation, an exception says that the environment itself is broken.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""An OpenAI chat message: `role`, `content` (text), and for tool results `tool_call_id`."""

Observation: TypeAlias = str | list[Message]
"""Chat messages, or a text: a user message after `reset` or a turn without calls, else the result of the one call."""

ResetResult: TypeAlias = tuple[Observation, dict[str, Any]]
"""`(observation, info)`."""

StepResult: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
"""`(observation, reward, terminated, truncated, info)`."""


class Environment(ABC):
    """What the service calls. Override what you need; only `reset` and `step` are required."""

    task_prompt: str = ""
    """What the policy is told once, as system text. May be a property and may change with each reset."""

    tools_schema: list[dict[str, Any]] = []
    """The tools in OpenAI's format, see `tool`."""

    allow_parallel_tool_call: bool = False
    """Whether one action may hold several tool calls. The service refuses such an action otherwise."""

    is_over: bool = False
    """Read after `reset`: true when the start is already the end, so that no step will be asked for."""

    version: str = "0"
    """Told to clients, which record it, so that scores of different rules are not compared."""

    @abstractmethod
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode.

        Args:
            seed: Same seed, same episode. None: any.
            options: Like the constructor's arguments, for this and later episodes. None: as constructed.

        Returns:
            The first observation and an info object (JSON, never shown to the policy).

        Raises:
            ValueError: Seed or options are refused; the client is told why.
        """

    @abstractmethod
    def step(self, action: Message) -> StepResult | Awaitable[StepResult]:
        """Apply one assistant message.

        Args:
            action: `role`, `content` (text, maybe empty) and `tool_calls` (a list, maybe empty). The service has
                checked that every call names a tool of `tools_schema` and that its arguments are a JSON object that
                fits the tool's parameters; `read_tool_calls` gives them parsed.

        Returns:
            Observation, reward (finite), terminated (the task ended), truncated (a limit ended it), info.
        """

    def close(self) -> None:  # noqa: B027 (optional)
        """Free what the object holds."""

    def render(self) -> str | None:
        """The present state for people, as text or one self-contained HTML fragment. None: not offered."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of an action, its arguments parsed."""

    id: str
    """What the result message must carry as `tool_call_id`."""

    name: str
    """The tool's name."""

    arguments: dict[str, Any]
    """The parsed arguments."""


def read_tool_calls(action: Mapping[str, Any]) -> list[ToolCall]:
    """Parse the tool calls of an action.

    Args:
        action: An assistant message; `tool_calls` may be missing, None or empty.

    Returns:
        The calls in order.

    Raises:
        ValueError: A call's arguments are not a JSON object. The service has excluded that before `step`.
    """
    calls = []
    for call in action.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments of {call['function']['name']!r}: expected a JSON object, got {arguments!r}")
        calls.append(ToolCall(id=call["id"], name=call["function"]["name"], arguments=arguments))
    return calls


def tool(name: str, description: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe one tool in OpenAI's format.

    Args:
        name: What the policy calls.
        description: One line for the policy.
        parameters: Properties of the arguments, name to JSON schema; all are required. None: no arguments.
    """
    properties = parameters or {}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


def tool_result(call: ToolCall, text: str) -> Message:
    """The message that answers `call` with `text`."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
