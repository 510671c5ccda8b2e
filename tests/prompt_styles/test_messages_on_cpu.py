# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Every shape of message that services were seen to send."""

import pytest

from recipe.agent_env.prompt_styles import PromptStyleError
from recipe.agent_env.prompt_styles.messages import HistoryCall, normalise
from tests.prompt_styles.families import FAMILIES


def one(message):
    return normalise([message])[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("a\nb", "a\nb"),
        ([], ""),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, {"text": "b"}, "c"], "abc"),
    ],
    ids=["null", "empty", "text", "no parts", "string parts", "text parts"],
)
def test_content_becomes_text(content, text):
    assert one({"role": "user", "content": content}).content == text


def test_missing_content_is_empty():
    assert one({"role": "user"}).content == ""


@pytest.mark.parametrize(
    ("role", "rendered"),
    [
        ("system", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("developer", "system"),
        ("function", "tool"),
        ("ipython", "tool"),
        ("environment", "user"),
        ("<|im_start|>", "user"),
        (None, "user"),
    ],
)
def test_role_becomes_one_that_templates_know(role, rendered):
    assert one({"role": role, "content": "x"}).role == rendered


def test_missing_role_is_user():
    assert one({"content": "x"}).role == "user"


@pytest.mark.parametrize("messages", [None, []], ids=["null", "empty"])
def test_no_messages(messages):
    assert normalise(messages) == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hello", "message 1: expected an object with role and content, got str"),
        ({"role": 3, "content": "x"}, "message 1: role must be a string, got int"),
        ({"role": "user", "content": 3}, "message 1: content must be a string, null or a list of text parts, got int"),
        ({"role": "user", "content": {"a": 1}}, "message 1: content must be a string, .* got dict"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1: only text parts .*'image_url'.*images"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "message 1: only text parts"),
        ({"role": "user", "content": [{"type": "image_url", "text": "x"}]}, "only text parts .*'image_url'"),
        ({"role": "user", "content": [3]}, "message 1: only text parts .*'int'"),
        ({"role": "assistant", "tool_calls": {}}, "message 1: tool_calls must be a list or null, got dict"),
        ({"role": "assistant", "tool_calls": ["x"]}, "message 1: a tool call must be an object with function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "message 1: a tool call must be"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, "message 1: a tool call must be"),
        ({"role": "assistant", "tool_calls": [{"id": 3, "name": "f"}]}, "message 1: tool call id must be a string"),
        ({"role": "tool", "tool_call_id": 3}, "message 1: tool_call_id must be a string or null, got int"),
        ({"role": "tool", "name": 3}, "message 1: name must be a string or null, got int"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(message, says):
    with pytest.raises(PromptStyleError, match=says):
        normalise([{"role": "user", "content": "fine"}, message])


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        (None, {}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ([1], [1]),
    ],
    ids=["object", "wire", "null", "no json", "no object", "deep", "list"],
)
def test_arguments_of_history_are_decoded(arguments, decoded):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = one({"role": "assistant", "tool_calls": [call]})
    assert message.calls == (HistoryCall(name="f", arguments=decoded, id="c"),)


def test_call_without_wrapper_is_a_call():
    message = one({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]})
    assert message.calls == (HistoryCall(name="f", arguments={"a": 1}, id=None),)


@pytest.mark.parametrize("calls", [None, []], ids=["null", "empty"])
def test_absent_calls_are_none(calls):
    """P60."""
    assert one({"role": "assistant", "content": "x", "tool_calls": calls}).calls == ()


def test_only_assistant_messages_have_calls():
    assert one({"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}).calls == ()


def test_ids_and_names_stay():
    message = one({"role": "tool", "content": "x", "tool_call_id": "c", "name": "f"})
    assert (message.tool_call_id, message.name) == ("c", "f")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("content", [None, "", [], ["a", {"type": "text", "text": "b"}]], ids=str)
def test_every_family_renders_every_content(family, content):
    ids = family.build().encode_observation([{"role": "user", "content": content}], turn_is_closed=True)
    text = "" if not content else "ab"
    assert ids == family.build().encode_observation([{"role": "user", "content": text}], turn_is_closed=True)


def test_surrogates_in_a_tool_schema_and_history_can_be_encoded():
    """A service's JSON can spell half of a surrogate pair anywhere."""
    tools = [{"type": "function", "function": {"name": "\ud800", "parameters": {"\udc00": "\ud800"}}}]
    call = {"name": "\ud800", "arguments": {"\ud800": "\udc00"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    for family in FAMILIES[:3]:
        assert family.build().encode_prompt(messages, tools)
