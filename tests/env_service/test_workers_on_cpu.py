# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sessions in worker processes keep every promise that sessions in one process keep."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.settings import ServiceSettings
from recipe.agent_env.env_service.workers import ProcessBackend
from tests.env_service.service import Service, call, say, serve
from tests.env_service.toy_envs import EchoEnv, FaultyEnv


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve({"echo": EchoEnv, "faulty": FaultyEnv}, workers=2, max_sessions=8, queue_wait_s=0.0) as running:
        yield running


def pid_of(service: Service, env_id: str) -> int:
    return service.step(env_id).json()["info"]["pid"]


def test_sessions_are_spread_and_stay_with_their_worker(service: Service):
    """P83: with several processes every call of a session still finds it."""
    ids = [service.open("faulty") for _ in range(4)]
    pids = [[pid_of(service, env_id) for env_id in ids] for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert sorted(pids[0].count(pid) for pid in set(pids[0])) == [2, 2]
    assert os.getpid() not in pids[0]
    for env_id in ids:
        service.close(env_id)


def test_protocol_is_the_same(service: Service):
    env_id = service.open("echo", max_steps=2)
    assert service.get(env_id, "task-prompt").json()["task_prompt"] == "Say something."
    assert service.step(env_id, call("fly")).json()["error"] == "unknown_tool"
    first = service.step(env_id, say("a"), index=0)
    assert service.step(env_id, say("a"), index=0).content == first.content
    assert service.step(env_id, say("b"), index=1).json()["done"] is True
    assert service.post(env_id, "reset", json={"seed": 1}).status_code == 200
    assert service.close(env_id).status_code == 200
    assert (service.step(env_id).status_code, service.step("nobody").status_code) == (410, 404)
    assert service.step("w9g0-x").status_code == 404
    assert service.initialize("nobody").status_code == 404


def test_capacity_is_of_the_whole_service(service: Service):
    ids = [service.open("echo") for _ in range(8)]
    assert service.initialize("echo").status_code == 503
    service.close(ids[0])
    ids[0] = service.open("echo")
    for env_id in ids:
        service.close(env_id)
    service.wait_for(lambda stats: stats["live_sessions"] == 0)


def test_failed_starts_give_their_place_back(service: Service):
    for _ in range(10):
        assert service.initialize("faulty", where="reset").status_code == 500
    ids = [service.open("echo") for _ in range(8)]
    for env_id in ids:
        service.close(env_id)


def test_burning_environment_leaves_the_other_worker_free(service: Service):
    slow, other = service.open("faulty", where="step", what="burn", seconds=1.5), service.open("echo")
    with ThreadPoolExecutor(1) as pool:
        burning = pool.submit(Service(service.url).step, slow)
        assert service.step(other).status_code == 200
        assert not burning.done()
        assert burning.result().status_code == 200
    service.close(slow)
    service.close(other)


def test_dead_worker_loses_its_sessions_only_and_is_replaced(service: Service):
    service.wait_for(lambda stats: stats["live_sessions"] == 0 and stats["workers"] == 2)
    before = service.stats()
    dying, other = service.open("faulty", where="step", what="die"), service.open("echo")
    answer = service.step(dying)
    assert (answer.status_code, answer.json()["error"]) == (500, "worker_died")
    service.wait_for(lambda stats: stats["lost"] == before["lost"] + 1)
    assert service.step(dying).status_code == 410
    assert service.close(dying).status_code == 200
    assert service.step(other).status_code == 200
    service.close(other)
    after = service.wait_for(lambda stats: stats["workers"] == 2)
    assert after["opened"] >= before["opened"]
    ids = [service.open("echo") for _ in range(8)]
    assert service.initialize("echo").status_code == 503
    for env_id in ids:
        service.close(env_id)


def test_killed_worker_is_noticed_without_a_request(service: Service):
    service.wait_for(lambda stats: stats["workers"] == 2)
    env_id = service.open("faulty")
    os.kill(pid_of(service, env_id), signal.SIGKILL)
    service.wait_for(lambda _: service.step(env_id).status_code == 410)
    service.wait_for(lambda stats: stats["workers"] == 2)


async def test_socket_of_a_dead_worker_is_closed():
    """Left to the garbage collector it would be closed in any thread, which aborts the process under uvloop."""
    backend = ProcessBackend(EnvironmentRegistry({"echo": EchoEnv}), ServiceSettings(workers=1))
    await backend.start()
    worker = backend._workers[0]
    worker._process.kill()
    while backend._workers.get(0) in (None, worker):  # bounded by the test's own limit
        await asyncio.sleep(0.02)
    assert worker._writer.is_closing()
    await backend.shutdown()


def test_workers_end_with_the_service():
    others = set(psutil.Process().children())
    with serve({"echo": EchoEnv}, workers=2) as service:
        service.open("echo")
        workers = set(psutil.Process().children()) - others
    gone, alive = psutil.wait_procs(list(workers), timeout=10)
    assert len(gone) == 2 and not alive


async def test_factory_that_cannot_travel_stops_the_start():
    backend = ProcessBackend(EnvironmentRegistry({"echo": lambda: EchoEnv()}), ServiceSettings(workers=1))
    with pytest.raises(RuntimeError, match="did not start") as caught:
        await backend.start()
    assert "pickle" in str(caught.value.__cause__)
