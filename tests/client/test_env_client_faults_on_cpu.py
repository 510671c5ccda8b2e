# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment client against a service that fails: each error provoked for real, on both faces."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from recipe.agent_env.env_client import (
    EnvCrashedError,
    EnvError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
    EnvTimeoutError,
    EnvUnreachableError,
)
from tests.client.env_client_faces import ACTION, FACES, connect
from tests.mock_env_server import ABSENT, EnvScript, MockEnvServer, Step

both_faces = pytest.mark.parametrize("face", FACES)
DEDUP = {"step_dedup": True}
CALLS_OF_AN_EPISODE = ("initialize", "task-prompt", "reset", "step")
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer() as running:
        yield running


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """A listener that answers every connection with the same bytes; yields its URL."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def full_listener() -> Iterator[str]:
    """A port whose queue is full, so that connecting to it hangs; yields its URL."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            waiting.append(client)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for client in waiting:
            client.close()


def closed_port_url() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# ---- no answer


@both_faces
@pytest.mark.parametrize("url", [closed_port_url(), "http://no-such-host.invalid:80"], ids=["closed", "unknown host"])
async def test_unreachable_service_is_named(face, url):
    async with connect(face, url, max_retries=2) as client:
        with pytest.raises(EnvUnreachableError, match="check that the service runs") as caught:
            await client.open(env_name="game", seed=1)
        assert client.stats.retries == 2
    error = caught.value
    assert error.may_have_been_applied is False
    assert (error.call, error.env_name, error.env_id, error.status) == ("initialize", "game", None, None)
    assert f"{url}/api/environment/initialize" in str(error)


@both_faces
async def test_connection_that_never_stands_times_out_unapplied(face):
    with full_listener() as url:
        async with connect(face, url, connect_timeout_s=0.2, max_retries=1) as client:
            with pytest.raises(EnvTimeoutError, match=r"no connection within 0\.2 s") as caught:
                await client.open(env_name="game")
            assert client.stats.retries == 1
    assert caught.value.may_have_been_applied is False


@both_faces
async def test_every_call_is_cut_at_its_limit(server, face):
    """P70: silence, and one byte a second, which no limit per read would ever cut. All cases at once, one seed each."""
    cases = [(kind, call) for kind in ("hang", "slow_body", "slow_headers") for call in CALLS_OF_AN_EPISODE]
    for seed, (kind, call) in enumerate(cases):
        server.fault(kind, call=call, seed=seed, seconds=0.5, times=None)

    async with connect(face, server.url, request_timeout_s=2.0, late_answer_s=0, close_timeout_s=2) as client:

        async def play(seed: int) -> None:
            session = await client.open(env_name="game", seed=seed)
            await session.reset(seed=seed)
            await session.step(ACTION)

        failures = await asyncio.gather(*(play(seed) for seed in range(len(cases))), return_exceptions=True)
        assert client.stats.retries == 0
    assert {type(failure) for failure in failures} == {EnvTimeoutError}
    assert [failure.call for failure in failures] == [call for _, call in cases]
    assert all(
        failure.may_have_been_applied and "no complete answer within 2 s" in str(failure) for failure in failures
    )


@both_faces
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_dropped_step_is_never_repeated(server, face, after):
    """P73: the client cannot know whether the step was applied."""
    server.fault("drop", call="step", step=1, after=after)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await session.step(ACTION)
        with pytest.raises(EnvUnreachableError, match="see the service's log for a crash or restart") as caught:
            await session.step(ACTION)
        with pytest.raises(RuntimeError, match="may have been applied; reset the session or open a new one"):
            await session.step(ACTION)
    assert caught.value.may_have_been_applied is True
    assert (caught.value.env_id, len(server.calls("step"))) == (server.episodes[0].env_id, 2)
    assert server.episodes[0].rewards == ([0.25, 0.5] if after else [0.25])
    assert server.live_count == 0


