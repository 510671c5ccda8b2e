# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Turns whatever an environment calls an observation into chat messages, and our values into plain JSON.

Owns the rules by which untyped observations become messages, and numpy-laden rows become JSON objects. Pure functions;
knows nothing of HTTP, sessions, tokens or prompt styles.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
"""One OpenAI chat message; once normalised: `role` and `content` str, optional `tool_calls`, `tool_call_id`, `name`."""

_MEDIA_KINDS = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"}
)
_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedAnswer(ValueError):
    """An answer breaks the protocol; `expected` and `got` are for the message that the caller builds."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}; got {got}")
        self.expected = expected
        self.got = got


def describe(value: object, *, limit: int = 120) -> str:
    """Short text that shows a value and its type, for error messages."""
    text = repr(value)
    shown = text if len(text) <= limit else text[:limit] + "..."
    return f"{type(value).__name__} {shown}"


def normalise_observation(observation: object) -> list[Message]:
    """Make chat messages of an observation as services really send it.

    Rules, for the whole observation:

    * null gives no message.
    * A string gives one user message; a number or bool gives one user message with its JSON text.
    * An object with `role` or `content` is one message (rules below).
    * An object that is a lone text part (`{"type": "text", "text": ...}`) gives one user message with that text.
    * Any other object gives one user message with its JSON text.
    * A list gives the messages of its entries, in order: strings, numbers and objects as above, null nothing, a nested
      list one user message with its JSON text.

    Rules, for one message:

    * A missing or null `role` is `user`. Every other role is passed on as it is (`system`, `tool`, `assistant`, unknown
      ones); the prompt style decides what to make of it. A role that is no string breaks the protocol.
    * `content` null or missing is `""`; numbers and bools become their JSON text.
    * `content` as parts: strings and text parts are joined without a separator. A single part without a list counts as
      a list of one. Any other object becomes its JSON text.
    * Images, audio and video, as parts or as whole entries, are refused: they are not supported yet.
    * `tool_call_id` and `name` stay when they are set (a number becomes its text); `tool_calls` stays when it is a
      non-empty list of objects, so that assistant history keeps its calls. Other keys are dropped.

    Args:
        observation: Decoded JSON.

    Returns:
        Messages with `role` and `content` both strings.

    Raises:
        MalformedAnswer: A message breaks one of the rules above.
    """
    if observation is None:
        return []
    if isinstance(observation, list):
        return [_entry_message(entry) for entry in observation if entry is not None]
    return [_entry_message(observation)]


def _entry_message(entry: object) -> Message:
    """One entry of an observation as a message."""
    if isinstance(entry, dict):
        if "role" in entry or "content" in entry:
            return _normalise_message(entry)
        _refuse_media(entry)
        if entry.get("type") == "text" and isinstance(entry.get("text"), str):
            return {"role": "user", "content": entry["text"]}
    return {"role": "user", "content": entry if isinstance(entry, str) else json_text(entry)}


def _normalise_message(message: dict[str, Any]) -> Message:
    """One object with `role` or `content` as a message."""
    role = message.get("role")
    if role is None:
        role = "user"
    if not isinstance(role, str):
        raise MalformedAnswer("a message whose 'role' is a string", describe(role))
    normalised: Message = {"role": role, "content": _content_text(message.get("content"))}
    for key in ("tool_call_id", "name"):
        value = message.get(key)
        if value is not None:
            normalised[key] = value if isinstance(value, str) else json_text(value)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise MalformedAnswer("a message whose 'tool_calls' is a list of objects", describe(calls))
    if calls:
        normalised["tool_calls"] = calls
    return normalised


def _content_text(content: object) -> str:
    """The text of one message's `content`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    if isinstance(content, dict):
        return _part_text(content) if "type" in content else json_text(content)
    return json_text(content)


def _part_text(part: object) -> str:
    """The text of one content part."""
    if isinstance(part, str):
        return part
    if part is None:
        return ""
    if not isinstance(part, dict):
        return json_text(part)
    if "type" not in part:
        part = {"type": next((key for key in part if key in _MEDIA_KINDS), "text"), **part}
    _refuse_media(part)
    text = part.get("text")
    if isinstance(text, str) and part["type"] in ("text", "input_text", "output_text"):
        return text
    return json_text(part)


