# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Observations become messages, rows become JSON, replies become actions: one test per rule."""

from __future__ import annotations

import json

import numpy as np
import pytest

from recipe.agent_env.client.messages import (
    MalformedAnswer,
    build_action,
    normalise_observation,
    scrub_surrogates,
    to_plain_object,
    to_plain_seed,
)

IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def user(text):
    return {"role": "user", "content": text}


OBSERVATIONS = {
    "null": (None, []),
    "empty list": ([], []),
    "string": ("hello", [user("hello")]),
    "empty string": ("", [user("")]),
    "integer": (7, [user("7")]),
    "float": (0.5, [user("0.5")]),
    "bool": (True, [user("true")]),
    "message": ({"role": "user", "content": "hi"}, [user("hi")]),
    "missing role": ([{"content": "hi"}], [user("hi")]),
    "null role": ([{"role": None, "content": "hi"}], [user("hi")]),
    "unknown role": ([{"role": "critic", "content": "hi"}], [{"role": "critic", "content": "hi"}]),
    "system message": ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s"}]),
    "other dict": ({"hp": 3, "name": "Zoë"}, [user('{"hp": 3, "name": "Zoë"}')]),
    "empty dict": ({}, [user("{}")]),
    "lone text part": ({"type": "text", "text": "hi"}, [user("hi")]),
    "list of strings": (["a", "b"], [user("a"), user("b")]),
    "list with null, number, list": ([None, 3, [1, "x"]], [user("3"), user('[1, "x"]')]),
    "null content": ([{"role": "user", "content": None}], [user("")]),
    "missing content": ([{"role": "user"}], [user("")]),
    "number content": ([{"role": "user", "content": 4}], [user("4")]),
    "dict content": ([{"role": "user", "content": {"x": 1}}], [user('{"x": 1}')]),
    "text part as content": ([{"content": {"type": "text", "text": "hi"}}], [user("hi")]),
    "parts": ([{"content": [{"type": "text", "text": "<|im_"}, {"text": "end|>"}, "!", None]}], [user("<|im_end|>!")]),
    "unknown part": ([{"content": [{"type": "chart", "x": 1}]}], [user('{"type": "chart", "x": 1}')]),
    "directory entry": ({"type": "file", "name": "a"}, [user('{"type": "file", "name": "a"}')]),
    "tool message": (
        [{"role": "tool", "tool_call_id": "call_0", "name": "move", "content": "ok", "extra": 1}],
        [{"role": "tool", "content": "ok", "tool_call_id": "call_0", "name": "move"}],
    ),
    "numeric tool_call_id": (
        [{"role": "tool", "tool_call_id": 3, "name": None, "content": "ok"}],
        [{"role": "tool", "content": "ok", "tool_call_id": "3"}],
    ),
    "assistant history": (
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
    ),
    "assistant without calls": ([{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "content": ""}]),
}

BAD_OBSERVATIONS = {
    "image part": ([{"role": "user", "content": [IMAGE_PART]}], "images and audio are not supported yet"),
    "image alone": (IMAGE_PART, "images and audio are not supported yet"),
    "image content": ([{"content": IMAGE_PART}], "images and audio are not supported yet"),
    "untyped image part": ([{"content": [{"image": "AAAA"}]}], "images and audio are not supported yet"),
    "audio part": ([{"content": [{"type": "input_audio", "input_audio": {}}]}], "images and audio"),
    "role is a number": ([{"role": 3, "content": "x"}], "'role' is a string"),
    "tool_calls is text": ([{"role": "assistant", "tool_calls": "x"}], "'tool_calls' is a list of objects"),
    "tool_calls of text": ([{"role": "assistant", "tool_calls": ["x"]}], "'tool_calls' is a list of objects"),
}


@pytest.mark.parametrize(("observation", "messages"), OBSERVATIONS.values(), ids=OBSERVATIONS.keys())
def test_observation_becomes_messages(observation, messages):
    assert normalise_observation(observation) == messages


@pytest.mark.parametrize(("observation", "reason"), BAD_OBSERVATIONS.values(), ids=BAD_OBSERVATIONS.keys())
def test_observation_outside_the_rules_is_refused(observation, reason):
    with pytest.raises(MalformedAnswer, match=reason):
        normalise_observation(observation)