@both_faces
async def test_step_that_was_surely_not_applied_may_be_tried_again(server, face):
    server.fault("status", call="step", status=422)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        with pytest.raises(EnvRejectedError):
            await session.step(ACTION)
        assert (await session.step(ACTION)).reward == 0.25


@both_faces
async def test_reset_settles_the_doubt_about_a_failed_step(server, face):
    server.fault("drop", call="step", after=True)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        with pytest.raises(EnvUnreachableError):
            await session.step(ACTION)
        await session.reset()
        assert (await session.step(ACTION)).reward == 0.25


@both_faces
@pytest.mark.parametrize("kind", ["drop", "truncated"])
async def test_lost_answer_is_fetched_again_where_steps_are_deduplicated(server, face, kind):
    """P73: applied once, although it was sent three times."""
    server.script("game", EnvScript(capabilities=DEDUP))
    server.fault(kind, call="step", step=0, after=True)
    server.fault(kind, call="step", step=1, after=True)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        rewards = [(await session.step(ACTION)).reward for _ in range(3)]
        assert client.stats.retries == 2
    assert rewards == server.episodes[0].rewards == [0.25, 0.5, 1.0]


@both_faces
@pytest.mark.parametrize("call", ["initialize", "reset", "task-prompt", "tools-schema-openai", "close"])
@pytest.mark.parametrize("kind", ["drop", "truncated"])
async def test_repeatable_call_is_repeated_after_a_broken_connection(server, face, call, kind):
    server.fault(kind, call=call)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await session.reset()
        await session.close()
        assert client.stats.closed == 1
    usual = {"initialize": 1, "reset": 1, "close": 1}.get(call, 2)
    assert len(server.calls(call)) == usual + 1


# ---- an answer that says no


@both_faces
@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("call", ["initialize", "reset", "task-prompt", "close"])
async def test_passing_trouble_is_waited_out(server, face, status, call):
    server.fault("status", call=call, status=status, times=2)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await session.reset()
        await session.close()
        assert (client.stats.retries, client.stats.closed) == (2, 1)


@both_faces
async def test_starting_service_is_waited_for(server, face):
    """P79: 503 with Retry-After three times, then 200; more often than `max_retries` allows for faults."""
    server.fault("status", call="initialize", status=503, headers={"Retry-After": "0.05"}, times=3)
    async with connect(face, server.url, max_retries=1) as client:
        await client.open(env_name="game")
        assert client.stats.retries == 3


@both_faces
async def test_wait_for_a_full_service_is_bounded(server, face):
    server.capacity = 0
    async with connect(face, server.url, busy_wait_s=0.2) as client:
        with pytest.raises(EnvCrashedError, match="HTTP 503 'at capacity'") as caught:
            await client.open(env_name="game")
    assert caught.value.is_busy and 1 < len(server.calls("initialize")) < 30


@both_faces
async def test_wait_that_the_service_asks_for_is_bounded(server, face):
    server.fault("status", call="initialize", status=503, headers={"Retry-After": "86400"})
    async with connect(face, server.url, max_retry_after_s=0.05) as client:
        await client.open(env_name="game")


@both_faces
async def test_wait_beyond_the_time_limit_is_not_begun(server, face):
    server.fault("status", call="task-prompt", status=503, headers={"Retry-After": "20"}, times=None)
    async with connect(face, server.url, retry_time_s=5) as client:
        with pytest.raises(EnvCrashedError):
            await client.open(env_name="game")
    assert len(server.calls("task-prompt")) == 1


async def test_8_episodes_finish_at_a_service_with_room_for_4(server):
    """P71."""
    server.capacity = 4
    async with connect("async", server.url) as client:

        async def play() -> float:
            async with await client.open(env_name="game") as session:
                return sum([(await session.step(ACTION)).reward for _ in range(3)])

        assert await asyncio.gather(*(play() for _ in range(8))) == [1.75] * 8
    assert (server.peak_live, server.live_count) == (4, 0)


