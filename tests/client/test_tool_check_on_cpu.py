# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tool calls against tools schemas: what is refused, what the model reads, and that nothing ever raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.agent_env.client.tool_check import ToolChecker, check_tool_calls
from tests.mock_env_server import MOVE_TOOL

LOOK_TOOL = {"type": "function", "function": {"name": "look"}}
SET_TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer"}, "box": {"$ref": "#/$defs/box"}},
            "$defs": {"box": {"type": "object", "properties": {"w": {"type": "number"}}}},
        },
    },
}
TOOLS = [MOVE_TOOL, LOOK_TOOL, SET_TOOL]


def message(*calls):
    return {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls]}


GOOD = {
    "no calls": {"role": "assistant", "content": "hi"},
    "null calls": {"tool_calls": None},
    "empty calls": {"tool_calls": []},
    "one": message(("move", '{"direction": "up"}')),
    "two": message(("move", '{"direction": "up"}'), ("look", "{}")),
    "arguments as object": message(("move", {"direction": "up"})),
    "tool without parameters": message(("look", '{"anything": 1}')),
    "whole float as integer": message(("set", '{"count": 2.0}')),
    "reference": message(("set", '{"box": {"w": 1.5}}')),
}

BAD = {
    "unknown tool": (message(("fly", "{}")), r'no tool "fly". The tools are: move, look, set'),
    "not JSON": (message(("move", '{"direction": "up"')), "arguments of move are not valid JSON"),
    "NaN": (message(("set", '{"count": NaN}')), "NaN is no JSON number"),
    "deep": (message(("move", "[" * 100_000)), "not valid JSON"),
    "list": (message(("move", "[1]")), "must be a JSON object"),
    "text": (message(("move", '"up"')), "must be a JSON object"),
    "missing": (message(("move", None)), "must be a JSON object"),
    "required": (message(("move", "{}")), "'direction' is a required property"),
    "enum": (message(("move", '{"direction": "north"}')), "the argument direction of move does not fit"),
    "wrong type": (message(("set", '{"count": "2"}')), "'2' is not of type 'integer'"),
    "nested": (message(("set", '{"box": {"w": "x"}}')), "the argument box.w of set does not fit"),
    "unlisted argument": (message(("move", '{"direction": "up", "n": 2}')), 'takes no argument "n"'),
    "second call": (message(("look", "{}"), ("fly", "{}")), "Tool call 2 of 2 is invalid"),
    "no name": ({"tool_calls": [{"function": {}}]}, "names no tool"),
    "no function": ({"tool_calls": ["move"]}, "names no tool"),
    "no list": ({"tool_calls": {"a": 1}}, "must be a list"),
}


@pytest.mark.parametrize("reply", GOOD.values(), ids=GOOD.keys())
def test_good_calls_pass(reply):
    assert check_tool_calls(reply, TOOLS) is None


@pytest.mark.parametrize(("reply", "feedback"), BAD.values(), ids=BAD.keys())
def test_bad_call_is_explained_to_the_model(reply, feedback):
    text = check_tool_calls(reply, TOOLS)
    assert text is not None and feedback in text


def test_call_without_any_tools_is_refused():
    assert "There are no tools here" in check_tool_calls(message(("move", "{}")), [])


def test_schema_that_is_explicit_about_more_arguments_allows_them():
    tool = {"function": {"name": "any", "parameters": {"properties": {"a": {}}, "additionalProperties": True}}}
    assert check_tool_calls(message(("any", '{"b": 1}')), [tool]) is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "no such type"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/nowhere"},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": 3},
        {"$schema": 3},
        {"$schema": "http://nowhere/dialect"},
        {"required": "a"},
        {"$ref": "#"},
        [1],
        "text",
        3,
    ],
)
def test_broken_schema_checks_nothing_and_never_raises(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert check_tool_calls(message(("f", '{"a": "b"}')), [tool]) is None


@pytest.mark.parametrize("schema", [None, 3, "x", {"a": 1}, [None, 3, {}, {"function": 3}, {"function": {"name": 3}}]])
def test_schema_of_any_shape_is_survived(schema):
    assert "no tool" in check_tool_calls(message(("move", "{}")), schema)


def test_schema_that_is_no_json_is_survived():
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"enum": {1, 2}}}}}}
    assert check_tool_calls(message(("f", '{"a": 1}')), [tool]) is None


def test_feedback_is_short_whatever_the_model_wrote():
    text = check_tool_calls(message(("set", json.dumps({"count": "x" * 100_000}))), TOOLS)
    assert len(text) < 500


def test_validators_are_compiled_once_per_schema(monkeypatch):
    compiled = []
    monkeypatch.setattr("recipe.agent_env.client.tool_check._compile", lambda schema: compiled.append(schema))
    tools = [{"function": {"name": "only_here", "parameters": {"type": "object"}}}]
    for _ in range(3):
        check_tool_calls(message(("only_here", "{}")), tools)
    assert compiled == [{"type": "object"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "enum", "$ref", "items", "name", "function"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(calls=JSON, parameters=JSON, arguments=JSON | st.text())
def test_check_never_raises(calls, parameters, arguments):
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    for reply in ({"tool_calls": calls}, message(("f", arguments))):
        assert ToolChecker(tools).check(reply) is None or isinstance(check_tool_calls(reply, tools), str)
    assert check_tool_calls({"tool_calls": [{}]}, calls) == "Tool call is invalid: it names no tool."
