# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The protocol as pure functions: calls as they are sent, fields as they are read, statuses as errors."""

from __future__ import annotations

import json
import pickle
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from recipe.agent_env.client.answers import (
    read_allow_parallel,
    read_capabilities,
    read_env_id,
    read_reward,
    read_start,
    read_step,
    read_task_prompt,
    read_tools_schema,
)
from recipe.agent_env.client.messages import MalformedAnswer
from recipe.agent_env.client.protocol import Answer, EnvProtocol
from recipe.agent_env.env_client import (
    Capabilities,
    EnvClientConfig,
    EnvCrashedError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
)

STEP_REPLY = {"observation": [], "reward": 1, "done": False, "truncated": False, "info": {}}


@pytest.fixture
def protocol():
    config = EnvClientConfig(endpoint="http://host:1/base/", bearer_token="s3cret-token")
    return EnvProtocol(config, config.endpoints[0])


# ---- calls


def test_initialize_call_is_complete(protocol):
    call = protocol.initialize(env_name="game", seed=3.0, env_kwargs='{"size": 5}')
    assert (call.method, call.url) == ("POST", "http://host:1/base/api/environment/initialize")
    assert json.loads(call.body) == {"env_name": "game", "seed": 3, "env_kwargs": {"size": 5}}


@pytest.mark.parametrize("env_name", ["", None, 3])
def test_initialize_needs_a_name(protocol, env_name):
    with pytest.raises(ValueError, match="env_name"):
        protocol.initialize(env_name=env_name, seed=0, env_kwargs=None)


def test_reset_call_sends_an_object_of_options(protocol):
    assert json.loads(protocol.reset("game", "id", seed=None, options=None).body) == {"seed": None, "options": {}}


def test_session_id_cannot_leave_its_path_segment(protocol):
    assert protocol.close("game", "../a b?c#d").url == "http://host:1/base/api/environment/..%2Fa%20b%3Fc%23d/close"


def test_step_index_is_sent_only_for_services_that_dedup(protocol):
    plain = protocol.step("game", "id", {"content": "x"}, step_index=None)
    indexed = protocol.step("game", "id", {"content": "x"}, step_index=0)
    assert (plain.headers, plain.is_repeatable) == ({}, False)
    assert (indexed.headers, indexed.is_repeatable) == ({"X-Env-Step-Index": "0"}, True)


# ---- fields


@pytest.mark.parametrize(("reward", "value"), [(1, 1.0), (-0.5, -0.5), (0, 0.0), (True, 1.0), (False, 0.0)])
def test_reward_is_any_finite_number_or_bool(reward, value):
    read = read_reward(reward)
    assert read == value and type(read) is float


@pytest.mark.parametrize("reward", ["1", None, [], {}, float("nan"), float("inf"), -float("inf"), 10**400])
def test_reward_that_is_no_finite_number_is_refused(reward):
    """P99: never a guess, since a wrong reward is learned from."""
    with pytest.raises(MalformedAnswer, match="'reward' as a finite number"):
        read_reward(reward)


@pytest.mark.parametrize("key", ["done", "truncated"])
@pytest.mark.parametrize(("flag", "value"), [(True, True), (False, False), (1, True), (0, False)])
def test_flag_may_be_bool_or_0_and_1(key, flag, value):
    result = read_step({**STEP_REPLY, key: flag})
    assert (result.terminated if key == "done" else result.truncated) is value


@pytest.mark.parametrize("key", ["done", "truncated"])
@pytest.mark.parametrize("flag", ["false", "true", "", None, 2, -1, 0.0, 1.0, [], {}])
def test_flag_of_any_other_kind_is_refused(key, flag):
    """P99: `"false"` is true to Python."""
    with pytest.raises(MalformedAnswer, match=f"'{key}' as true or false"):
        read_step({**STEP_REPLY, key: flag})


@pytest.mark.parametrize("key", ["observation", "reward", "done", "truncated"])
def test_step_answer_without_a_field_is_refused(key):
    reply = {name: value for name, value in STEP_REPLY.items() if name != key}
    with pytest.raises(MalformedAnswer, match=f"no '{key}' among"):
        read_step(reply)


def test_info_may_be_missing_or_null_but_not_ill_typed():
    assert read_step({**STEP_REPLY, "info": None}).info == {}
    assert read_step({key: value for key, value in STEP_REPLY.items() if key != "info"}).info == {}
    with pytest.raises(MalformedAnswer, match="'info' as an object"):
        read_step({**STEP_REPLY, "info": [1]})


@pytest.mark.parametrize("env_id", ["", None, True, 1.5, ".", "..", "x" * 513, ["a"]])
def test_unusable_env_id_is_refused(env_id):
    with pytest.raises(MalformedAnswer, match="env_id"):
        read_env_id({"env_id": env_id})


def test_numeric_env_id_becomes_text():
    assert read_env_id({"env_id": 17}) == "17"


