# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks the model's tool calls against the service's tools schema before anything is sent.

Owns the rules and the feedback text for the model. Services answer a bad call with the same 500 as a crash, so only
this check can tell the model's mistake from an outage. Knows nothing of HTTP, prompt styles or tokens; never raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

_MAX_FEEDBACK_CHARS = 400
_MAX_LISTED_NAMES = 20
_OPEN_ENDED_KEYWORDS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if"}
)


class ToolChecker:
    """The checks for one tools schema, compiled once."""

    def __init__(self, tools_schema: Sequence[object] | None) -> None:
        self._schemas: dict[str, Any] = {}
        for tool in tools_schema or []:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._schemas[function["name"]] = function.get("parameters")
        self._validators = {name: _compile(schema) for name, schema in self._schemas.items()}

    def check(self, message: Mapping[str, Any]) -> str | None:
        """Look for the first broken call of an assistant message.

        A call is broken when its tool is unknown, its arguments are no JSON object, or they do not fit the tool's
        schema. Arguments that the schema does not list are refused too, unless the schema is explicit about more:
        functions behind a service rarely take them. A schema that is itself broken checks nothing.

        Args:
            message: `tool_calls` may be missing, null or empty.

        Returns:
            None when everything may be sent; else feedback for the model, at most a few hundred letters.
        """
        calls = message.get("tool_calls")
        if not calls:
            return None
        if not isinstance(calls, list):
            return "tool_calls must be a list of calls."
        for number, call in enumerate(calls, start=1):
            problem = self._check_call(call)
            if problem is not None:
                place = "Tool call" if len(calls) == 1 else f"Tool call {number} of {len(calls)}"
                return _shorten(f"{place} is invalid: {problem}")
        return None

    def _check_call(self, call: object) -> str | None:
        """What is wrong with one call, or None."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return "it names no tool."
        name = function["name"]
        if name not in self._schemas:
            names = ", ".join(list(self._schemas)[:_MAX_LISTED_NAMES])
            known = f"The tools are: {names}." if names else "There are no tools here."
            return f"there is no tool {_quote(name)}. {known}"
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as exc:
                reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
                return f"the arguments of {name} are not valid JSON ({reason})."
        if not isinstance(arguments, dict):
            return f"the arguments of {name} must be a JSON object, not {_quote(arguments)}."
        return self._check_arguments(name, arguments)

    def _check_arguments(self, name: str, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments of a known tool, or None."""
        schema = self._schemas[name]
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping) and not _OPEN_ENDED_KEYWORDS.intersection(schema):
            unknown = [key for key in arguments if key not in properties]
            if unknown:
                listed = ", ".join(str(key) for key in list(properties)[:_MAX_LISTED_NAMES]) or "none"
                return f"{name} takes no argument {_quote(unknown[0])}. Its arguments are: {listed}."
        validator = self._validators[name]
        if validator is None:
            return None
        try:
            error = best_match(validator.iter_errors(arguments))
        except Exception:  # a broken schema fails in many ways (bad $ref, bad pattern, wrong types, endless recursion)
            return None
        if error is None:
            return None
        path = ".".join(str(part) for part in error.absolute_path)
        place = f"the argument {path} of {name}" if path else f"the arguments of {name}"
        return f"{place} does not fit: {error.message}." if path else f"{place} do not fit: {error.message}."


def check_tool_calls(message: Mapping[str, Any], tools_schema: Sequence[object] | None) -> str | None:
    """`ToolChecker.check`, with the compiled checks of recent schemas kept.

    Args:
        message: An assistant message.
        tools_schema: As the service answered it.

    Returns:
        None when everything may be sent, else feedback for the model. Never raises.
    """
    return checker_of(tools_schema).check(message) if message.get("tool_calls") else None


def checker_of(tools_schema: Sequence[object] | None) -> ToolChecker:
    """The checks of a schema. Those of recent schemas are kept: most sessions share one, and compiling takes as long as
    playing several turns."""
    try:
        return _checker_of_text(json.dumps(tools_schema))
    except (TypeError, ValueError, RecursionError):
        return ToolChecker(tools_schema if isinstance(tools_schema, (list, tuple)) else None)


@lru_cache(maxsize=256)
def _checker_of_text(schema_text: str) -> ToolChecker:
    """The compiled checks of a schema, by its JSON text."""
    schema = json.loads(schema_text)
    return ToolChecker(schema if isinstance(schema, list) else None)


def _compile(schema: object) -> Validator | None:
    """A validator that resolves no reference outside the schema; None where the schema is no object."""
    if not isinstance(schema, dict):
        return None
    try:
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        return kind(schema, registry=Registry())
    except Exception:  # a schema can break the meta-schema check itself (unknown dialect, unhashable $schema, depth)
        return None


def _refuse_constant(name: str) -> None:
    """NaN and infinity are no JSON, though Python reads them."""
    raise ValueError(f"{name} is no JSON number")


def _quote(value: object) -> str:
    """A value as JSON, short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else text[:80] + "..."


def _shorten(text: str) -> str:
    """Feedback of bounded length."""
    return text if len(text) <= _MAX_FEEDBACK_CHARS else text[:_MAX_FEEDBACK_CHARS] + "..."
