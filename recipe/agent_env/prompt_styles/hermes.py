# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Owns this one format, used by Qwen2.5, Qwen3 and the Hermes models. Works on the text of the reply, so the tags count
whether they were sampled as one token or spelled. Linear in the text, whatever the text.
"""

import re
from collections.abc import Sequence

from recipe.agent_env.prompt_styles.errors import Message
from recipe.agent_env.prompt_styles.json_reading import decoder, read_call, skip_space
from recipe.agent_env.prompt_styles.replies import MAX_CALLS, BrokenCall, Call, CallText, too_many_calls

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_TAG = re.compile("<tool_call>|</tool_call>")
# A tag inside a JSON string makes a call's end ambiguous, and each such call is read with a scan of all that follows.
_MAX_DEEP_READS = 16


def parse_hermes(text: str, tools: Sequence[Message] | None = None) -> CallText:
    """Take a reply apart.

    Args:
        text: The reply, up to its end-of-turn token.
        tools: Not used; every parser of calls takes it.

    Returns:
        Calls and broken calls in order. Content is the text outside them: before the first call all but the line break
        that the format puts there, after it stripped.
    """
    found = max(text.count(OPEN), text.count(CLOSE))
    if found > MAX_CALLS:
        return too_many_calls(_TAG.split(text, maxsplit=1)[0].removesuffix("\n"), found)
    calls: list[Call | BrokenCall] = []
    outside: list[str] = []
    deep_reads = 0
    position = 0
    while (tag := _TAG.search(text, position)) is not None:
        outside.append(text[position : tag.start()])
        position = tag.end()
        if tag.group() == CLOSE:
            calls.append(BrokenCall(kind="unopened_call", detail=f"has a {CLOSE} without its {OPEN}"))
            continue
        following = _TAG.search(text, position)
        end = len(text) if following is None else following.start()
        call = read_call(text[position:end])
        if isinstance(call, BrokenCall) and following is not None and deep_reads < _MAX_DEEP_READS:
            deep_reads += 1
            deep_end = _json_end(text, position)
            if deep_end > end:
                end, following = deep_end, _TAG.match(text, skip_space(text, deep_end))
                call = read_call(text[position:end])
        if following is None or following.group() == OPEN:
            calls.append(BrokenCall(kind="unclosed_call", detail=f"is not closed with {CLOSE}"))
            position = end
            continue
        calls.append(call)
        position = following.end()
    outside.append(text[position:])
    return CallText(content=_content(outside, has_calls=bool(calls)), calls=calls)


def _json_end(text: str, start: int) -> int:
    """Where the JSON value that begins after `start` ends, or -1."""
    rest = text[start:]
    begin = skip_space(rest, 0)
    try:
        _, end = decoder().raw_decode(rest, begin)
    except (ValueError, RecursionError):
        return -1
    return start + end


def _content(outside: list[str], *, has_calls: bool) -> str:
    if not has_calls:
        return outside[0]
    before, *after = outside
    texts = [before.removesuffix("\n"), *(text.strip() for text in after)]
    return "\n".join(text for text in texts if text)
