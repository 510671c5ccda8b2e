# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random requests against the real service: never a 5xx, never a stack trace, and the session lives on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.sokoban.sokoban_env import SokobanEnv
from tests.env_service.service import Service, serve
from tests.env_service.toy_envs import EchoEnv

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=12,
)
NAMES = st.sampled_from(["echo", "sokoban", "say", "wait", "push_up", "move_left"]) | st.text(max_size=10)
ARGUMENTS = JSON.map(json.dumps) | st.text(max_size=30) | JSON
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=5) | JSON,
        "type": st.just("function") | JSON,
        "function": st.fixed_dictionaries({}, optional={"name": NAMES | JSON, "arguments": ARGUMENTS}) | JSON,
    },
)
ACTIONS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant") | JSON,
        "content": st.text(max_size=30) | JSON,
        "tool_calls": st.lists(CALLS, max_size=3) | JSON,
        "extra": JSON,
    },
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "dim_room": st.lists(st.integers(-2, 9), max_size=3) | JSON,
        "num_boxes": st.integers(-2, 9) | JSON,
        "max_steps": st.integers(-2, 9) | JSON,
        "room_setup": JSON
        | st.fixed_dictionaries(
            {},
            optional={
                "room_fixed": st.lists(st.lists(st.integers(-1, 7), max_size=6), max_size=6) | JSON,
                "room_state": st.lists(st.lists(st.integers(-1, 7), max_size=6), max_size=6) | JSON,
                "box_mapping": JSON,
            },
        ),
        "other": JSON,
    },
)
HEADERS = st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve({"echo": EchoEnv, "sokoban": SokobanEnv}, max_sessions=100_000, max_body_bytes=100_000) as running:
        yield running


def check(answer: Any) -> None:
    """What every answer owes."""
    assert answer.status_code < 500, answer.text
    assert "Traceback" not in answer.text and '.py"' not in answer.text
    parsed = answer.json()
    if answer.status_code >= 400:
        assert set(parsed) >= {"error", "message"} and len(parsed["message"]) <= 300


def send(service: Service, operation: str, body: Any, index: str | None = None) -> None:
    """Send a body, text or object, to an open session."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if index is None else {"X-Env-Step-Index": index}
    check(service.request("POST", operation, data=data, headers=headers))


@FUZZ
@given(body=st.binary(max_size=200) | JSON | st.fixed_dictionaries({"action": ACTIONS}), index=HEADERS)
def test_step_survives_anything(service: Service, body: Any, index: str | None):
    env_id = service.open("echo")
    send(service, f"/api/environment/{env_id}/step", body, index)
    assert service.step(env_id).status_code == 200
    service.close(env_id)


@FUZZ
@given(action=ACTIONS)
def test_sokoban_step_survives_anything(service: Service, action: Any):
    env_id = service.open("sokoban")
    send(service, f"/api/environment/{env_id}/step", {"action": action})
    assert service.step(env_id).status_code == 200
    service.close(env_id)


@FUZZ
@given(
    body=st.binary(max_size=200)
    | JSON
    | st.fixed_dictionaries(
        {},
        optional={
            "env_name": NAMES | JSON,
            "seed": st.integers() | JSON,
            "env_kwargs": OPTIONS | JSON,
            "extra": JSON,
        },
    )
)
def test_initialize_survives_anything(service: Service, body: Any):
    send(service, "/api/environment/initialize", body)


@FUZZ
@given(
    body=st.binary(max_size=200)
    | JSON
    | st.fixed_dictionaries({}, optional={"seed": st.integers() | JSON, "options": OPTIONS | JSON})
)
def test_reset_survives_anything(service: Service, body: Any):
    env_id = service.open("sokoban")
    send(service, f"/api/environment/{env_id}/reset", body)
    service.close(env_id)


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]),
    path=st.lists(
        st.sampled_from(["api", "environment", "initialize", "step", "x", "..", "%00", "%2F", "?a=b", "é", ""]),
        max_size=5,
    ),
)
def test_any_path_survives(service: Service, method: str, path: list[str]):
    answer = service.request(method, "/" + "/".join(path), data=b"{}", allow_redirects=False)
    assert answer.status_code < 500 and "Traceback" not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b'{"seed": NaN, "env_name": "echo"}',
        b'{"seed": 1e999, "env_name": "echo"}',
        b'{"env_name": "echo", "env_kwargs": {"size": -Infinity}}',
        b'{"seed": ' + b"9" * 5000 + b', "env_name": "echo"}',
        b'{"env_name": "\xff"}',
        b'{"env_name": "echo", "env_kwargs": "{}"}',
        b'{"env_name": "echo", "seed": 1.5}',
        b'{"env_name": "echo", "seed": true}',
        "\ufeff{}".encode(),
        "{}".encode("utf-16"),
    ],
    ids=range(14),
)
def test_known_bad_bodies_are_4xx(service: Service, body: bytes):
    answer = service.request("POST", "/api/environment/initialize", data=body)
    check(answer)
    assert answer.status_code in (400, 422)