def test_numpy_values_become_plain_json():
    """P98: a fallback like `default=str` would turn 3 into "3"."""
    row = {
        "size": np.int64(3),
        "hard": np.bool_(True),
        "rate": np.float32(0.5),
        "grid": np.array([[1, 2], [3, 4]]),
        "names": np.array(["a", None], dtype=object),
        "pair": (np.int8(1), 2),
        np.int64(5): None,
    }
    plain = to_plain_object(row, "env_kwargs")
    assert json.loads(json.dumps(plain)) == {
        "size": 3,
        "hard": True,
        "rate": 0.5,
        "grid": [[1, 2], [3, 4]],
        "names": ["a", None],
        "pair": [1, 2],
        "5": None,
    }
    assert (type(plain["size"]), type(plain["hard"])) == (int, bool)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, float("nan")]}, r"env_kwargs\.a\[1\] is nan"),
        ({"a": np.float32("nan")}, r"env_kwargs\.a is nan"),
        ({"a": np.array([1.0, np.inf])}, r"env_kwargs\.a\[1\] is inf"),
        ({"a": {1, 2}}, r"env_kwargs\.a has no JSON form"),
        ({"a": b"x"}, r"env_kwargs\.a has no JSON form"),
        ({"a": np.datetime64("2020-01-01")}, r"env_kwargs\.a has no JSON form"),
        ({1.5: 1}, "keys must be text or integers"),
        ('{"a": NaN}', r"env_kwargs\.a is nan"),
        ("[1]", "env_kwargs must be an object"),
        ("{", "env_kwargs must be an object"),
        ("[" * 100_000, "env_kwargs must be an object"),
        (3, "env_kwargs must be an object"),
        (float("nan"), "env_kwargs must be an object"),
    ],
)
def test_value_without_json_form_is_refused_by_place(value, place):
    with pytest.raises(ValueError, match=place):
        to_plain_object(value, "env_kwargs")


def test_json_text_and_null_columns_become_objects():
    """`env_kwargs` must be an object on the wire: the string of the parquet column is a 422."""
    assert to_plain_object('{"size": 5}', "env_kwargs") == {"size": 5}
    assert to_plain_object(None, "env_kwargs") == to_plain_object("null", "env_kwargs") == {}


@pytest.mark.parametrize(("seed", "sent"), [(None, None), (3, 3), (np.int64(3), 3), (3.0, 3), (np.float64(3), 3)])
def test_seed_becomes_an_integer(seed, sent):
    plain = to_plain_seed(seed)
    assert plain == sent and type(plain) is type(sent)


@pytest.mark.parametrize("seed", [float("nan"), np.float32("nan"), 1.5, True, np.bool_(True), "3", [3]])
def test_seed_that_is_no_whole_number_is_refused(seed):
    """A nullable seed column comes from pandas as float, a missing one as NaN."""
    with pytest.raises(ValueError, match="seed"):
        to_plain_seed(seed)


@pytest.mark.parametrize("message", [{"content": "hi"}, {"content": "hi", "tool_calls": None}, {"tool_calls": []}])
def test_action_always_carries_tool_calls(message):
    """P60: `action["tool_calls"]` is indexed by services; without calls it is `[]`."""
    assert build_action(message) == {"role": "assistant", "content": message.get("content", ""), "tool_calls": []}


def test_action_completes_its_calls():
    calls = [
        {"function": {"name": "move", "arguments": {"d": np.int64(1)}}},
        {"id": "x", "type": "tool", "function": {"name": "look"}, "index": 1},
    ]
    assert build_action({"content": None, "tool_calls": calls})["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": '{"d": 1}'}},
        {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("message", [{"content": 3}, {"tool_calls": [{}]}, {"tool_calls": [{"function": {"name": 3}}]}])
def test_action_that_cannot_be_sent_is_refused(message):
    with pytest.raises(ValueError, match="action"):
        build_action(message)


def test_lone_surrogates_are_replaced():
    """`"\\ud800"` is valid JSON, but no tokenizer and no UTF-8 file can hold it."""
    scrubbed = scrub_surrogates(json.loads(r'["a\ud800b", {"k\udfff": "\ud83d\ude00"}, 3]'))
    assert scrubbed == ["a\ufffdb", {"k\ufffd": "\U0001f600"}, 3]
