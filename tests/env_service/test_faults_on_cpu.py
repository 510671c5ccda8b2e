# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An environment that fails harms its own session and no other, and nobody is shown a stack trace."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.env_service.service import Service, serve
from tests.env_service.toy_envs import AsyncEnv, EchoEnv, FaultyEnv, RawEnv


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve({"echo": EchoEnv, "faulty": FaultyEnv, "async": AsyncEnv}) as running:
        yield running


def assert_no_trace(text: str) -> None:
    """No answer may show code."""
    assert "Traceback" not in text and ".py" not in text


@pytest.mark.parametrize("where", ["init", "reset"])
@pytest.mark.parametrize("what", ["raise", "exit"])
def test_crash_at_start_is_500_and_leaves_nothing(service: Service, where: str, what: str):
    before, num_alive = service.stats(), FaultyEnv.num_alive
    answer = service.initialize("faulty", where=where, what=what)
    assert (answer.status_code, answer.json()["error"]) == (500, "environment_crashed")
    assert "faulty" in answer.json()["message"]
    assert_no_trace(answer.text)
    after = service.stats()
    assert after["live_sessions"] == before["live_sessions"] and after["crashed"] == before["crashed"] + 1
    service.wait_for(lambda _: FaultyEnv.num_alive == num_alive)


@pytest.mark.parametrize("what", ["raise", "exit"])
def test_crash_in_step_ends_its_session_only(service: Service, what: str):
    good, bad = service.open("echo"), service.open("faulty", where="step", what=what)
    answer = service.step(bad, index=0)
    assert (answer.status_code, answer.json()["error"]) == (500, "environment_crashed")
    assert ("RuntimeError" in answer.text) and "faulty" in answer.text
    assert_no_trace(answer.text)
    gone = service.step(bad, index=0)
    assert gone.status_code == 410 and "step raised" in gone.json()["message"]
    assert service.step(good).status_code == 200


def test_failing_close_is_counted_not_told(service: Service):
    before = service.stats()["close_failures"]
    assert service.close(service.open("faulty", where="close")).status_code == 200
    assert service.stats()["close_failures"] == before + 1


NOT_A_STEP: dict[str, Any] = {
    "no-tuple": None,
    "four": ("x", 0.0, False, {}),
    "nan-reward": ("x", math.nan, False, False, {}),
    "infinite-reward": ("x", math.inf, False, False, {}),
    "text-reward": ("x", "1", False, False, {}),
    "no-reward": ("x", None, False, False, {}),
    "bool-reward": ("x", True, False, False, {}),
    "text-flag": ("x", 0.0, "false", False, {}),
    "number-flag": ("x", 0.0, False, 0, {}),
    "observation-none": (None, 0.0, False, False, {}),
    "observation-object": ({"role": "user", "content": "x"}, 0.0, False, False, {}),
    "observation-texts": (["x"], 0.0, False, False, {}),
    "message-without-role": ([{"content": "x"}], 0.0, False, False, {}),
    "message-without-text": ([{"role": "user", "content": None}], 0.0, False, False, {}),
    "message-not-json": ([{"role": "user", "content": "x", "extra": object()}], 0.0, False, False, {}),
    "info-list": ("x", 0.0, False, False, []),
    "info-nan": ("x", 0.0, False, False, {"a": math.nan}),
    "info-not-json": ("x", 0.0, False, False, {"a": object()}),
}
NOT_A_START: dict[str, dict[str, Any]] = {
    "no-tuple": {"reset_result": "x"},
    "five": {"reset_result": ("x", 0.0, False, False, {})},
    "prompt-none": {"task_prompt": None},
    "tools-none": {"tools_schema": None},
    "tools-no-functions": {"tools_schema": [{"name": "x"}]},
    "tools-bad-schema": {
        "tools_schema": [{"function": {"name": "x", "parameters": {"type": "object", "properties": 3}}}]
    },
    "over-text": {"is_over": "no"},
}


@pytest.mark.parametrize("name", NOT_A_STEP)
def test_step_outside_the_interface_is_500(name: str):
    with serve({"raw": lambda: RawEnv(step_result=NOT_A_STEP[name])}) as service:
        env_id = service.open("raw")
        answer = service.step(env_id)
        assert (answer.status_code, answer.json()["error"]) == (500, "environment_invalid_answer")
        assert answer.json()["message"].startswith("raw: ")
        assert_no_trace(answer.text)
        assert service.stats()["live_sessions"] == 0


@pytest.mark.parametrize("name", NOT_A_START)
def test_start_outside_the_interface_is_500(name: str):
    with serve({"raw": lambda: RawEnv(**NOT_A_START[name])}) as service:
        answer = service.initialize("raw")
        assert (answer.status_code, answer.json()["error"]) == (500, "environment_invalid_answer")
        assert_no_trace(answer.text)


