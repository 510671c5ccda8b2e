# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Replies in OpenAI's harmony format, as gpt-oss writes them.

Owns this one format: a turn is several messages, each with a channel and maybe a recipient; a message to
`functions.<name>` is a call. Linear in the text, whatever the text.
"""

import re
from collections.abc import Sequence

from recipe.agent_env.prompt_styles.errors import Message
from recipe.agent_env.prompt_styles.json_reading import decoder, json_problem
from recipe.agent_env.prompt_styles.replies import BrokenCall, Call, CallText

START, BODY, CALL = "<|start|>", "<|message|>", "<|call|>"
END_TOKENS = ("<|return|>", "<|call|>")
_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>")
_TURN_END = re.compile(r"<\|return\|>|<\|call\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_HIDDEN_CHANNELS = ("analysis", "commentary")


def parse_harmony(text: str, tools: Sequence[Message] | None = None) -> CallText:
    """Take a turn apart, up to the first token that ends it.

    Args:
        text: The reply with its end token; the header before its first message belongs to the prompt.
        tools: Not used; every parser of calls takes it.

    Returns:
        Calls and broken calls in order. Content is the text of the final channel.
    """
    calls: list[Call | BrokenCall] = []
    texts: list[str] = []
    turn_end = _TURN_END.search(text)
    messages = text[: None if turn_end is None else turn_end.end()].split(START)
    for message in messages:
        header, has_body, rest = message.partition(BODY)
        if not has_body:
            header, rest = "", message
        end = _END.search(rest)
        body = rest if end is None else rest[: end.start()]
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None:
            is_closed = end is not None and end.group() == CALL
            calls.append(_call(recipient.group(1), body, is_closed))
        elif channel is None or channel.group(1) not in _HIDDEN_CHANNELS:
            texts.append(body)
    return CallText(content="\n".join(text for text in texts if text), calls=calls)


def _call(name: str, body: str, is_closed: bool) -> Call | BrokenCall:
    if not is_closed:
        return BrokenCall(kind="unclosed_call", detail=f"is not closed with {CALL}")
    try:
        arguments = decoder().decode(body)
    except (ValueError, RecursionError) as exc:
        return json_problem(exc)
    if not isinstance(arguments, dict):
        return BrokenCall(kind="bad_arguments", detail="has arguments that are no JSON object")
    return Call(name=name, arguments=arguments)
