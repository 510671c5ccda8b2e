# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment: maps, rewards, limits, options."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.sokoban import rules, solver
from examples.sokoban.sokoban_env import TOOLS, SokobanEnv, draw
from tests.env_service.service import call, say
from tests.sokoban.test_rules_on_cpu import CORRIDOR

SETUP = rules.serialise(CORRIDOR)


def play(env: SokobanEnv, *names: str) -> list[tuple[float, bool, bool]]:
    """Reward, terminated, truncated of each action."""
    return [env.step(call(name))[1:4] for name in names]


def test_episode_pays_as_documented():
    env = SokobanEnv(room_setup=SETUP)
    observation, info = env.reset()
    assert observation == [{"role": "user", "content": draw(CORRIDOR)}]
    assert info == {"success": False, "num_steps": 0, "num_boxes_on_target": 0}
    messages, reward, terminated, truncated, info = env.step(call("push_right", call_id="c1"))
    assert messages[0]["tool_call_id"] == "c1" and messages[0]["role"] == "tool"
    assert messages[0]["content"].splitlines()[1] == "# - @ $ . - #"
    assert (reward, terminated, truncated) == (pytest.approx(-0.1), False, False)
    _, reward, terminated, truncated, info = env.step(call("push_right"))
    assert (reward, terminated, truncated) == (pytest.approx(10.9), True, False)
    assert info == {"success": True, "num_steps": 2, "num_boxes_on_target": 1}


def test_pushing_a_box_off_its_target_costs():
    text = [[0] * 8, [0, 5, 3, 1, 4, 2, 1, 0], [0] * 8]
    fixed = [[0] * 8, [0, 1, 2, 1, 1, 2, 1, 0], [0] * 8]
    env = SokobanEnv(room_setup={"room_fixed": fixed, "room_state": text})
    env.reset()
    assert play(env, "push_right")[0][0] == pytest.approx(-1.1)


def test_last_step_truncates_and_nothing_follows():
    env = SokobanEnv(room_setup=SETUP, max_steps=2)
    env.reset()
    assert play(env, "move_left", "move_right") == [
        (pytest.approx(-0.1), False, False),
        (pytest.approx(-0.1), False, True),
    ]
    before = env.room
    assert play(env, "push_right") == [(0.0, False, True)]
    assert env.room is before


def test_solving_with_the_last_step_terminates():
    env = SokobanEnv(room_setup=SETUP, max_steps=2)
    env.reset()
    assert play(env, "push_right", "push_right")[-1] == (pytest.approx(10.9), True, False)
    assert play(env, "push_right") == [(0.0, True, False)]


def test_turn_without_a_call_costs_a_step():
    env = SokobanEnv(room_setup=SETUP, max_steps=1)
    env.reset()
    messages, reward, _, truncated, info = env.step(say("I think"))
    assert messages[0]["role"] == "user" and messages[0]["content"].startswith("No tool was called.")
    assert (reward, truncated, info["num_steps"]) == (pytest.approx(-0.1), True, 1)


def test_several_calls_are_played_in_order_and_stop_at_the_end():
    env = SokobanEnv(room_setup=SETUP, allow_parallel_tool_call=True)
    env.reset()
    calls = [call("push_right", call_id=f"c{index}")["tool_calls"][0] for index in range(4)]
    messages, reward, terminated, _, info = env.step({**say(""), "tool_calls": calls})
    assert [message["tool_call_id"] for message in messages] == ["c0", "c1", "c2", "c3"]
    assert (reward, terminated, info["num_steps"]) == (pytest.approx(10.8), True, 2)
    assert "one or more" in env.task_prompt


def test_tools_are_the_eight_actions():
    names = [entry["function"]["name"] for entry in TOOLS]
    assert names == [f"{kind}_{where}" for kind in ("push", "move") for where in ("up", "down", "left", "right")]


def test_prompt_explains_every_symbol_and_the_limit():
    env = SokobanEnv(max_steps=17)
    assert all(f"{symbol} " in env.task_prompt or f"({symbol})" in env.task_prompt for symbol in "#-.$*@+")
    assert "17 actions" in env.task_prompt


def test_start_that_is_solved_is_over():
    solved = rules.push(rules.push(CORRIDOR, "right"), "right")
    env = SokobanEnv(room_setup=rules.serialise(solved))
    env.reset()
    assert env.is_over


def test_reset_takes_options_and_refusal_changes_nothing():
    env = SokobanEnv()
    env.reset(seed=1, options={"dim_room": [6, 8], "num_boxes": 2})
    assert (env.room.num_rows, env.room.num_columns, len(env.room.boxes)) == (6, 8, 2)
    before = env.room
    with pytest.raises(ValueError, match="num_boxes"):
        env.reset(seed=1, options={"num_boxes": 99})
    assert env.room is before
    env.reset(seed=2)
    assert len(env.room.boxes) == 2


def test_seed_decides_the_room_and_none_is_any():
    first, second = SokobanEnv(), SokobanEnv()
    first.reset(seed=9)
    second.reset(seed=9)
    assert first.room == second.room
    rooms = set()
    for _ in range(5):
        first.reset()
        rooms.add(draw(first.room))
    assert len(rooms) > 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dim_room": 7}, "dim_room"),
        ({"dim_room": [7]}, "dim_room"),
        ({"dim_room": [7.0, 7]}, "dim_room"),
        ({"dim_room": [3, 7]}, "5 to 32 rows"),
        ({"num_boxes": 0}, "num_boxes"),
        ({"num_boxes": True}, "num_boxes"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": "9"}, "max_steps"),
        ({"room_setup": {}}, "room_setup"),
        ({"allow_parallel_tool_call": 1}, "allow_parallel"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        SokobanEnv(**options)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), num_boxes=st.integers(1, 2))
def test_solver_earns_the_full_return(seed: int, num_boxes: int):
    env = SokobanEnv(num_boxes=num_boxes, max_steps=200)
    env.reset(seed=seed)
    plan = solver.solve(env.room)
    assert plan is not None
    played = play(env, *plan)
    assert [terminated for _, terminated, _ in played] == [False] * (len(plan) - 1) + [True]
    assert sum(reward for reward, _, _ in played) == pytest.approx(10 + num_boxes - 0.1 * len(plan))