def test_factory_that_returns_no_environment_is_500():
    with serve({"nothing": lambda: object()}) as service:
        answer = service.initialize("nothing")
        assert (answer.status_code, answer.json()["error"]) == (500, "environment_invalid_answer")
        assert "has no method 'reset'" in answer.json()["message"]


def test_info_that_contains_itself_is_500():
    info: dict[str, Any] = {}
    info["self"] = info
    with serve({"raw": lambda: RawEnv(step_result=("x", 0.0, False, False, info))}) as service:
        assert service.step(service.open("raw")).status_code == 500


def test_numpy_values_become_plain_numbers():
    """A fallback to text would turn 3 into "3"."""
    info = {"n": np.int64(3), "x": np.float32(0.5), "grid": np.eye(2, dtype=int), "is_won": np.bool_(True)}
    result = ("x", np.float64(0.5), np.bool_(True), np.bool_(False), info)
    with serve({"raw": lambda: RawEnv(step_result=result)}) as service:
        answer = service.step(service.open("raw")).json()
    assert (answer["reward"], answer["done"], answer["truncated"]) == (0.5, True, False)
    assert answer["info"] == {"n": 3, "x": 0.5, "grid": [[1, 0], [0, 1]], "is_won": True}


def test_half_surrogates_become_valid_text(service: Service):
    env_id = service.open("echo")
    body = rb'{"action": {"role": "assistant", "content": "a\ud83d", "tool_calls": []}}'
    answer = service.request("POST", f"/api/environment/{env_id}/step", data=body)
    assert answer.json()["observation"][0]["content"] == "1: a?"


def test_hung_step_is_504_and_its_thread_is_replaced():
    class OwnEnv(FaultyEnv):
        num_created = num_alive = 0

    with serve({"echo": EchoEnv, "faulty": OwnEnv}, call_timeout_s=0.2, max_threads=1) as service:
        for _ in range(3):
            env_id = service.open("faulty", where="step", what="sleep", seconds=2.0)
            answer = service.step(env_id)
            assert (answer.status_code, answer.json()["error"]) == (504, "environment_timeout")
            assert service.step(env_id).status_code == 410
        assert service.step(service.open("echo")).status_code == 200
        assert service.stats()["timed_out"] == 3
        service.wait_for(lambda _: (OwnEnv.num_created, OwnEnv.num_alive) == (3, 0))


@pytest.mark.parametrize("where", ["init", "reset"])
def test_hung_start_is_504_and_closed_when_it_comes_back(where: str):
    class OwnEnv(FaultyEnv):
        num_created = num_alive = 0

    with serve({"faulty": OwnEnv}, call_timeout_s=0.2, max_sessions=1) as service:
        answer = service.initialize("faulty", where=where, what="sleep", seconds=0.5)
        assert answer.status_code == 504
        assert service.stats()["live_sessions"] == 0
        service.wait_for(lambda _: (OwnEnv.num_created, OwnEnv.num_alive) == (1, 0))
        assert service.initialize("faulty").status_code == 200


def test_hung_coroutine_is_cancelled_and_its_environment_closed():
    AsyncEnv.num_closed = 0
    with serve({"async": AsyncEnv}, call_timeout_s=0.1) as service:
        assert service.step(service.open("async", delay_s=60.0)).status_code == 504
        service.wait_for(lambda _: AsyncEnv.num_closed == 1)


def test_close_does_not_wait_for_a_running_step():
    class OwnEnv(FaultyEnv):
        num_created = num_alive = 0

    with serve({"faulty": OwnEnv}) as service:
        env_id = service.open("faulty", where="step", what="sleep", seconds=0.5)
        with ThreadPoolExecutor(1) as pool:
            stepping = pool.submit(Service(service.url).step, env_id)
            service.wait_for(lambda _: any(thread.name.startswith("env-") for thread in threading.enumerate()))
            assert service.close(env_id).status_code == 200
            assert service.stats()["live_sessions"] == 0
            assert stepping.result().status_code in (200, 410)
        service.wait_for(lambda _: (OwnEnv.num_created, OwnEnv.num_alive) == (1, 0))


def test_other_sessions_answer_while_one_burns_the_processor(service: Service):
    """P85: the eighth is inside a long step when the other seven play."""
    slow = service.open("faulty", where="step", what="burn", seconds=2.0)
    others = [service.open("echo") for _ in range(7)]
    with ThreadPoolExecutor(1) as pool:
        burning = pool.submit(Service(service.url).step, slow)
        for env_id in others:
            assert service.step(env_id).status_code == 200
        is_still_burning = not burning.done()
        assert burning.result().status_code == 200
    assert is_still_burning
