# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random tool calls that fit their schemas, in place of a model.

Owns how a value is made from a JSON schema. Knows nothing of HTTP, tokens or episodes.
"""

import json
import random
from typing import Any

from recipe.agent_env.env_client import Message, check_tool_calls

_MAX_DEPTH = 4
_TRIES = 30
_WORDS = ("up", "a", "hello", "3", "look around", "x = 1")


def random_action(tools_schema: list[dict[str, Any]], rng: random.Random) -> Message:
    """One assistant message that an environment should be able to take.

    Args:
        tools_schema: OpenAI tool schemas.
        rng: Source of chance.

    Returns:
        A message with one call that fits its schema; a line of text where there are no tools, or none whose schema
        could be met within a few tries.
    """
    functions = [tool.get("function", tool) for tool in tools_schema]
    for _ in range(_TRIES if functions else 0):
        function = rng.choice(functions)
        arguments = random_value(function.get("parameters") or {"type": "object"}, rng)
        call = {"name": function.get("name"), "arguments": json.dumps(arguments)}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": call}],
        }
        if check_tool_calls(message, tools_schema) is None:
            return message
    return {"role": "assistant", "content": rng.choice(_WORDS), "tool_calls": []}


def random_value(schema: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value that fits the common parts of a JSON schema; rare keywords are not looked at.

    Args:
        schema: JSON schema.
        rng: Source of chance.
        depth: Of the value in the whole; deep values are made small.
    """
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return random_value(rng.choice(schema[keyword]), rng, depth)
    if schema.get("allOf"):
        merged = {key: value for part in schema["allOf"] if isinstance(part, dict) for key, value in part.items()}
        return random_value(merged, rng, depth)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _MAKERS.get(rng.choice(kind) if isinstance(kind, list) else kind, _string)(schema, rng, depth)


def _object(schema: dict[str, Any], rng: random.Random, depth: int) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    chosen = [name for name in properties if name in required or (depth < _MAX_DEPTH and rng.random() < 0.5)]
    return {name: random_value(properties[name], rng, depth + 1) for name in chosen}


def _array(schema: dict[str, Any], rng: random.Random, depth: int) -> list[Any]:
    least = int(schema.get("minItems", 0 if depth >= _MAX_DEPTH else 1))
    most = max(least, min(int(schema.get("maxItems", least + 2)), least + 2))
    return [random_value(schema.get("items", {}), rng, depth + 1) for _ in range(rng.randint(least, most))]


def _string(schema: dict[str, Any], rng: random.Random, depth: int) -> str:
    text = rng.choice(_WORDS)
    text = text.ljust(int(schema.get("minLength", 0)), "a")
    return text[: int(schema["maxLength"])] if "maxLength" in schema else text


def _bounds(schema: dict[str, Any]) -> tuple[float, float]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", min(0, schema.get("maximum", 0))))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10))
    return low, high


def _integer(schema: dict[str, Any], rng: random.Random, depth: int) -> int:
    low, high = _bounds(schema)
    first = int(low) + ("exclusiveMinimum" in schema)
    last = max(first, int(high) - ("exclusiveMaximum" in schema))
    step = int(schema.get("multipleOf", 1)) or 1
    value = rng.randint(first, last)
    return value - value % step if value - value % step >= first else value


def _number(schema: dict[str, Any], rng: random.Random, depth: int) -> float:
    low, high = _bounds(schema)
    return round(rng.uniform(low, high), 3) if high > low else low


_MAKERS: dict[str, Any] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda schema, rng, depth: rng.random() < 0.5,
    "null": lambda schema, rng, depth: None,
}
