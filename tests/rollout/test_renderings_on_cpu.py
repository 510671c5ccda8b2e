# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How an environment shows itself to people is recorded beside the episode and never read by the model."""

import pytest

from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.rollout.batch import episode_columns
from recipe.agent_env.rollout.episode import EndReason, Episode, play_episode
from tests.env_service.service import serve
from tests.env_service.toy_envs import EchoEnv, PlainEnv
from tests.mock_env_server import EnvScript, MockEnvServer, Step
from tests.rollout.scripted_policy import ScriptedPolicy, decode, make_rules, make_spec, make_tokenizer


class ShyEnv(EchoEnv):
    """Breaks when it is looked at."""

    def render(self) -> str:
        raise RuntimeError("do not look")


async def play(url: str, env_name: str, **rules) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(["hello<|im_end|>"])
    async with AsyncEnvClient(EnvClientConfig(endpoint=url, retry_time_s=1.0)) as client:
        spec = make_spec(1, env_name)
        rules = make_rules(max_turn=3, **rules)
        episode = await play_episode(spec, client=client, tokenizer=make_tokenizer(), sample=policy, rules=rules)
    return episode, policy


@pytest.fixture(scope="module")
def service():
    with serve({"echo": EchoEnv, "plain": PlainEnv, "shy": ShyEnv}) as running:
        yield running


async def test_start_and_state_after_each_turn_are_recorded(service):
    episode, policy = await play(service.url, "echo", record_renderings=True)
    assert episode.renderings == ["<b>0</b>", "<b>1</b>", "<b>2</b>", "<b>3</b>"]
    assert "<b>" not in decode(policy.contexts[-1])
    assert episode_columns([episode])["renderings"].tolist() == [episode.renderings]


async def test_nothing_is_asked_unless_it_is_wanted(service):
    episode, _ = await play(service.url, "echo")
    assert episode.renderings == []


async def test_environment_without_a_rendering_has_none(service):
    episode, _ = await play(service.url, "plain", record_renderings=True)
    assert set(episode.renderings) == {""} and episode.end_reason is EndReason.MAX_TURN


async def test_service_that_does_not_declare_it_is_not_asked():
    with MockEnvServer() as server:
        server.script("game", EnvScript(steps=[Step(observation=[{"role": "user", "content": "go on"}])]))
        episode, _ = await play(server.url, "game", record_renderings=True)
    assert set(episode.renderings) == {""} and episode.end_reason is EndReason.MAX_TURN


async def test_rendering_that_crashes_loses_the_session_as_any_crash_does(service):
    """The service ends the session of an environment that raises, so the next step is refused."""
    episode, _ = await play(service.url, "shy", record_renderings=True)
    assert episode.end_reason is EndReason.FAILED and episode.renderings == []
