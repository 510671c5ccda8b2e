# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's tool parsers as reply formats.

Owns the bridge to `verl.experimental.agent_loop.tool_parser` and what its parsers lack: they leave out broken calls in
silence, and some take time that grows with the square of the text. The only file of this package that imports verl.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from recipe.agent_env.prompt_styles.errors import Message, PromptStyleError
from recipe.agent_env.prompt_styles.json_reading import call_of, decoder, json_problem
from recipe.agent_env.prompt_styles.replies import MAX_CALLS, BrokenCall, Call, CallText, too_many_calls
from recipe.agent_env.prompt_styles.reply_formats import ReplyFormat

MAX_CALL_CHARS = 16_384
"""Longest text, from the first call on, that is given to verl's parsers; a longer one is a broken call."""

# For each parser: where the part of the text with calls begins, and what occurs once in each call.
_MARKS = {
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm": ("<tool_call>", "<tool_call>"),
    "seed": ("<seed:tool_call>", "<seed:tool_call>"),
    "minimax": ("<minimax:tool_call>", "<invoke name="),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", "<｜DSML｜invoke name="),
    "gemma4": ("<|tool_call>", "<|tool_call>"),
}


def verl_format(name: str, tokenizer: Any, *, own_names: list[str]) -> ReplyFormat:
    """One of verl's parsers.

    Args:
        name: As verl registers it.
        tokenizer: The model's tokenizer.
        own_names: Our own formats, for the error.

    Raises:
        PromptStyleError: verl is not installed, does not know the name, or knows one that this version does not.
    """
    known = ", ".join([*own_names, *_MARKS])
    if name not in _MARKS:
        raise PromptStyleError(f"unknown tool_parser {name!r}; known: {known}")
    try:
        from verl.experimental.agent_loop.tool_parser import ToolParser
    except ImportError as exc:
        raise PromptStyleError(f"tool_parser {name!r} is verl's, and verl cannot be imported: {exc}") from exc
    parser = ToolParser.get_tool_parser(name, _TextAsIds(tokenizer))
    ends = [tokenizer.convert_ids_to_tokens(token_id) for token_id in parser.stop_token_ids if token_id is not None]
    return ReplyFormat(parse=_VerlParser(name, parser), end_tokens=tuple(ends))


class _TextAsIds:
    """A tokenizer whose ids are the text itself: verl's parsers decode first, and our text is already cut."""

    def __init__(self, tokenizer: Any) -> None:
        self.pad_token = tokenizer.pad_token or ""
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def decode(self, text: str, **_: Any) -> str:
        return text


@dataclass(frozen=True, slots=True)
class _VerlParser:
    """A `CallParser` around one of verl's."""

    name: str
    parser: Any

    def __call__(self, text: str, tools: Sequence[Message] | None) -> CallText:
        start, opening = _MARKS[self.name]
        found = text.count(opening)
        if not found:
            return CallText(content=text)
        begin = text.find(start if start in text else opening)
        content = text[:begin].removesuffix("\n")
        if found > MAX_CALLS:
            return too_many_calls(content, found)
        if len(text) - begin > MAX_CALL_CHARS:
            detail = f"belongs to a turn with more than {MAX_CALL_CHARS} letters of calls"
            return CallText(content=content, calls=[BrokenCall(kind="too_long", detail=detail)] * found)
        coroutine = self.parser.extract_tool_calls(text[begin:], _schemas(tools))
        # In a thread of its own: the caller may itself run in an event loop.
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                _, parsed = pool.submit(asyncio.run, coroutine).result()
            except Exception as exc:  # Whatever the model's text does to a parser of others is the model's mistake.
                unreadable = BrokenCall(kind="bad_json", detail=f"cannot be read ({type(exc).__name__})")
                return CallText(content=content, calls=[unreadable] * found)
        calls: list[Call | BrokenCall] = [_call(call.name, call.arguments) for call in parsed]
        unread = BrokenCall(kind="bad_json", detail="cannot be read", is_located=False)
        return CallText(content=content, calls=calls + [unread] * (found - len(calls)))


def _call(name: str, arguments: str) -> Call | BrokenCall:
    try:
        return call_of({"name": name, "arguments": decoder().decode(arguments)})
    except (ValueError, RecursionError) as exc:
        return json_problem(exc)


def _schemas(tools: Sequence[Message] | None) -> list[Any]:
    """verl's schema objects, by which parsers turn text into numbers; tools that verl cannot describe are left out."""
    from pydantic import ValidationError
    from verl.tools.schemas import OpenAIFunctionToolSchema

    schemas = []
    for tool in tools or []:
        try:
            schemas.append(OpenAIFunctionToolSchema.model_validate(tool))
        except ValidationError:
            continue
    return schemas