@both_faces
async def test_call_that_always_fails_is_tried_a_bounded_number_of_times(server, face):
    """P74."""
    server.fault("status", call="initialize", status=502, times=None)
    async with connect(face, server.url, max_retries=3) as client:
        with pytest.raises(EnvCrashedError, match="HTTP 502"):
            await client.open(env_name="game")
    assert len(server.calls("initialize")) == 4


@both_faces
async def test_retries_are_bounded_in_time(server, face):
    server.fault("status", call="initialize", status=502, times=None)
    async with connect(face, server.url, max_retries=10**6, retry_time_s=2.0) as client:
        with pytest.raises(EnvCrashedError):
            await client.open(env_name="game")
    assert 1 < len(server.calls("initialize")) < 300


@both_faces
@pytest.mark.parametrize(
    ("status", "headers", "is_repeated"),
    [
        (429, {}, True),
        (503, {"Retry-After": "0"}, True),
        (503, {}, False),
        (502, {}, False),
        (504, {}, False),
        (500, {}, False),
        (400, {}, False),
    ],
)
async def test_step_is_repeated_only_when_it_cannot_have_been_applied(server, face, status, headers, is_repeated):
    """P88: a 504 says nothing about what happened behind the gateway."""
    server.fault("status", call="step", status=status, headers=headers)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        if is_repeated:
            assert (await session.step(ACTION)).reward == 0.25
        else:
            with pytest.raises(EnvError) as caught:
                await session.step(ACTION)
            assert caught.value.may_have_been_applied is (status >= 500)
    assert len(server.calls("step")) == 1 + is_repeated


@both_faces
@pytest.mark.parametrize("gone_status", [404, 410])
async def test_lost_session_is_told_from_a_crash(server, face, gone_status):
    server.gone_status = gone_status
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        server.lose_sessions()
        with pytest.raises(EnvGoneError, match="play the episode on a fresh environment") as caught:
            await session.step(ACTION)
        assert caught.value.may_have_been_applied is False


@both_faces
async def test_restarted_service_loses_sessions_but_takes_new_ones(server, face):
    """P80."""
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await asyncio.to_thread(server.restart)
        with pytest.raises(EnvError):
            await session.step(ACTION)
        await session.close()
        assert (await (await client.open(env_name="game")).step(ACTION)).reward == 0.25
        assert client.stats.closed == 1


@both_faces
async def test_redirect_is_refused_with_its_target(server, face):
    server.fault("status", call="initialize", status=301, headers={"Location": "https://other/api"})
    async with connect(face, server.url) as client:
        with pytest.raises(EnvRejectedError, match="https://other/api"):
            await client.open(env_name="game")


@both_faces
async def test_unsendable_argument_never_reaches_the_service(server, face):
    async with connect(face, server.url, max_concurrent_episodes=1) as client:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"env_kwargs\.x is nan"):
                await client.open(env_name="game", env_kwargs={"x": float("nan")})
        session = await client.open(env_name="game")
        with pytest.raises(ValueError, match="content must be text"):
            await session.step({"content": 3})
    assert len(server.calls("initialize")) == 1


# ---- an answer outside the agreed shape


