# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A step whose answer was lost is applied exactly once."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests

from recipe.agent_env.env_service.environment import Environment
from tests.env_service.service import Service, say, serve
from tests.env_service.toy_envs import EchoEnv


class GateEnv(Environment):
    """Its steps wait for a gate that the test opens."""

    gate = threading.Event()
    entered = threading.Semaphore(0)

    def __init__(self) -> None:
        self.num_steps = 0

    def reset(self, seed=None, options=None):
        return "start", {}

    def step(self, action):
        self.entered.release()
        assert self.gate.wait(timeout=30)
        self.num_steps += 1
        return f"step {self.num_steps}", 1.0, False, False, {}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve({"echo": EchoEnv, "gate": GateEnv}) as running:
        yield running


def test_repeated_index_replays_the_stored_answer(service: Service):
    env_id = service.open()
    first = service.step(env_id, say("a"), index=0)
    again = service.step(env_id, say("a"), index=0)
    assert first.content == again.content
    assert service.step(env_id, say("b"), index=1).json()["observation"][0]["content"] == "2: b"


@pytest.mark.parametrize(
    ("index", "kind"),
    [(3, "step_out_of_order"), (0, "step_out_of_order"), (1, "step_conflict")],
    ids=["gap", "older", "other-action"],
)
def test_index_that_does_not_follow_is_409(service: Service, index: int, kind: str):
    env_id = service.open()
    service.step(env_id, say("a"), index=0)
    service.step(env_id, say("b"), index=1)
    refused = service.step(env_id, say("c"), index=index)
    assert (refused.status_code, refused.json()["error"]) == (409, kind)
    assert service.step(env_id, say("d"), index=2).json()["observation"][0]["content"] == "3: d"


@pytest.mark.parametrize("index", ["-1", "1.0", "", "x", "1" * 20, "\u0663".encode().decode("latin-1")])
def test_malformed_index_is_422(service: Service, index: str):
    headers = {"X-Env-Step-Index": index}
    refused = service.post(service.open(), "step", json={"action": say("a")}, headers=headers)
    assert refused.status_code == 422


def test_last_step_of_an_episode_can_be_repeated(service: Service):
    env_id = service.open(max_steps=1)
    assert service.step(env_id, index=0).json() == service.step(env_id, index=0).json()


def test_reset_starts_the_count_again(service: Service):
    env_id = service.open()
    service.step(env_id, index=0)
    service.post(env_id, "reset", json={"seed": 1})
    assert service.step(env_id, say("z"), index=0).json()["observation"][0]["content"] == "1: z"


def test_steps_without_index_are_counted_too(service: Service):
    env_id = service.open()
    service.step(env_id)
    assert service.step(env_id, index=1).status_code == 200


def test_concurrent_duplicate_waits_for_the_first(service: Service):
    GateEnv.gate.clear()
    env_id = service.open("gate")

    def send(_: int) -> bytes:
        body = {"action": say("go")}
        url = f"{service.url}/api/environment/{env_id}/step"
        return requests.post(url, json=body, headers={"X-Env-Step-Index": "0"}, timeout=30).content

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(send, range(4))
        assert GateEnv.entered.acquire(timeout=30)
        GateEnv.gate.set()
        assert len(set(answers)) == 1
    assert not GateEnv.entered.acquire(blocking=False)


def test_answer_lost_with_the_connection_is_replayed(service: Service):
    """The client hangs up while its action is being applied; the action counts once."""
    GateEnv.gate.clear()
    env_id = service.open("gate")
    body = b'{"action":{"role":"assistant","content":"go","tool_calls":[]}}'
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /api/environment/{env_id}/step HTTP/1.1\r\nHost: x\r\nX-Env-Step-Index: 0\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert GateEnv.entered.acquire(timeout=30)
    GateEnv.gate.set()
    url = f"/api/environment/{env_id}/step"
    answer = service.request("POST", url, data=body, headers={"X-Env-Step-Index": "0"})
    assert answer.json()["observation"][0]["content"] == "step 1"
    assert not GateEnv.entered.acquire(blocking=False)
