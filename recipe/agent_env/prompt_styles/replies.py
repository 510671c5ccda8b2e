# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a reply of the policy said: the record, and what is wrong with it.

Owns the closed set of policy mistakes and the words in which the model is told. Refuses to know tokens and formats:
parsers hand it calls and broken calls.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from recipe.agent_env.prompt_styles.encoder import without_surrogates
from recipe.agent_env.prompt_styles.errors import Message

ReplyErrorKind = Literal[
    "bad_json",
    "not_an_object",
    "missing_name",
    "bad_arguments",
    "unclosed_call",
    "unopened_call",
    "too_long",
    "unknown_tool",
    "schema_mismatch",
]
REPLY_ERROR_KINDS: tuple[ReplyErrorKind, ...] = get_args(ReplyErrorKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyError:
    """Why a reply's calls cannot be sent: the policy's mistake, never the service's."""

    kind: ReplyErrorKind
    """One of a closed set; `schema_mismatch` is for callers that check arguments against the schema."""

    text: str
    """Feedback for the model; it names the call that is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """A reply as the environment may see it."""

    message: Message
    """OpenAI assistant message; `tool_calls` is always there, and empty when any call is broken."""

    error: ReplyError | None = None
    """The first thing wrong with it, or None."""

    calls_found: int = 0
    """Calls that the reply made or tried to make."""

    calls_broken: int = 0
    """How many of them are broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call that could be read."""

    name: str
    """Function name."""

    arguments: dict[str, Any]
    """Decoded arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenCall:
    """One call that could not be read."""

    kind: ReplyErrorKind
    """What is wrong."""

    detail: str
    """The same for the model, as the end of a sentence about the call."""

    is_located: bool = True
    """False when it is not known which call of the turn it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallText:
    """A reply's text, taken apart."""

    content: str
    """The text outside the calls."""

    calls: list[Call | BrokenCall] = field(default_factory=list)
    """In the order of the text."""


MAX_CALLS = 128
"""Calls of one reply that are read; with more, all of them are broken. Keeps the time for any reply small."""


def too_many_calls(content: str, found: int) -> CallText:
    """A reply whose calls are too many to be read."""
    detail = f"belongs to a turn with more than {MAX_CALLS} calls"
    return CallText(content=content, calls=[BrokenCall(kind="too_long", detail=detail)] * found)


class CallParser(Protocol):
    """Takes the text of one reply apart. Never raises, whatever the text."""

    def __call__(self, text: str, tools: Sequence[Message] | None) -> CallText:
        """Split the text of a reply into content and calls."""


def build_reply(taken_apart: CallText, reply_key: bytes, tools: Sequence[Message] | None) -> ParsedReply:
    """Make the message that would be sent, and the error if a call is broken.

    Args:
        taken_apart: Content and calls.
        reply_key: Bytes that stand for the sampled reply: the ids of its calls are derived from them.
        tools: OpenAI tool schemas by which names are checked; None checks nothing.

    Returns:
        The reply; with an error, its message carries no call.
    """
    known = None if tools is None else tool_names(tools)
    checked = [_known_or_broken(call, known) for call in taken_apart.calls]
    broken = [(number, call) for number, call in enumerate(checked, 1) if isinstance(call, BrokenCall)]
    digest = hashlib.sha256(reply_key).hexdigest()
    calls = [] if broken else [_wire_call(c, call_id(digest, i)) for i, c in enumerate(checked) if isinstance(c, Call)]
    message = {"role": "assistant", "content": without_surrogates(taken_apart.content), "tool_calls": calls}
    return ParsedReply(
        message=message,
        error=_error(broken, len(checked)) if broken else None,
        calls_found=len(checked),
        calls_broken=len(broken),
    )


def call_id(digest: str, index: int) -> str:
    """The id of a reply's call: the same for the same reply; nine letters and digits, which every template takes."""
    return hashlib.sha256(f"{digest}/{index}".encode()).hexdigest()[:9]


def tool_names(tools: Sequence[Message]) -> list[str]:
    """Names of the functions in OpenAI tool schemas, with or without the `function` wrapper; others are left out."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def shown(name: str) -> str:
    """A name that the model made up, short and quoted."""
    return json.dumps(name if len(name) <= 64 else name[:61] + "...", ensure_ascii=True)


def _known_or_broken(call: Call | BrokenCall, known: list[str] | None) -> Call | BrokenCall:
    if isinstance(call, BrokenCall) or known is None or call.name in known:
        return call
    available = "the tools are " + ", ".join(known[:32]) if known else "there are no tools"
    return BrokenCall(kind="unknown_tool", detail=f"calls an unknown tool {shown(call.name)}; {available}")


def _wire_call(call: Call, identifier: str) -> dict[str, Any]:
    arguments = without_surrogates(json.dumps(call.arguments, ensure_ascii=False))
    name = without_surrogates(call.name)
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _error(broken: list[tuple[int, BrokenCall]], found: int) -> ReplyError:
    number, first = broken[0]
    which = f"Tool call {number} of {found}" if first.is_located else f"One of the {found} tool calls"
    which = "The tool call" if found == 1 else which
    others = f" {len(broken) - 1} more of them cannot be read either." if len(broken) > 1 else ""
    nothing = "It was not executed." if found == 1 else "No call of this turn was executed."
    return ReplyError(kind=first.kind, text=f"{which} {first.detail}.{others} {nothing}")
