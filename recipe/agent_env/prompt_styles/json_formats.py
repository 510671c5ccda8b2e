# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Calls written as bare JSON: Llama 3 and Mistral.

Owns these two formats. Linear in the text, whatever the text.
"""

from collections.abc import Sequence

from recipe.agent_env.prompt_styles.errors import Message
from recipe.agent_env.prompt_styles.json_reading import call_of, decoder, json_problem, skip_space
from recipe.agent_env.prompt_styles.replies import MAX_CALLS, BrokenCall, Call, CallText, too_many_calls

PYTHON_TAG = "<|python_tag|>"
MISTRAL_OPEN = "[TOOL_CALLS]"


def parse_llama3_json(text: str, tools: Sequence[Message] | None = None) -> CallText:
    """Read `{"name": ..., "parameters": {...}}`, alone or several with `;` between, with or without `<|python_tag|>`.

    Args:
        text: The reply, up to its end-of-turn token.
        tools: When the list is empty, a reply in JSON is an answer, not a call.

    Returns:
        A reply that begins with `{` or the tag is calls and nothing else; any other is content.
    """
    body = text.strip()
    is_tagged = body.startswith(PYTHON_TAG)
    has_no_tools = tools is not None and not tools
    if not is_tagged and (not body.startswith("{") or has_no_tools):
        return CallText(content=text)
    body = body.removeprefix(PYTHON_TAG)
    calls: list[Call | BrokenCall] = []
    position = skip_space(body, 0)
    while position < len(body) or not calls:
        if len(calls) == MAX_CALLS:
            return too_many_calls("", MAX_CALLS + 1)
        try:
            value, position = decoder().raw_decode(body, position)
        except (ValueError, RecursionError) as exc:
            calls.append(json_problem(exc))
            break
        calls.append(call_of(value, "parameters"))
        position = skip_space(body, position, also=";")
    return CallText(content="", calls=calls)


def parse_mistral(text: str, tools: Sequence[Message] | None = None) -> CallText:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

    Args:
        text: The reply, up to its end-of-turn token.
        tools: Not used; every parser of calls takes it.

    Returns:
        The calls of every list behind the token. Content is the text before it, and after the lists.
    """
    before, *sections = text.split(MISTRAL_OPEN)
    if not sections:
        return CallText(content=text)
    if len(sections) > MAX_CALLS:
        return too_many_calls(before.strip(), len(sections))
    calls: list[Call | BrokenCall] = []
    texts = [before.strip()]
    for section in sections:
        try:
            value, end = decoder().raw_decode(section, skip_space(section, 0))
        except (ValueError, RecursionError) as exc:
            calls.append(json_problem(exc))
            continue
        texts.append(section[end:].strip())
        listed = value if isinstance(value, list) and value else [value]
        calls += [call_of(item) for item in listed]
    return CallText(content="\n".join(text for text in texts if text), calls=calls)