@both_faces
@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("html", {}, "a JSON object in UTF-8; got JSONDecodeError.*<html><body>Bad gateway"),
        ("raw", {"body": "not json"}, "a JSON object in UTF-8.*'not json'"),
        ("raw", {"body": b"\xff\xfe\x00"}, "UnicodeDecodeError"),
        ("raw", {"body": "[1, 2]"}, "expected a JSON object; got list"),
        ("raw", {"body": ""}, r"\(empty\)"),
        ("raw", {"body": "[" * 100_000}, "nested too deeply"),
        ("patch", {"patch": {"reward": ABSENT}}, "no 'reward' among"),
        ("patch", {"patch": {"reward": "1.0"}}, "'reward' as a finite number; got str '1.0'"),
        ("patch", {"patch": {"reward": None}}, "'reward' as a finite number"),
        ("patch", {"patch": {"reward": float("nan")}}, "'reward' as a finite number; got float nan"),
        ("patch", {"patch": {"reward": float("inf")}}, "'reward' as a finite number; got float inf"),
        ("patch", {"patch": {"done": "false"}}, "'done' as true or false; got str 'false'"),
        ("patch", {"patch": {"truncated": None}}, "'truncated' as true or false"),
        ("patch", {"patch": {"info": "x"}}, "'info' as an object"),
        ("patch", {"patch": {"observation": ABSENT}}, "no 'observation' among"),
        ("patch", {"patch": {"observation": IMAGE}}, "images and audio are not supported yet"),
    ],
)
async def test_malformed_step_answer_is_a_protocol_error(server, face, kind, fields, reason):
    """P68, P99: never a guess, never a retry."""
    server.script("game", EnvScript(capabilities=DEDUP))
    server.fault(kind, call="step", **fields)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        with pytest.raises(EnvProtocolError, match=reason) as caught:
            await session.step(ACTION)
    assert caught.value.may_have_been_applied and len(server.calls("step")) == 1
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


@both_faces
@pytest.mark.parametrize("is_compressed", [False, True])
async def test_answer_above_the_size_limit_is_not_read(server, face, is_compressed):
    body = b'{"observation": "' + b"x" * 3_000_000 + b'"}'
    if is_compressed:
        server.fault("raw", call="step", body=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    else:
        server.fault("raw", call="step", body=body)
    async with connect(face, server.url, max_response_bytes=1_000_000) as client:
        session = await client.open(env_name="game")
        with pytest.raises(EnvProtocolError, match="at most 1000000 bytes; got a longer one"):
            await session.step(ACTION)


@both_faces
async def test_large_answer_below_the_limit_is_read(server, face):
    """The model can make an observation of megabytes with one short call."""
    server.script("game", EnvScript(steps=[Step(observation="y" * 5_000_000)]))
    async with connect(face, server.url) as client:
        result = await (await client.open(env_name="game")).step(ACTION)
    assert len(result.observation[0]["content"]) == 5_000_000


@both_faces
async def test_port_that_speaks_no_http_is_a_protocol_error(face):
    with raw_server(b"220 mail.example ESMTP ready\r\n") as url:
        async with connect(face, url) as client:
            with pytest.raises(EnvProtocolError, match="expected an HTTP answer"):
                await client.open(env_name="game")


# ---- nothing stays open


@both_faces
@pytest.mark.parametrize(
    ("call", "kind", "fields"),
    [
        ("initialize", "patch", {"patch": {"observation": IMAGE}}),
        ("initialize", "patch", {"patch": {"info": 3}}),
        ("task-prompt", "status", {"status": 500}),
        ("tools-schema-openai", "html", {}),
        ("allow-parallel-tool-call", "patch", {"patch": {"allow_parallel_tool_call": "no"}}),
    ],
)
async def test_open_that_fails_half_way_closes_its_environment(server, face, call, kind, fields):
    server.fault(kind, call=call, **fields)
    async with connect(face, server.url) as client:
        with pytest.raises(EnvError):
            await client.open(env_name="game")
    assert (len(server.episodes), server.live_count) == (1, 0)
    assert (client.stats.opened, client.stats.closed) == (1, 1)


async def test_environment_made_after_the_time_limit_is_closed(server):
    """The id is in the late answer only."""
    server.fault("delay", call="initialize", after=True, seconds=0.8)
    async with connect("async", server.url, request_timeout_s=0.3) as client:
        with pytest.raises(EnvTimeoutError):
            await client.open(env_name="game")
        await asyncio.to_thread(server.wait_until, lambda: server.episodes[0].closes == 1)
    assert (client.stats.opened, client.stats.closed) == (1, 1)


async def test_late_answers_are_awaited_only_as_far_as_connections_reach(server):
    """Hanging calls must not keep the connections that fresh episodes need."""
    hang = server.fault("hang", call="initialize", times=8)
    async with connect("async", server.url, max_concurrent_episodes=8, request_timeout_s=0.5) as client:
        opens = [client.open(env_name="game") for _ in range(8)]
        failures = await asyncio.gather(*opens, return_exceptions=True)
        assert {type(failure) for failure in failures} == {EnvTimeoutError} and hang.hits == 8
        await asyncio.gather(*(client.open(env_name="game") for _ in range(8)))
        await client.aclose(1.0)
    assert server.live_count == 0


async def test_open_cancelled_before_its_answer_closes_the_environment(server):
    server.fault("delay", call="initialize", after=True, seconds=0.3)
    async with connect("async", server.url, max_concurrent_episodes=1) as client:
        opening = asyncio.create_task(client.open(env_name="game"))
        await asyncio.to_thread(server.wait_until, lambda: len(server.episodes) == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await (await client.open(env_name="game")).close()
    assert [episode.closes for episode in server.episodes] == [1, 1]
    assert client.stats.live == 0


async def test_open_cancelled_while_it_fetches_the_prompt_closes_the_environment(server):
    server.fault("hang", call="task-prompt")
    async with connect("async", server.url) as client:
        opening = asyncio.create_task(client.open(env_name="game"))
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("task-prompt")) == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert server.live_count == 0


async def test_open_cancelled_in_the_queue_takes_no_slot(server):
    async with connect("async", server.url, max_concurrent_episodes=1) as client:
        first = await client.open(env_name="game")
        waiting = asyncio.create_task(client.open(env_name="game"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await first.close()
        await (await client.open(env_name="game")).close()
    assert len(server.episodes) == 2


async def test_episode_cancelled_in_mid_step_closes_its_environment(server):
    server.fault("hang", call="step")
    async with connect("async", server.url) as client:

        async def play() -> None:
            async with await client.open(env_name="game") as session:
                await session.step(ACTION)

        playing = asyncio.create_task(play())
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("step")) == 1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert server.live_count == 0


async def test_close_goes_on_when_its_caller_is_cancelled(server):
    server.fault("delay", call="close", seconds=0.3)
    async with connect("async", server.url) as client:
        session = await client.open(env_name="game")
        closing_task = asyncio.create_task(session.close())
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("close")) == 1)
        closing_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing_task
        await session.close()
        assert client.stats.closed == 1
    assert len(server.calls("close")) == 1


