# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment client against a real loopback service: the happy path of both faces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from recipe.agent_env.env_client import AsyncEnvClient, EnvClient, EnvClientConfig
from tests.mock_env_server import MOVE_TOOL, EnvScript, MockEnvServer, Step

CALL = {"id": "call_0", "type": "function", "function": {"name": "move", "arguments": '{"direction": "up"}'}}


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer() as running:
        yield running


@pytest.mark.parametrize("module", ["env_client", "tool_check"])
def test_client_imports_without_torch_ray_and_verl(module):
    code = f"import sys, recipe.agent_env.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'verl', 'ray')))"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_async_face_plays_an_episode(server):
    server.script("game", EnvScript(steps=[Step(reward=0.5), Step(reward=1, done=True, info={"k": 1})]))
    async with AsyncEnvClient(EnvClientConfig(endpoint=server.url + "/")) as client:
        session = await client.open(env_name="game", seed=3, env_kwargs={"size": 5})
        assert session.observation == [{"role": "user", "content": "You stand at the start."}]
        assert (session.task_prompt, session.tools_schema) == ("Reach the goal.", [MOVE_TOOL])
        first = await session.step({"role": "assistant", "content": "up", "tool_calls": [CALL]})
        last = await session.step({"role": "assistant", "content": "hm"})
        await session.close()
    assert (first.reward, first.terminated, last.reward, last.terminated, last.truncated) == (
        0.5,
        False,
        1.0,
        True,
        False,
    )
    assert server.episodes[0].actions[0]["tool_calls"] == [CALL]
    assert (server.episodes[0].seed, server.episodes[0].env_kwargs, server.live_count) == (3, {"size": 5}, 0)


def test_sync_face_plays_an_episode(server):
    with (
        EnvClient(EnvClientConfig(endpoint=server.url + "/")) as client,
        client.open(env_name="game", seed=3) as session,
    ):
        results = [session.step({"role": "assistant", "content": "", "tool_calls": None}) for _ in range(3)]
    assert [result.reward for result in results] == [0.25, 0.5, 1.0]
    assert server.live_count == 0
    assert (client.stats.opened, client.stats.closed, client.stats.live) == (1, 1, 0)
