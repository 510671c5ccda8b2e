# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arbitrary answers through the real client: either a typed result that keeps its promises, or an EnvError."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.agent_env.env_client import AsyncEnvClient, EnvClient, EnvClientConfig, EnvError
from tests.client.env_client_faces import ACTION, SHORT_LIMITS
from tests.mock_env_server import ABSENT, MockEnvServer

CONFIG: dict[str, Any] = {**SHORT_LIMITS, "max_retries": 0}
WORDS = [
    "role",
    "content",
    "type",
    "text",
    "image_url",
    "tool_calls",
    "name",
    "tool_call_id",
    "user",
    "tool",
    "assistant",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.sampled_from(WORDS)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=15,
)
FIELD = JSON | st.just(ABSENT)
STEP_FIELDS = st.fixed_dictionaries(
    {}, optional={"observation": FIELD, "reward": FIELD, "done": FIELD, "truncated": FIELD, "info": FIELD}
)
START_FIELDS = st.fixed_dictionaries(
    {}, optional={"observation": FIELD, "env_id": FIELD, "info": FIELD, "done": FIELD, "capabilities": FIELD}
)
BODIES = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())

bounded = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: MockEnvServer) -> Iterator[EnvClient]:
    with EnvClient(EnvClientConfig(endpoint=server.url, **CONFIG)) as made:
        yield made


def check_messages(messages: Any) -> None:
    """What every normalised observation promises."""
    for message in messages:
        assert isinstance(message["role"], str) and isinstance(message["content"], str)
        assert set(message) <= {"role", "content", "tool_calls", "tool_call_id", "name"}
        message["content"].encode("utf-8")
    json.dumps(messages)


def check_step(result: Any) -> None:
    """What every step result promises."""
    check_messages(result.observation)
    assert type(result.reward) is float and math.isfinite(result.reward)
    assert type(result.terminated) is type(result.truncated) is bool and type(result.info) is dict


def check_session(session: Any) -> None:
    """What every opened session promises."""
    check_messages(session.observation)
    assert type(session.task_prompt) is str and type(session.tools_schema) is list and type(session.info) is dict
    assert type(session.allow_parallel_tool_call) is type(session.is_terminated) is bool


@bounded
@given(fields=STEP_FIELDS)
def test_step_fields_of_any_kind(server, client, fields):
    server.clear_faults()
    server.fault("patch", call="step", patch=fields)
    with client.open(env_name="game") as session:
        try:
            check_step(session.step(ACTION))
        except EnvError as error:
            assert error.may_have_been_applied and error.env_id == session.env_id


@bounded
@given(body=BODIES)
def test_step_body_of_any_kind(server, client, body):
    server.clear_faults()
    server.fault("raw", call="step", body=body)
    with client.open(env_name="game") as session:
        try:
            check_step(session.step(ACTION))
        except EnvError as error:
            assert len(str(error)) < 2000


@bounded
@given(
    call=st.sampled_from(["initialize", "task-prompt", "tools-schema-openai", "allow-parallel-tool-call", "close"]),
    status=st.sampled_from([200, 200, 201, 204, 302, 400, 404, 429, 500, 503]),
    body=BODIES,
)
def test_opening_answers_of_any_kind(server, client, call, status, body):
    server.clear_faults()
    server.fault("status", call=call, status=status, body=body, after=call != "initialize")
    try:
        with client.open(env_name="game") as session:
            check_session(session)
    except EnvError as error:
        assert error.env_name == "game"
    assert server.live_count == client.stats.live == 0


@bounded
@given(fields=START_FIELDS)
def test_start_fields_of_any_kind(server, client, fields):
    server.clear_faults()
    server.lose_sessions()
    server.fault("patch", call="initialize", patch=fields)
    try:
        with client.open(env_name="game") as session:
            check_session(session)
    except EnvError:
        pass
    assert client.stats.live == 0
    assert "env_id" in fields or server.live_count == 0


def test_async_face_survives_answers_of_any_kind(server):
    """The same answers through the async face, all on one client as in a rollout."""
    loop = asyncio.new_event_loop()
    client = AsyncEnvClient(EnvClientConfig(endpoint=server.url, **CONFIG))

    async def play() -> None:
        try:
            async with await client.open(env_name="game") as session:
                check_session(session)
                check_step(await session.step(ACTION))
        except EnvError:
            pass

    @bounded
    @given(fields=STEP_FIELDS, start=START_FIELDS, body=BODIES)
    def run(fields, start, body):
        server.clear_faults()
        server.fault("patch", call="initialize", patch=start)
        server.fault("patch", call="step", patch=fields)
        loop.run_until_complete(play())
        server.fault("raw", call="step", body=body)
        loop.run_until_complete(play())

    try:
        run()
        loop.run_until_complete(client.aclose())
    finally:
        loop.close()
    assert client.stats.live == 0
