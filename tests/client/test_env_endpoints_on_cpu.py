# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Several services behind one client: episodes are spread, stay where they are, and move on when a service dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from recipe.agent_env.client.answers import read_num_free
from recipe.agent_env.client.endpoints import EndpointChooser
from recipe.agent_env.env_client import EnvCrashedError, EnvError, EnvRejectedError, EnvUnreachableError
from tests.client.env_client_faces import ACTION, FACES, connect
from tests.env_service.service import serve
from tests.env_service.toy_envs import EchoEnv
from tests.mock_env_server import MockEnvServer

both_faces = pytest.mark.parametrize("face", FACES)
A, B, C = "http://a", "http://b", "http://c"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def choose(chooser: EndpointChooser, times: int) -> Counter[str]:
    """Open so many episodes; returns how many went where."""
    chosen: Counter[str] = Counter()
    for _ in range(times):
        with chooser.opening() as endpoint:
            chosen[endpoint] += 1
    return chosen


def fail(chooser: EndpointChooser, failure: EnvError) -> str:
    """Fail to open one episode; returns where."""
    with pytest.raises(EnvError), chooser.opening() as endpoint:
        raise failure
    return endpoint


def test_fewest_episodes_decide_where_services_report_nothing(clock):
    chooser = EndpointChooser([A, B, C], clock)
    assert choose(chooser, 9) == {A: 3, B: 3, C: 3}
    for _ in range(2):
        chooser.release(B)
    assert choose(chooser, 2) == {B: 2}


def test_free_places_decide_where_all_report_them(clock):
    chooser = EndpointChooser([A, B], clock)
    chooser.note_report(A, 2)
    chooser.note_report(B, 7)
    assert choose(chooser, 5) == {B: 5}
    assert choose(chooser, 4) == {A: 2, B: 2}
    chooser.release(A)
    assert choose(chooser, 1) == {A: 1}


def test_full_service_is_passed_over_where_others_report_nothing(clock):
    chooser = EndpointChooser([A, B], clock)
    chooser.note_report(A, 1)
    assert choose(chooser, 4) == {A: 1, B: 3}


def test_service_that_fails_is_left_out_for_longer_each_time_up_to_a_limit(clock):
    chooser = EndpointChooser([A, B], clock)
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        assert fail(chooser, EnvUnreachableError("down")) == A
        clock.now += pause_s - 0.01
        assert choose(chooser, 1) == {B: 1}
        chooser.release(B)
        clock.now += 0.02
    assert choose(chooser, 1) == {A: 1}
    chooser.note_opened(A)
    chooser.release(A)
    fail(chooser, EnvUnreachableError("down"))
    clock.now += 1.01
    assert choose(chooser, 1) == {A: 1}


def test_failures_of_one_outage_count_once(clock):
    """Many episodes are opened at once, and each of them fails."""
    chooser = EndpointChooser([A, B], clock)
    for _ in range(10):
        chooser.note_failure(A, EnvUnreachableError("down"))
    assert choose(chooser, 3) == {B: 3}
    clock.now += 1.01
    assert choose(chooser, 1) == {A: 1}


def test_service_that_refuses_a_bad_row_stays_in(clock):
    chooser = EndpointChooser([A, B], clock)
    for endpoint in (A, B, A):
        assert fail(chooser, EnvRejectedError("bad env_kwargs", status=422)) == endpoint


def test_full_service_is_left_out_for_a_second_only(clock):
    chooser = EndpointChooser([A, B], clock)
    for _ in range(3):
        assert fail(chooser, EnvCrashedError("full", status=503, retry_after_s=60.0)) == A
        assert chooser.has_other()
        assert fail(chooser, EnvCrashedError("full", status=503, retry_after_s=60.0)) == B
        assert not chooser.has_other()
        clock.now += 1.01


def test_first_to_come_back_is_taken_when_all_are_left_out(clock):
    chooser = EndpointChooser([A, B], clock)
    assert fail(chooser, EnvUnreachableError("down")) == A
    clock.now += 0.5
    assert fail(chooser, EnvUnreachableError("down")) == B
    assert choose(chooser, 1) == {A: 1}


def test_reports_are_asked_for_now_and_then(clock):
    chooser = EndpointChooser([A, B], clock)
    assert (chooser.due_reports(), chooser.due_reports()) == ([A, B], [])
    chooser.note_report(A, 5)
    chooser.note_report(B, None)
    clock.now += 2.01
    assert chooser.due_reports() == [A]
    clock.now += 28
    assert chooser.due_reports() == [A, B]
    assert EndpointChooser([A], clock).due_reports() == []


