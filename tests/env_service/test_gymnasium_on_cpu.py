# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A Gymnasium environment is served through a text adapter."""

import gymnasium
import pytest

from recipe.agent_env.env_service.gymnasium_adapter import GymnasiumEnvironment, serve_gymnasium
from tests.env_service.service import call, serve

ACTIONS = ["left", "down", "right", "up"]


def make_lake(**env_kwargs):
    return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi", **env_kwargs)


def to_text(observation) -> str:
    return f"You are on cell {int(observation)}."


def test_gymnasium_environment_plays_over_http():
    with serve({"lake": serve_gymnasium(make_lake, to_text, ACTIONS, "Cross the lake.")}) as service:
        env_id = service.open("lake", map_name="4x4")
        assert service.get(env_id, "task-prompt").json()["task_prompt"] == "Cross the lake."
        answers = [
            service.step(env_id, call("act", {"action": name}), index=index).json()
            for index, name in enumerate(["down", "down", "right", "right", "down", "right"])
        ]
        assert answers[0]["observation"][0]["content"] == "You are on cell 4."
        assert [answer["reward"] for answer in answers] == [0, 0, 0, 0, 0, 1]
        assert [answer["done"] for answer in answers] == [False] * 5 + [True]
        assert "SFFF" in service.get(env_id, "render").json()["render"]


def test_unknown_action_is_refused_and_no_call_steps_nothing():
    with serve({"lake": serve_gymnasium(make_lake, to_text, ACTIONS)}) as service:
        env_id = service.open("lake")
        assert service.step(env_id, call("act", {"action": "fly"})).json()["error"] == "bad_tool_arguments"
        assert service.step(env_id).json()["observation"][0]["content"] == "Call the tool `act`."


def test_actions_without_names_are_numbers():
    env = GymnasiumEnvironment(make_lake(), to_text)
    parameters = env.tools_schema[0]["function"]["parameters"]
    assert parameters["properties"]["action"] == {"type": "integer", "minimum": 0, "maximum": 3}
    env.reset(seed=0)
    assert env.step(call("act", {"action": 1}))[0] == "You are on cell 4."


@pytest.mark.parametrize(
    ("name", "actions", "match"),
    [("FrozenLake-v1", ["a"], "expected 4 names"), ("Pendulum-v1", None, "expected a Discrete")],
)
def test_spaces_that_do_not_fit_are_refused(name, actions, match):
    with pytest.raises(ValueError, match=match):
        GymnasiumEnvironment(gymnasium.make(name), to_text, actions)