def _refuse_media(part: dict[str, Any]) -> None:
    """Raise when a part or entry says that it carries something other than text."""
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA_KINDS:
        raise MalformedAnswer(
            "an observation of text only (images and audio are not supported yet)", f"a part of type {kind!r}"
        )


def json_text(value: object) -> str:
    """A value's JSON text, as the model is to read it: non-ASCII letters stay letters."""
    return json.dumps(value, ensure_ascii=False)


def to_plain_object(value: object, name: str) -> dict[str, Any]:
    """Make a plain JSON object of a row's column or an option set.

    Args:
        value: A mapping, the JSON text of an object (as parquet columns hold it), or None for `{}`.
        name: What to call it in error messages, e.g. `env_kwargs`.

    Raises:
        ValueError: Not an object, or something in it has no exact JSON form; names the place.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"{name} must be an object or the JSON text of one, not the text {text[:80]!r}") from exc
        if value is None:
            return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object or the JSON text of one, not {describe(value)}")
    plain = to_plain(value, name)
    assert isinstance(plain, dict)
    return plain


def to_plain(value: object, name: str) -> Any:
    """Convert numpy scalars and arrays, tuples and mappings to what JSON holds exactly.

    Raises:
        ValueError: NaN or infinity, or a type without a JSON form; names the place, e.g. `env_kwargs.size[1]`.
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, which JSON cannot hold; give a finite number, or null for none")
        return float(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, name): to_plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if callable(tolist := getattr(value, "tolist", None)):  # numpy scalars and arrays, without importing numpy
        native = tolist()
        if type(native) is not type(value):
            return to_plain(native, name)
    raise ValueError(f"{name} has no JSON form: {describe(value)}; use text, numbers, bools, lists or objects")


def _plain_key(key: object, name: str) -> str:
    """An object's key as JSON holds it."""
    if isinstance(key, str):
        return str(key)
    plain = to_plain(key, f"a key of {name}")
    if isinstance(plain, int) and not isinstance(plain, bool):
        return str(plain)
    raise ValueError(f"{name} has the key {describe(key)}; keys must be text or integers")


def to_plain_seed(seed: object) -> int | None:
    """Make an integer of a seed column's value, which pandas may have turned into a float.

    Raises:
        ValueError: Not a whole number; NaN is what pandas makes of a missing seed.
    """
    plain = to_plain(seed, "seed")
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    if plain is None or (isinstance(plain, int) and not isinstance(plain, bool)):
        return plain
    raise ValueError(f"seed must be a whole number or null, not {describe(seed)}")


def build_action(message: Message) -> Message:
    """The assistant message as services want it: `content` a string, `tool_calls` always there and fully formed.

    Args:
        message: An assistant message; `content` may be null or missing, `tool_calls` may be null or missing, a call
            may lack `id` or `type` and may hold `arguments` as an object.

    Raises:
        ValueError: Content is no text, or a call names no function.
    """
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"an action's content must be text, not {describe(content)}")
    return {
        "role": "assistant",
        "content": content or "",
        "tool_calls": [_wire_call(call, index) for index, call in enumerate(message.get("tool_calls") or [])],
    }


def _wire_call(call: object, index: int) -> dict[str, Any]:
    """One tool call with `id`, `type` and `arguments` as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool call {index} of an action names no function: {describe(call)}")
    assert isinstance(call, Mapping)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(to_plain_object(arguments, f"arguments of tool call {index}"))
    call_id = call.get("id")
    return {
        "id": str(call_id) if call_id else f"call_{index}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def scrub_surrogates(value: Any) -> Any:
    r"""Replace lone surrogates (`"\ud800"`) in a decoded answer: no tokenizer or file can hold them."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [scrub_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {scrub_surrogates(key): scrub_surrogates(item) for key, item in value.items()}
    return value
