# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Capacity, idle sessions, body size, the bearer token, memory."""

import gc
import http.client
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests

from recipe.agent_env.env_service.settings import ServiceSettings
from tests.env_service.service import Service, call, say, serve
from tests.env_service.toy_envs import EchoEnv, FaultyEnv


def test_full_service_answers_503_with_retry_after():
    with serve({"echo": EchoEnv}, max_sessions=2, queue_wait_s=0.0, retry_after_s=3) as service:
        first, _ = service.open(), service.open()
        answer = service.initialize()
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "3")
        assert (answer.json()["error"], service.stats()["refused"]) == ("at_capacity", 1)
        service.close(first)
        assert service.initialize().status_code == 200


@pytest.mark.parametrize("queue_wait_s", [0.0, 5.0], ids=["refused", "queued"])
def test_twice_as_many_clients_as_places_all_finish(queue_wait_s: float):
    with serve({"echo": EchoEnv}, max_sessions=4, queue_wait_s=queue_wait_s) as service:

        def play(_: int) -> int:
            own = Service(service.url)
            while (answer := own.initialize(max_steps=3)).status_code == 503:
                threading.Event().wait(0.01)
            env_id = answer.json()["env_id"]
            steps = 0
            while not own.step(env_id, index=steps).json()["done"]:
                steps += 1
            own.close(env_id)
            return steps

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(play, range(8))) == [2] * 8
        stats = service.stats()
        assert (stats["opened"], stats["closed"], stats["live_sessions"]) == (8, 8, 0)


def test_line_for_a_place_is_first_come_first_served():
    with serve({"echo": EchoEnv}, max_sessions=1, queue_wait_s=20.0) as service:
        held = service.open()
        order: list[int] = []

        def play(number: int) -> None:
            own = Service(service.url)
            env_id = own.open()
            order.append(number)
            own.close(env_id)

        threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
        for number, thread in enumerate(threads):
            thread.start()
            service.wait_for(lambda stats, waiting=number + 1: stats["waiting"] == waiting)
        service.close(held)
        for thread in threads:
            thread.join()
        assert order == [0, 1, 2, 3]


def test_failed_starts_give_their_place_back():
    with serve({"faulty": FaultyEnv}, max_sessions=1, queue_wait_s=0.0) as service:
        for _ in range(3):
            assert service.initialize("faulty", where="reset").status_code == 500
        assert service.initialize("faulty").status_code == 200


def test_client_that_hangs_up_in_line_leaves_no_session():
    with serve({"echo": EchoEnv}, max_sessions=1, queue_wait_s=30.0) as service:
        held = service.open()
        with pytest.raises(requests.Timeout):
            requests.post(f"{service.url}/api/environment/initialize", json={"env_name": "echo"}, timeout=0.3)
        service.close(held)
        service.wait_for(lambda stats: stats["opened"] == 2 and stats["live_sessions"] == 0)


def test_idle_session_is_reaped_and_a_kept_one_is_not():
    with serve({"echo": EchoEnv}, idle_timeout_s=1.0) as service:
        idle, kept = service.open(), service.open()
        service.wait_for(lambda stats: service.post(kept, "keepalive").ok and stats["reaped"] == 1)
        gone = service.step(idle)
        assert gone.status_code == 410 and "no request came" in gone.json()["message"]
        assert service.step(kept).status_code == 200


def test_session_inside_a_long_step_is_not_reaped():
    with serve({"faulty": FaultyEnv}, idle_timeout_s=0.2) as service:
        env_id = service.open("faulty", where="step", what="sleep", seconds=1.0)
        assert service.step(env_id).status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_body_is_413(is_chunked: bool):
    with serve({"echo": EchoEnv}, max_body_bytes=2000) as service:
        env_id = service.open()
        body = b'{"action": {"content": "' + b"x" * 3000 + b'"}}'
        answer = service.post(env_id, "step", data=iter([body[:1500], body[1500:]]) if is_chunked else body)
        assert (answer.status_code, answer.json()["error"]) == (413, "body_too_large")
        assert service.step(env_id).status_code == 200


def test_body_limit_holds_before_the_body_is_sent():
    with serve({"echo": EchoEnv}, max_body_bytes=2000) as service:
        connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=10)
        connection.putrequest("POST", "/api/environment/initialize")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_token_guards_everything_but_health():
    with serve({"echo": EchoEnv}, bearer_token="s3cret") as service:
        assert service.request("GET", "/").status_code == 200
        paths = [
            "/stats",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/nowhere",
            "//stats",
            "/api/environment/x/task-prompt",
        ]
        assert {service.request("GET", path).status_code for path in paths} == {401}
        for wrong in ("s3cret", "Bearer s3cre", "Bearer s3cret2", "bearer s3cret", "Basic s3cret", "Bearer \xff"):
            answer = service.request("POST", "/api/environment/initialize", headers={"Authorization": wrong})
            assert answer.status_code == 401, wrong
            assert "s3cret" not in answer.text and answer.headers["WWW-Authenticate"] == "Bearer"
        service.http.headers["Authorization"] = "Bearer s3cret"
        assert service.step(service.open()).status_code == 200


def test_token_stays_out_of_the_settings_text():
    assert "s3cret" not in repr(ServiceSettings(bearer_token="s3cret"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_sessions": 0},
        {"max_threads": 0},
        {"workers": -1},
        {"workers": 5, "max_sessions": 4},
        {"max_body_bytes": 10},
        {"idle_timeout_s": 0.0},
        {"call_timeout_s": -1.0},
        {"queue_wait_s": -1.0},
        {"bearer_token": " "},
    ],
    ids=str,
)
def test_settings_out_of_bounds_are_refused_by_name(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServiceSettings(**wrong)


def test_memory_is_flat_over_episodes_with_large_observations():
    """60 more episodes of 100 kB observations: what stays is less than a few of them."""
    with serve({"echo": EchoEnv}, max_sessions=4) as service:

        def play(count: int) -> None:
            for _ in range(count):
                env_id = service.open(size=100_000)
                for index in range(3):
                    assert service.step(env_id, call("say", {"text": "x"}), index=index).status_code == 200
                service.close(env_id)

        play(5)
        gc.collect()
        tracemalloc.start()
        play(10)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        play(60)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert after - before < 1_000_000


def test_oversized_action_text_is_echoed_whole():
    with serve({"echo": EchoEnv}) as service:
        text = "y" * 1_000_000
        assert service.step(service.open(), say(text)).json()["observation"][0]["content"] == f"1: {text}"
