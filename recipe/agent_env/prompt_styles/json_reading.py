# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""JSON that a model wrote: strict, bounded, never raising past its readers.

Owns what counts as JSON here (no NaN, no infinity, no endless numbers) and the shape of one call.
"""

import functools
import json
import math
from typing import Any

from recipe.agent_env.prompt_styles.replies import BrokenCall, Call

# Longer numbers mean nothing to any tool, and turning them into an int takes time that grows with the square.
_MAX_DIGITS = 400


@functools.cache
def decoder() -> json.JSONDecoder:
    """A strict decoder; raises ValueError, or RecursionError on deep nesting."""
    return json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, parse_int=_bounded_int)


def skip_space(text: str, start: int, also: str = "") -> int:
    """Where the first character from `start` on stands that is neither white space nor one of `also`."""
    while start < len(text) and (text[start].isspace() or text[start] in also):
        start += 1
    return start


def read_call(body: str) -> Call | BrokenCall:
    """Read the JSON text of one call."""
    try:
        return call_of(decoder().decode(body))
    except (ValueError, RecursionError) as exc:
        return json_problem(exc)


def json_problem(exc: Exception) -> BrokenCall:
    """What is wrong with a call whose JSON could not be read, in words for the model."""
    if isinstance(exc, RecursionError):
        return BrokenCall(kind="bad_json", detail="is nested too deeply")
    if isinstance(exc, json.JSONDecodeError):
        return BrokenCall(kind="bad_json", detail=f"is not valid JSON ({exc.msg} at character {exc.pos})")
    return BrokenCall(kind="bad_json", detail=f"is not valid JSON ({exc})")


def call_of(value: Any, arguments_key: str = "arguments") -> Call | BrokenCall:
    """Check the shape of a decoded call.

    Args:
        value: Any JSON value.
        arguments_key: The key that holds the arguments.

    Returns:
        The call, or what is wrong with it.
    """
    if not isinstance(value, dict):
        return BrokenCall(kind="not_an_object", detail="is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BrokenCall(kind="missing_name", detail='has no "name" that is a string')
    arguments = value.get(arguments_key)
    if not isinstance(arguments, dict):
        return BrokenCall(kind="bad_arguments", detail=f'has no "{arguments_key}" that is a JSON object')
    return Call(name=name, arguments=arguments)


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _finite_float(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError("a number is out of range")
    return number


def _bounded_int(literal: str) -> int:
    if len(literal) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(literal)
