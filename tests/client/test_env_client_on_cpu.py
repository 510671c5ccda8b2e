# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment client against a real loopback service that works: sessions, slots, connections, credentials."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe.agent_env.env_client import (
    AsyncEnvClient,
    Capabilities,
    EnvClientConfig,
    EnvCrashedError,
    EnvRejectedError,
    EnvUnreachableError,
)
from tests.client.env_client_faces import ACTION, FACES, SHORT_LIMITS, connect
from tests.client.tls_files import make_tls_files
from tests.mock_env_server import ABSENT, MOVE_TOOL, EnvScript, MockEnvServer, Step

CALL = {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": '{"direction": "up"}'}}
TOKEN = "s3cret-token"

both_faces = pytest.mark.parametrize("face", FACES)


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer() as running:
        yield running


@pytest.mark.parametrize("module", ["env_client", "client.tool_check"])
def test_client_imports_without_torch_ray_and_verl(module):
    code = f"import sys, recipe.agent_env.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'verl', 'ray')))"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- an episode


@both_faces
async def test_episode_is_played_from_open_to_close(server, face):
    server.script("game", EnvScript(steps=[Step(reward=0.5), Step(reward=1, done=True, info={"answer": 42})]))
    async with connect(face, server.url + "/") as client:
        session = await client.open(env_name="game", seed=np.int64(3), env_kwargs={"size": np.int64(5)})
        assert session.observation == [{"role": "user", "content": "You stand at the start."}]
        assert (session.task_prompt, session.tools_schema) == ("Reach the goal.", [MOVE_TOOL])
        first = await session.step({"role": "assistant", "content": "up", "tool_calls": [CALL]})
        last = await session.step(ACTION)
        await session.close()
        assert (client.stats.opened, client.stats.closed, client.stats.live, client.stats.retries) == (1, 1, 0, 0)
    assert (first.reward, first.terminated, first.truncated) == (0.5, False, False)
    assert (last.reward, last.terminated, last.info) == (1.0, True, {"answer": 42})
    episode = server.episodes[0]
    assert [action["tool_calls"] for action in episode.actions] == [[CALL], []]
    assert (episode.seed, episode.env_kwargs, episode.closes, episode.resets) == (3, {"size": 5}, 1, 0)


@both_faces
async def test_service_that_leaves_things_out_is_played(server, face):
    script = EnvScript(
        observation=None, info=None, task_prompt=None, tools_schema=None, allow_parallel=ABSENT, steps=[Step(info=None)]
    )
    server.script("game", script)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        assert (session.observation, session.task_prompt, session.tools_schema) == ([], "", [])
        assert session.allow_parallel_tool_call is session.is_terminated is False
        assert (session.capabilities, session.info) == (Capabilities(), {})
        assert (await session.step({"role": "assistant", "content": None, "tool_calls": None})).info == {}
    assert server.live_count == 0


@both_faces
async def test_service_that_crashes_on_the_parallel_question_does_not_allow_it(server, face):
    server.fault("status", call="allow-parallel-tool-call", status=500)
    async with connect(face, server.url) as client:
        assert (await client.open(env_name="game")).allow_parallel_tool_call is False
    assert len(server.calls("allow-parallel-tool-call")) == 1


@both_faces
async def test_start_that_is_already_over_is_reported(server, face):
    server.script("game", EnvScript(start={"done": True}, allow_parallel=True))
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        assert session.is_terminated and session.allow_parallel_tool_call


@both_faces
async def test_reset_fetches_the_new_prompt_and_counts_steps_anew(server, face):
    """A reset may give a new puzzle with a new prompt."""
    script = EnvScript(capabilities={"step_dedup": True})
    server.script("game", script)
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game", seed=1)
        await session.step(ACTION)
        script.task_prompt, script.observation = "A new task.", "new start"
        assert await session.reset(seed=2, options={"hard": np.bool_(True)}) == [
            {"role": "user", "content": "new start"}
        ]
        assert session.task_prompt == "A new task."
        await session.step(ACTION)
    assert server.calls("reset")[0].body == {"seed": 2, "options": {"hard": True}}
    assert [step.headers["X-Env-Step-Index"] for step in server.calls("step")] == ["0", "0"]


@both_faces
async def test_step_index_counts_up_and_goes_only_to_services_that_declare_it(server, face):
    server.script("plain", EnvScript())
    server.script("dedup", EnvScript(capabilities={"step_dedup": True}))
    async with connect(face, server.url) as client:
        for name in ("plain", "dedup"):
            session = await client.open(env_name=name)
            await session.step(ACTION)
            await session.step(ACTION)
    sent = [step.headers.get("X-Env-Step-Index") for step in server.calls("step")]
    assert sent == [None, None, "0", "1"]


@both_faces
async def test_session_checks_calls_against_its_own_tools(server, face):
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        check = session.check_tool_calls({"tool_calls": [{"function": {"name": "fly", "arguments": "{}"}}]})
        assert "no tool" in (check if isinstance(check, str) else await check)


@both_faces
async def test_lone_surrogate_from_the_service_cannot_reach_a_tokenizer(server, face):
    server.script("game", EnvScript(observation="a\ud800b"))
    async with connect(face, server.url) as client:
        assert (await client.open(env_name="game")).observation == [{"role": "user", "content": "a\ufffdb"}]


@both_faces
async def test_closed_session_sends_nothing_more(server, face):
    async with connect(face, server.url) as client:
        session = await client.open(env_name="game")
        await session.close()
        await session.close()
        with pytest.raises(RuntimeError, match="is closed"):
            await session.step(ACTION)
    assert (len(server.calls("close")), len(server.calls("step"))) == (1, 0)


@both_faces
async def test_health_says_whether_the_service_is_up(server, face):
    async with connect(face, server.url, max_retries=0) as client:
        await client.check_health()
        server.stop()
        with pytest.raises(EnvUnreachableError):
            await client.check_health()


@both_faces
async def test_client_closes_what_its_user_forgot(server, face):
    async with connect(face, server.url) as client:
        for _ in range(3):
            await client.open(env_name="game")
        assert server.live_count == 3
    assert server.live_count == 0


@both_faces
async def test_service_below_a_path_is_reached(face):
    with MockEnvServer(path_prefix="/envs/game") as server:
        async with connect(face, server.url) as client:
            await client.check_health()
            assert (await client.open(env_name="game")).task_prompt == "Reach the goal."


# ---- slots and connections


async def test_opens_beyond_the_limit_queue(server):
    async with connect("async", server.url, max_concurrent_episodes=3) as client:

        async def play() -> None:
            async with await client.open(env_name="game") as session:
                await session.step(ACTION)

        await asyncio.gather(*(play() for _ in range(20)))
        assert (client.stats.opened, client.stats.closed) == (20, 20)
    assert server.peak_live == 3


async def test_all_episodes_share_one_pool_of_connections(server):
    async with connect("async", server.url, max_concurrent_episodes=4, keepalive_s=60) as client:

        async def play() -> None:
            async with await client.open(env_name="game") as session:
                await session.step(ACTION)

        await asyncio.gather(*(play() for _ in range(40)))
    assert len({request.peer for request in server.received}) <= 5
    assert len(server.received) == 40 * 6


@both_faces
async def test_connection_that_idled_too_long_is_not_used_again(server, face):
    """Servers close idle connections unannounced; a POST on one dies after it was written."""
    async with connect(face, server.url, keepalive_s=0.05) as client:
        session = await client.open(env_name="game")
        await asyncio.sleep(0.2)
        earlier = {request.peer for request in server.received}
        await session.step(ACTION)
    assert server.calls("step")[0].peer not in earlier


@both_faces
async def test_connection_that_is_fresh_is_used_again(server, face):
    async with connect(face, server.url, keepalive_s=60) as client:
        await client.open(env_name="game")
    assert len({request.peer for request in server.received}) == 1


@both_faces
async def test_server_that_closes_idle_connections_early_is_stepped(face):
    with MockEnvServer(keepalive_timeout_s=0.2) as server:
        async with connect(face, server.url, keepalive_s=0.05) as client:
            session = await client.open(env_name="game")
            for _ in range(3):
                await asyncio.sleep(0.3)
                await session.step(ACTION)
        assert server.episodes[0].rewards == [0.25, 0.5, 1.0]


CROWD = """
import asyncio, resource, sys
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

async def main(url, limit):
    async with AsyncEnvClient(EnvClientConfig(endpoint=url, max_concurrent_episodes=limit, max_retries=0)) as client:
        async def play():
            await (await client.open(env_name="game")).close()
        results = await asyncio.gather(*(play() for _ in range(600)), return_exceptions=True)
        failures = [r for r in results if r is not None]
        print(len(failures), client.stats.live, failures[:1])

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def play_crowd(server: MockEnvServer, limit: int) -> str:
    """600 episodes in a process that may open 128 files; returns what it printed."""
    server.latency_s = 0.01
    command = [sys.executable, "-c", CROWD, server.url, str(limit)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_600_episodes_fit_under_a_low_file_limit(server):
    """P76: with a limit below `ulimit -n` they queue."""
    assert play_crowd(server, 64).startswith("0 0 ")
    assert (len(server.episodes), server.live_count) == (600, 0)
    assert server.peak_live <= 64


def test_file_limit_that_is_too_low_is_explained(server):
    """P76: above it, the error says what to do."""
    printed = play_crowd(server, 600)
    assert "EnvUnreachableError" in printed and "raise `ulimit -n` or lower max_concurrent_episodes" in printed


# ---- keepalive


async def test_session_is_kept_alive_while_the_model_thinks(server):
    """P78."""
    server.script("game", EnvScript(capabilities={"keepalive": True, "idle_timeout_s": 0.9}))
    async with connect("async", server.url) as client:
        session = await client.open(env_name="game")
        await asyncio.to_thread(server.wait_until, lambda: server.episodes[0].keepalives >= 2)
        await session.step(ACTION)
        await session.close()
        calls_at_close = len(server.calls("keepalive"))
        await asyncio.sleep(0.3)
        assert len(server.calls("keepalive")) == calls_at_close
        assert client.stats.keepalive_failures == 0


async def test_keepalive_that_fails_is_counted_and_goes_on(server):
    server.script("game", EnvScript(capabilities={"keepalive": True, "idle_timeout_s": 0.15}))
    server.fault("status", call="keepalive", status=500, times=2)
    async with connect("async", server.url) as client:
        session = await client.open(env_name="game")
        await asyncio.to_thread(server.wait_until, lambda: server.episodes[0].keepalives >= 1)
        assert client.stats.keepalive_failures == 2
        await session.step(ACTION)


async def test_keepalive_ends_when_the_session_is_gone(server):
    server.script("game", EnvScript(capabilities={"keepalive": True, "idle_timeout_s": 0.06}))
    async with connect("async", server.url) as client:
        await client.open(env_name="game")
        server.lose_sessions()
        await asyncio.to_thread(server.wait_until, lambda: len(server.calls("keepalive")) >= 1)
        await asyncio.sleep(0.2)
        assert client.stats.keepalive_failures == 1


@pytest.mark.parametrize("capabilities", [None, {"keepalive": True}, {"idle_timeout_s": 0.06}])
async def test_keepalive_is_sent_only_where_it_is_declared(server, capabilities):
    server.script("game", EnvScript(capabilities=capabilities))
    async with connect("async", server.url) as client:
        await client.open(env_name="game")
        await asyncio.sleep(0.2)
    assert server.calls("keepalive") == []


async def test_sync_session_sends_keepalive_on_request(server):
    async with connect("sync", server.url) as client:
        session = await client.open(env_name="game")
        await session.keepalive()
    assert server.episodes[0].keepalives == 1


# ---- credentials, proxy, TLS


@both_faces
@pytest.mark.parametrize("source", ["value", "file", "variable"])
async def test_token_and_headers_are_sent(server, face, source, tmp_path, monkeypatch):
    server.bearer_token = TOKEN
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("ENV_SERVICE_TOKEN", TOKEN)
    setting = {
        "value": {"bearer_token": TOKEN},
        "file": {"bearer_token_file": str(tmp_path / "token")},
        "variable": {"bearer_token_env": "ENV_SERVICE_TOKEN"},
    }[source]
    async with connect(face, server.url, headers={"X-Team": "blue"}, **setting) as client:
        await (await client.open(env_name="game")).step(ACTION)
    assert {request.headers["X-Team"] for request in server.received} == {"blue"}


@both_faces
async def test_wrong_token_is_explained_and_never_shown(server, face, caplog):
    server.bearer_token = TOKEN
    async with connect(face, server.url, bearer_token="wr0ng-token") as client:
        with pytest.raises(EnvRejectedError, match="check the bearer token") as caught:
            await client.open(env_name="game")
        assert "wr0ng" not in f"{caught.value!r} {caught.value} {client.config!r} {caplog.text}"


@both_faces
async def test_token_echoed_in_an_error_page_is_not_shown(server, face):
    server.fault("status", status=500, body=f"Traceback... headers={{'Authorization': 'Bearer {TOKEN}'}}")
    async with connect(face, server.url, bearer_token=TOKEN) as client:
        with pytest.raises(EnvCrashedError, match=r"Bearer \*\*\*") as caught:
            await client.open(env_name="game")
    assert TOKEN not in str(caught.value)


@both_faces
async def test_cookies_of_the_service_are_not_kept(server, face):
    server.fault("status", call="allow-parallel-tool-call", status=404, headers={"Set-Cookie": "a=b; Path=/"})
    async with connect(face, server.url) as client:
        await (await client.open(env_name="game")).step(ACTION)
    assert all("Cookie" not in request.headers for request in server.received)


@both_faces
async def test_process_proxy_is_ignored_unless_asked_for(server, face, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with connect(face, server.url) as client:
        await client.check_health()
    async with connect(face, server.url, trust_env=True, max_retries=0) as client:
        with pytest.raises(EnvUnreachableError) as caught:
            await client.check_health()
    assert caught.value.may_have_been_applied is False


@both_faces
async def test_configured_proxy_is_used(server, face):
    async with connect(face, "http://env.invalid/", proxy=server.url) as client:
        await (await client.open(env_name="game")).step(ACTION)
    assert {request.headers["Host"] for request in server.received} == {"env.invalid"}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_tls_files(tmp_path_factory.mktemp("tls"))


@both_faces
@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
async def test_certificate_is_checked_against_the_given_authority(face, tls):
    with MockEnvServer(ssl_context=tls["server_context"]) as server:
        async with connect(face, server.url, ca_file=str(tls["ca"])) as client:
            await (await client.open(env_name="game")).step(ACTION)
        async with connect(face, server.url, verify_tls=False) as client:
            await client.check_health()
        async with connect(face, server.url, max_retries=0) as client:
            with pytest.raises(EnvUnreachableError, match="(?i)certificate") as caught:
                await client.check_health()
    assert caught.value.may_have_been_applied is False


@both_faces
async def test_client_certificate_is_shown_to_services_that_ask(face, tls):
    with MockEnvServer(ssl_context=tls["strict_server_context"]) as server:
        ours = {"client_cert_file": str(tls["client_cert"]), "client_key_file": str(tls["client_key"])}
        async with connect(face, server.url, ca_file=str(tls["ca"]), **ours) as client:
            await client.check_health()
        async with connect(face, server.url, ca_file=str(tls["ca"]), max_retries=0) as client:
            with pytest.raises(EnvUnreachableError):
                await client.check_health()


def test_unusable_tls_files_are_refused_before_any_call(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded"):
        AsyncEnvClient(EnvClientConfig(endpoint="https://host", ca_file=str(tmp_path / "none"), **SHORT_LIMITS))