async def test_close_soon_does_not_wait(server):
    server.fault("delay", call="close", seconds=0.3)
    async with connect("async", server.url) as client:
        session = await client.open(env_name="game")
        session.close_soon()
        assert client.stats.live == 1
    assert (client.stats.live, server.live_count) == (0, 0)


@both_faces
async def test_failed_close_is_counted_and_never_raised(server, face):
    server.fault("status", call="close", status=500, times=None)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await session.close()
        stats = client.stats
        assert (stats.opened, stats.closed, stats.close_failures, stats.live) == (1, 0, 1, 0)


@both_faces
async def test_close_of_an_environment_that_is_gone_counts_as_closed(server, face):
    server.fault("status", call="close", status=404)
    async with connect(face, server.url) as client:
        await (await client.open(env_name="game")).close()
        assert (client.stats.closed, client.stats.close_failures) == (1, 0)


@both_faces
async def test_hanging_close_is_cut_at_its_own_limit(server, face):
    """P70 (d)."""
    server.fault("hang", call="close", times=None)
    async with connect(face, server.url, close_timeout_s=0.3) as client:
        await (await client.open(env_name="game")).close()
        assert client.stats.close_failures == 1


@both_faces
async def test_close_answer_may_be_anything(server, face):
    server.fault("raw", call="close", body="bye", after=True)
    async with connect(face, server.url) as client:
        await (await client.open(env_name="game")).close()
        assert (client.stats.closed, server.live_count) == (1, 0)


