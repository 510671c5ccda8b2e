# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a chat template does, found out by rendering small conversations.

Owns the questions that are asked of a template when a style is built. Refuses to know families by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.template_renderer import TemplateRenderer

_SYSTEM, _USER, _REPLY, _NEXT = "probe-system", "probe-user", "probe-reply", "probe-next"
_RESULT, _THOUGHT = "probe-result", "probe-thought"
_CALLEE, _VALUE = "probe_callee", "probe_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts:
    """What the probes found."""

    end_ids: tuple[int, ...]
    """Tokens that end an assistant turn: of a plain one, then of one with calls where that differs."""

    start_ids: frozenset[int]
    """Tokens that begin a user turn or the header."""

    opens_thinking: bool
    """Whether the header ends inside a thinking block."""

    shows_calls: bool
    """Whether the template renders calls of earlier turns and their results."""

    arguments_as_text: bool
    """Whether it wants the arguments of a call as JSON text."""

    rewrites: tuple[str, ...]
    """In which ways it writes earlier turns differently from how they were sampled."""


def probe(renderer: TemplateRenderer, encoder: PieceEncoder) -> TemplateFacts:
    """Find out what a template does.

    Args:
        renderer: The template. Its settings for calls are set to what is found.
        encoder: Tells control tokens.

    Returns:
        The facts.

    Raises:
        PromptStyleError: The template cannot render a plain conversation, or has no end-of-turn token.
    """
    plain = renderer.render(_plain())
    first = renderer.render([_message("user", _USER)])
    header = renderer.render([_message("user", _USER)], add_header=True).removeprefix(first)
    end = _end_of_turn(renderer.name, encoder, plain, first)
    call_end = _probe_calls(renderer, encoder, end)
    starts = [_last(_controls(encoder, first.partition(_USER)[0])), _first(_controls(encoder, header))]
    return TemplateFacts(
        end_ids=(end,) if call_end in (None, end) else (end, call_end),
        start_ids=frozenset(token_id for token_id in starts if token_id is not None),
        opens_thinking=header.rstrip().endswith("<think>"),
        shows_calls=renderer.shows_calls,
        arguments_as_text=renderer.arguments_as_text,
        rewrites=tuple(_rewrites(renderer, plain, header)),
    )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _plain(reply: str = _REPLY) -> list[Message]:
    return [_message("user", _USER), _message("assistant", reply), _message("user", _NEXT)]


def _controls(encoder: PieceEncoder, text: str) -> list[int]:
    return [token_id for _, token_id in encoder.split(text) if token_id is not None]


def _first(token_ids: list[int]) -> int | None:
    return token_ids[0] if token_ids else None


def _last(token_ids: list[int]) -> int | None:
    return token_ids[-1] if token_ids else None


def _end_of_turn(name: str, encoder: PieceEncoder, plain: str, first: str) -> int:
    between = plain.rpartition(_REPLY)[2].partition(_NEXT)[0]
    end = _first(_controls(encoder, between))
    if _REPLY not in plain or _NEXT not in plain or end is None:
        raise PromptStyleError(
            f"the chat template of {name} ends assistant turns with no token ({between!r}), so the engine cannot stop "
            "there; use another prompt style"
        )
    if end == _last(_controls(encoder, first.partition(_USER)[0])):
        raise PromptStyleError(
            f"the chat template of {name} ends an assistant turn only by starting the next one ({between!r}), so a "
            "turn cannot be ended on its own; write a prompt style for this family"
        )
    return end


def _probe_calls(renderer: TemplateRenderer, encoder: PieceEncoder, end: int) -> int | None:
    """Find out how calls are shown; gives the token that ends a turn with calls, or None."""
    for as_text in (False, True):
        arguments = f'{{"key": "{_VALUE}"}}' if as_text else {"key": _VALUE}
        call = {"id": "call00000", "type": "function", "function": {"name": _CALLEE, "arguments": arguments}}
        messages = [
            _message("user", _USER),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _RESULT, "tool_call_id": "call00000", "name": _CALLEE},
        ]
        rendered = _try(lambda messages=messages: renderer.render(messages))  # type: ignore[misc]
        if rendered is not None and all(text in rendered for text in (_CALLEE, _VALUE, _RESULT)):
            renderer.arguments_as_text = as_text
            between = rendered.rpartition(_VALUE)[2].partition(_RESULT)[0]
            controls = _controls(encoder, between)
            return end if end in controls else _first([i for i in controls if encoder.is_special(i)])
    renderer.shows_calls = False
    return None


def _rewrites(renderer: TemplateRenderer, plain: str, header: str) -> list[str]:
    upto_reply = plain[: plain.rindex(_REPLY)]
    found = []
    if not upto_reply.endswith(header):
        found.append("writes another header in front of them")
    if _moves(renderer, [_message("user", _USER)], [_TOOL]):
        found.append("moves the tools when a user message follows")
    if _moves(renderer, [_message("system", _SYSTEM), _message("user", _USER)], None):
        found.append("moves the system message when a user message follows")
    thinking = f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"
    if _THOUGHT not in renderer.render(_plain(thinking)):
        found.append("drops their thinking when a user message follows")
    return found


def _moves(renderer: TemplateRenderer, start: list[Message], tools: list[Message] | None) -> bool:
    """Whether a conversation's start is written differently once it has gone on; False where it is refused."""
    before = _try(lambda: renderer.render(start, tools))
    after = _try(lambda: renderer.render([*start, *_plain()[1:]], tools))
    return before is not None and after is not None and not after.startswith(before)


def _try(render: Callable[[], str]) -> str | None:
    try:
        return render()
    except PromptStyleError:
        return None
