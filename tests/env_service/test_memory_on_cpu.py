# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Memory of service and client over many episodes with large observations."""

import asyncio
import gc

import psutil
import pytest

from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from tests.env_service.service import serve_process

ACTION = {"role": "assistant", "content": "go", "tool_calls": []}
OBSERVATION_BYTES = 100_000
BOUND_BYTES = 30_000_000


@pytest.mark.timeout(900)
async def test_memory_is_flat_over_a_thousand_episodes():
    """900 further episodes read 90 MB of observations; neither process keeps as much as a third of them."""
    with serve_process("echo=tests.env_service.toy_envs:EchoEnv", "--max-sessions", "16") as process:
        both = [psutil.Process(process.popen.pid), psutil.Process()]
        config = EnvClientConfig(endpoint=process.service.url, max_concurrent_episodes=8)
        async with AsyncEnvClient(config) as client:

            async def play() -> None:
                session = await client.open(env_name="echo", env_kwargs={"size": OBSERVATION_BYTES})
                result = await session.step(ACTION)
                assert len(result.observation[0]["content"]) > OBSERVATION_BYTES
                await session.close()

            async def play_many(number: int) -> list[int]:
                for _ in range(number // 20):
                    await asyncio.gather(*(play() for _ in range(20)))
                gc.collect()
                return [one.memory_info().rss for one in both]

            before = await play_many(100)
            after = await play_many(900)
            assert (client.stats.opened, client.stats.live) == (1000, 0)
        assert process.service.stats()["live_sessions"] == 0
    growth = [new - old for old, new in zip(before, after, strict=True)]
    assert max(growth) < BOUND_BYTES, f"service and client grew by {growth} bytes"