async def test_slot_is_given_back_whatever_fails(server):
    """P72."""
    server.fault("status", call="initialize", status=500)
    server.fault("status", call="task-prompt", status=500)
    server.fault("status", call="close", status=500, times=2)
    async with connect("async", server.url, max_concurrent_episodes=1) as client:
        for _ in range(2):
            with pytest.raises(EnvCrashedError):
                await client.open(env_name="game")
        for _ in range(3):
            await (await client.open(env_name="game")).close()
        assert (client.stats.opened, client.stats.closed, client.stats.close_failures) == (4, 2, 2)


async def test_closing_the_client_closes_all_sessions_at_once(server):
    server.latency_s = 0.2
    async with connect("async", server.url, close_timeout_s=4) as client:
        await asyncio.gather(*(client.open(env_name="game") for _ in range(40)))
        server.peak_requests = 0
        await client.aclose()
        assert (client.stats.closed, server.live_count) == (40, 0)
        assert server.peak_requests > 20
        with pytest.raises(RuntimeError, match="client is closed"):
            await client.open(env_name="game")


async def test_closing_the_client_waits_for_what_is_just_opening(server):
    server.fault("delay", call="initialize", after=True, seconds=0.3)
    async with connect("async", server.url) as client:
        opening = asyncio.create_task(client.open(env_name="game"))
        await asyncio.to_thread(server.wait_until, lambda: len(server.episodes) == 1)
        await client.aclose()
        with pytest.raises(RuntimeError, match="client is closed"):
            await opening
    assert server.live_count == 0


async def test_session_that_opens_while_the_client_closes_is_not_handed_out(server):
    server.script("game", EnvScript(capabilities={"keepalive": True, "idle_timeout_s": 0.06}))
    server.fault("delay", call="allow-parallel-tool-call", seconds=0.3)
    async with connect("async", server.url) as client:
        opening = asyncio.create_task(client.open(env_name="game"))
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("allow-parallel-tool-call")) == 1)
        await client.aclose(5)
        with pytest.raises((RuntimeError, EnvUnreachableError), match="client (is|was) closed"):
            await opening
    assert (server.live_count, server.calls("keepalive")) == (0, [])


async def test_closing_the_client_is_bounded(server):
    server.fault("hang", call="close", times=None)
    async with connect("async", server.url, close_timeout_s=60) as client:
        for _ in range(3):
            await client.open(env_name="game")
        await client.aclose(0.2)
        assert (client.stats.close_failures, client.stats.live) == (3, 0)


async def test_opening_is_cut_when_the_client_is_closed(server):
    server.fault("hang", call="initialize")
    async with connect("async", server.url) as client:
        opening = asyncio.create_task(client.open(env_name="game"))
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("initialize")) == 1)
        await client.aclose(0.1)
        with pytest.raises(EnvUnreachableError, match="closed meanwhile"):
            await opening


@both_faces
async def test_one_broken_episode_leaves_the_others_alone(server, face):
    """P69, as far as the client goes: one fails at initialize, one at step 2, one in close; the rest play on."""
    server.fault("status", call="initialize", seed=10, times=None)
    server.fault("status", call="step", seed=20, step=2, times=None)
    server.fault("status", call="close", seed=30, times=None)
    async with connect(face, server.url, max_concurrent_episodes=16) as client:

        async def play(seed: int) -> float:
            session = await client.open(env_name="game", seed=seed)
            try:
                return sum([(await session.step(ACTION)).reward for _ in range(3)])
            finally:
                await session.close()

        results = await asyncio.gather(*(play(seed) for seed in range(64)), return_exceptions=True)
        assert client.stats.close_failures == 1
    bad = [seed for seed, result in enumerate(results) if result != 1.75]
    assert bad == [10, 20]
    assert {type(results[seed]) for seed in bad} == {EnvCrashedError}