def test_start_reads_done_and_capabilities():
    start = read_start({"observation": None, "done": 1, "capabilities": {"step_dedup": True, "new": 1}})
    assert (start.observation, start.is_terminated, start.info) == ([], True, {})
    assert start.capabilities == Capabilities(step_dedup=True)
    assert read_start({"observation": "x", "done": None}).is_terminated is False


@pytest.mark.parametrize("declared", [None, [], "all", {}, {"step_dedup": "yes", "idle_timeout_s": -1, "name": 3}])
def test_undeclared_or_ill_typed_capabilities_count_as_absent(declared):
    assert read_capabilities(declared) == Capabilities()


def test_capabilities_are_read():
    declared = {"step_dedup": True, "keepalive": True, "idle_timeout_s": 30, "name": "game", "version": "1.2"}
    assert read_capabilities(declared) == Capabilities(**{**declared, "idle_timeout_s": 30.0})


def test_null_prompt_and_tools_are_empty():
    assert read_task_prompt({"task_prompt": None}) == ""
    assert read_tools_schema({"tools_schema": None}) == []
    assert read_allow_parallel({}) is read_allow_parallel({"allow_parallel_tool_call": None}) is False


@pytest.mark.parametrize(
    ("read", "reply"),
    [
        (read_task_prompt, {}),
        (read_task_prompt, {"task_prompt": ["x"]}),
        (read_tools_schema, {}),
        (read_tools_schema, {"tools_schema": {"a": 1}}),
        (read_tools_schema, {"tools_schema": ["move"]}),
        (read_allow_parallel, {"allow_parallel_tool_call": "no"}),
    ],
)
def test_missing_or_ill_typed_task_field_is_refused(read, reply):
    with pytest.raises(MalformedAnswer):
        read(reply)


# ---- answers


@pytest.mark.parametrize(
    ("status", "retry_after", "kind", "applied", "transient"),
    [
        (307, None, EnvRejectedError, False, False),
        (400, None, EnvRejectedError, False, False),
        (401, None, EnvRejectedError, False, False),
        (404, None, EnvGoneError, False, False),
        (408, None, EnvRejectedError, True, False),
        (410, None, EnvGoneError, False, False),
        (422, None, EnvRejectedError, False, False),
        (429, None, EnvRejectedError, False, True),
        (500, None, EnvCrashedError, True, False),
        (502, None, EnvCrashedError, True, True),
        (503, None, EnvCrashedError, True, True),
        (503, "1", EnvCrashedError, False, True),
        (504, None, EnvCrashedError, True, True),
        (504, "1", EnvCrashedError, True, True),
    ],
)
def test_status_decides_the_error(protocol, status, retry_after, kind, applied, transient):
    call = protocol.step("game", "id-7", {"content": "x"}, step_index=None)
    with pytest.raises(kind) as caught:
        protocol.read(call, Answer(status=status, body=b"why\nnot", retry_after=retry_after), read_step)
    error = caught.value
    assert (type(error), error.may_have_been_applied, error.is_transient) == (kind, applied, transient)
    assert (error.call, error.env_name, error.env_id, error.status) == ("step", "game", "id-7", status)
    for part in (call.url, "'game'", "'id-7'", f"HTTP {status} 'why not'", "expected HTTP 200", "next: "):
        assert part in str(error)


def test_404_of_initialize_is_no_lost_session(protocol):
    call = protocol.initialize(env_name="game", seed=0, env_kwargs=None)
    with pytest.raises(EnvRejectedError, match="endpoint is the service's root URL") as caught:
        protocol.check_status(call, Answer(status=404, body=b""))
    assert not isinstance(caught.value, EnvGoneError)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        (format_datetime(datetime.now(timezone.utc) - timedelta(days=1)), 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
    ],
)
def test_retry_after_is_read_as_number_or_date(protocol, header, seconds):
    with pytest.raises(EnvCrashedError) as caught:
        protocol.check_status(protocol.health(), Answer(status=503, body=b"", retry_after=header))
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"3", b"null", b'{"a": ', b"\xff\xfe{", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000],
)
def test_body_that_is_no_json_object_is_a_protocol_error(protocol, body):
    call = protocol.step("game", "id", {"content": "x"}, step_index=0)
    with pytest.raises(EnvProtocolError) as caught:
        protocol.read(call, Answer(status=200, body=body), read_step)
    assert not caught.value.is_transient and len(str(caught.value)) < 2000


def test_token_that_the_service_echoes_is_not_shown(protocol):
    with pytest.raises(EnvCrashedError) as caught:
        protocol.check_status(protocol.health(), Answer(status=500, body=b"headers: Bearer s3cret-token"))
    assert "s3cret" not in str(caught.value) and "***" in str(caught.value)


def test_error_survives_pickling(protocol):
    """Ray carries exceptions between processes."""
    with pytest.raises(EnvCrashedError) as caught:
        protocol.check_status(protocol.health(), Answer(status=503, body=b"", retry_after="1"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is EnvCrashedError and copy.is_busy and str(copy) == str(caught.value)
