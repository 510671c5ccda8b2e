# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One shape for every chat message that a style renders.

Owns the rules for roles, contents and calls; refuses to know tokens and templates. Templates drop or crash on what they
do not know; here everything is either brought into shape or refused by name.

- Roles: `developer` is system, `function` and `ipython` are tool; a missing or any other role is user.
- Content: null or missing is empty; parts are joined with nothing between them; a part that is no text is refused.
- Calls: only assistant messages have them; arguments may be an object, null or a JSON string.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError

ROLES = ("system", "user", "assistant", "tool")
# Other names of the same roles: OpenAI's, and Llama 3's for tool results.
ROLE_ALIASES = {"developer": "system", "function": "tool", "ipython": "tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryCall:
    """One tool call of an assistant message that belongs to the history."""

    name: str
    """Function name."""

    arguments: Any
    """The decoded arguments: an object, or the string itself when it is not a JSON object."""

    id: str | None
    """The call's id, when the message gave one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """A message in the one shape that styles render."""

    role: str
    """One of `ROLES`."""

    content: str
    """Text; empty when the message had none."""

    calls: tuple[HistoryCall, ...] = ()
    """Tool calls, only in assistant messages."""

    tool_call_id: str | None = None
    """Which call a tool message answers."""

    name: str | None = None
    """Name of the tool or speaker, when the message gave one."""


def normalise(messages: Sequence[Message] | None) -> list[ChatMessage]:
    """Bring messages into one shape.

    Args:
        messages: OpenAI chat messages; None counts as none.

    Returns:
        The same messages, in order.

    Raises:
        PromptStyleError: A message is no object, or its role, content or calls have no rule.
    """
    return [_normalise_one(message, index) for index, message in enumerate(messages or [])]


def _normalise_one(message: Message, index: int) -> ChatMessage:
    if not isinstance(message, dict):
        raise PromptStyleError(
            f"message {index}: expected an object with role and content, got {type(message).__name__}"
        )
    role = message.get("role") or "user"
    if not isinstance(role, str):
        raise PromptStyleError(f"message {index}: role must be a string, got {type(role).__name__}")
    role = ROLE_ALIASES.get(role, role if role in ROLES else "user")
    calls = message.get("tool_calls") if role == "assistant" else None
    return ChatMessage(
        role=role,
        content=content_text(message.get("content"), where=f"message {index}"),
        calls=tuple(_call(call, index) for call in _as_list(calls, index)),
        tool_call_id=_optional_text(message.get("tool_call_id"), "tool_call_id", index),
        name=_optional_text(message.get("name"), "name", index),
    )


def content_text(content: Any, *, where: str) -> str:
    """The text of a message's content: null is empty, text parts are joined with nothing between them.

    Args:
        content: A string, None, or a list of strings and `{"type": "text", "text": ...}` parts.
        where: What to name in an error.

    Raises:
        PromptStyleError: The content is of another type or has a part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, where) for part in content)
    raise PromptStyleError(
        f"{where}: content must be a string, null or a list of text parts, got {type(content).__name__}"
    )


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    found = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise PromptStyleError(f"{where}: only text parts can be rendered, got {found!r}; images are not supported")


def _as_list(calls: Any, index: int) -> list[Any]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise PromptStyleError(f"message {index}: tool_calls must be a list or null, got {type(calls).__name__}")
    return calls


def _call(call: Any, index: int) -> HistoryCall:
    # Some services leave out the wrapper and send {name, arguments}, as Qwen's template also accepts.
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise PromptStyleError(f"message {index}: a tool call must be an object with function.name, got {call!r:.200}")
    call_id = _optional_text(call.get("id"), "tool call id", index)
    return HistoryCall(name=name, arguments=_decoded(function.get("arguments")), id=call_id)


def _decoded(arguments: Any) -> Any:
    """Arguments as templates expect them: an object, although the wire carries a JSON string."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _optional_text(value: Any, what: str, index: int) -> str | None:
    if value is not None and not isinstance(value, str):
        raise PromptStyleError(f"message {index}: {what} must be a string or null, got {type(value).__name__}")
    return value