@pytest.mark.parametrize(
    ("reply", "num_free"),
    [
        ({"max_sessions": 8, "live_sessions": 3, "waiting": 1}, 4),
        ({"max_sessions": 8}, 8),
        ({"live_sessions": 3}, None),
        ({"max_sessions": "8"}, None),
        ({"max_sessions": True}, None),
    ],
)
def test_free_places_are_read_leniently(reply, num_free):
    assert read_num_free(reply) == num_free


@pytest.fixture
def servers() -> Iterator[list[MockEnvServer]]:
    with MockEnvServer() as first, MockEnvServer() as second:
        yield [first, second]


@both_faces
async def test_episodes_are_spread_and_stay_with_their_service(servers, face):
    async with connect(face, [server.url for server in servers]) as client:
        sessions = [await client.open(env_name="game", seed=seed) for seed in range(6)]
        assert [len(server.episodes) for server in servers] == [3, 3]
        for _ in range(3):
            for session in sessions:
                await session.step(ACTION)
        for session in sessions:
            await session.close()
    for server in servers:
        assert [episode.rewards for episode in server.episodes] == [[0.25, 0.5, 1.0]] * 3
        assert server.live_count == 0


async def test_free_places_are_asked_of_the_services_themselves():
    """One place and nine: nobody waits at the small one."""
    with serve({"echo": EchoEnv}, max_sessions=1) as small, serve({"echo": EchoEnv}, max_sessions=9) as large:
        async with connect("async", [small.url, large.url]) as client:
            await asyncio.gather(*(client.open(env_name="echo") for _ in range(10)))
            assert (small.stats()["live_sessions"], large.stats()["live_sessions"]) == (1, 9)
            assert small.stats()["refused"] == client.stats.retries == 0


@both_faces
async def test_dead_service_is_passed_over(servers, face):
    """P80: it costs no episode, whichever service it is."""
    await asyncio.to_thread(servers[0].stop)
    async with connect(face, [server.url for server in servers]) as client:
        sessions = [await client.open(env_name="game") for _ in range(4)]
        assert [(await session.step(ACTION)).reward for session in sessions] == [0.25] * 4
    assert len(servers[1].episodes) == 4


@both_faces
async def test_full_service_is_not_waited_for_while_another_has_room(servers, face):
    servers[0].capacity = 0
    servers[0].retry_after = "3600"
    async with connect(face, [server.url for server in servers]) as client:
        for _ in range(3):
            await client.open(env_name="game")
    assert len(servers[1].episodes) == 3


@both_faces
async def test_service_that_fails_half_way_through_opening_is_left_out(servers, face, monkeypatch):
    """It would otherwise have the fewest episodes open, and draw in one after the other."""
    monkeypatch.setattr("recipe.agent_env.client.endpoints._FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("recipe.agent_env.client.endpoints._LONGEST_PAUSE_S", 3600.0)
    servers[0].fault("status", call="task-prompt", status=500, times=None)
    async with connect(face, [server.url for server in servers]) as client:
        with pytest.raises(EnvCrashedError):
            await client.open(env_name="game")
        for _ in range(3):
            await client.open(env_name="game")
    assert [len(server.episodes) for server in servers] == [1, 3]
    assert servers[0].live_count == 0


@both_faces
async def test_health_is_asked_of_all_and_one_is_enough(servers, face):
    async with connect(face, [server.url for server in servers], max_retries=0) as client:
        await client.check_health()
        assert [len(server.calls("health")) for server in servers] == [1, 1]
        await asyncio.to_thread(servers[1].stop)
        await client.check_health()
        await asyncio.to_thread(servers[0].stop)
        with pytest.raises(EnvUnreachableError, match="check that the service runs"):
            await client.check_health()


async def test_late_environment_is_closed_where_it_was_made(servers):
    for server in servers:
        server.fault("delay", call="initialize", after=True, seconds=0.8)
    async with connect("async", [server.url for server in servers], request_timeout_s=0.3) as client:
        results = await asyncio.gather(*(client.open(env_name="game") for _ in range(2)), return_exceptions=True)
        assert all(isinstance(result, EnvError) for result in results)
        for server in servers:
            await asyncio.to_thread(server.wait_until, lambda server=server: server.episodes[0].closes == 1)
