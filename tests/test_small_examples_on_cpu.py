# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""FrozenLake and Countdown: rules, reproducibility, and play over HTTP."""

import hashlib
import json
from collections import deque
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import countdown, frozen_lake
from examples.countdown import CountdownEnv
from examples.frozen_lake import FrozenLakeEnv
from tests.env_service.service import call, say, serve

PROPERTIES = settings(max_examples=50, deadline=None)


def walk_to_goal(lake: str) -> list[str]:
    """A shortest way over a map."""
    rows = [line.split() for line in lake.splitlines()]
    goal = (len(rows) - 1, len(rows) - 1)
    ways: dict[tuple[int, int], list[str]] = {(0, 0): []}
    queue = deque([(0, 0)])
    while queue and goal not in ways:
        row, column = queue.popleft()
        for name, (d_row, d_column) in frozen_lake.STEPS.items():
            cell = (row + d_row, column + d_column)
            inside = 0 <= cell[0] <= goal[0] and 0 <= cell[1] <= goal[1]
            if inside and cell not in ways and rows[cell[0]][cell[1]] != "O":
                ways[cell] = [*ways[row, column], name]
                queue.append(cell)
    return ways[goal]


def combine_to_target(numbers: list[int], target: int) -> list[tuple[int, str, int]] | None:
    """Calls that reach the target."""
    if target in numbers:
        return []
    for first, second in permutations(range(len(numbers)), 2):
        rest = [number for index, number in enumerate(numbers) if index not in (first, second)]
        for operator in countdown.OPERATORS:
            result = countdown.calculate(numbers[first], operator, numbers[second])
            if result is not None and (plan := combine_to_target([*rest, result], target)) is not None:
                return [(numbers[first], operator, numbers[second]), *plan]
    return None


def combine(left: int, operator: str, right: int) -> dict[str, Any]:
    return call("combine", {"left": left, "operator": operator, "right": right})


@PROPERTIES
@given(seed=st.integers(), size=st.integers(3, 8))
def test_every_lake_can_be_crossed(seed: int, size: int):
    env = FrozenLakeEnv(size=size, hole_percent=40, max_steps=100)
    lake, _ = env.reset(seed=seed)
    results = [env.step(call("move", {"direction": name})) for name in walk_to_goal(lake)]
    assert [result[1:4] for result in results[:-1]] == [(0.0, False, False)] * (len(results) - 1)
    assert results[-1][1:4] == (1.0, True, False) and results[-1][4]["success"] is True


def test_hole_ends_the_game():
    env = FrozenLakeEnv(size=4, hole_percent=60)
    lake, _ = env.reset(seed=next(seed for seed in range(99) if env.reset(seed=seed)[0].startswith("@ O")))
    text, reward, terminated, truncated, info = env.step(call("move", {"direction": "right"}))
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    assert "You fell into a hole." in text and "@" not in text


def test_lake_truncates_and_a_silent_turn_counts():
    env = FrozenLakeEnv(max_steps=2)
    start, _ = env.reset(seed=0)
    assert env.step(say("hm"))[:4] == (start, 0.0, False, False)
    assert env.step(call("move", {"direction": "up"}))[:4] == (start, 0.0, False, True)


def test_slippery_ice_slides_by_seed():
    ends = set()
    for seed in range(40):
        walks = []
        for _ in range(2):
            env = FrozenLakeEnv(size=8, hole_percent=0, is_slippery=True)
            env.reset(seed=seed)
            walks.append([env.step(call("move", {"direction": "right"}))[0] for _ in range(3)])
        assert walks[0] == walks[1]
        ends.add(walks[0][-1])
    assert len(ends) > 3 and "slippery" in env.task_prompt


@PROPERTIES
@given(seed=st.integers(), num_numbers=st.integers(2, 4))
def test_every_target_can_be_reached(seed: int, num_numbers: int):
    env = CountdownEnv(num_numbers=num_numbers)
    env.reset(seed=seed)
    plan = combine_to_target(env.numbers, env.target)
    assert plan
    results = [env.step(combine(*step)) for step in plan]
    assert [result[2] for result in results] == [False] * (len(plan) - 1) + [True]
    assert sum(result[1] for result in results) == 1.0 and results[-1][4]["success"] is True


@pytest.mark.parametrize(
    ("step", "note"),
    [
        ((2, "+", 9), "9 is not among"),
        ((3, "+", 3), "3 is not among"),
        ((2, "-", 3), "no whole number"),
        ((3, "/", 2), "no whole number"),
        ((3, "/", 0), "no whole number"),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_explained(step: tuple[int, str, int], note: str):
    env = CountdownEnv()
    env.reset(seed=1)
    env.numbers, env.target = [2, 3, 0], 100
    text, reward, terminated, truncated, _ = env.step(combine(*step))
    assert note in text and env.numbers == [2, 3, 0]
    assert (reward, terminated, truncated) == (0.0, False, False)


def test_last_number_that_is_not_the_target_ends_the_game():
    env = CountdownEnv(num_numbers=2)
    env.reset(seed=1)
    env.numbers, env.target = [2, 3], 100
    assert env.step(combine(2, "+", 3))[:4] == ("2 + 3 = 5\nNumbers: 5\nTarget: 100", 0.0, True, False)


def test_countdown_truncates_and_a_silent_turn_counts():
    env = CountdownEnv(max_steps=1)
    env.reset(seed=1)
    text, reward, terminated, truncated, _ = env.step(say("hm"))
    assert text.startswith("Call `combine`.") and (reward, terminated, truncated) == (0.0, False, True)


def test_starts_are_the_same_on_every_machine():
    starts = [
        [env.reset(seed=seed)[0] for seed in range(30)]
        for env in (FrozenLakeEnv(size=6, hole_percent=40), CountdownEnv(num_numbers=4))
    ]
    digest = hashlib.sha256(json.dumps(starts).encode()).hexdigest()
    assert digest == "3daa0af6acc4e0f093c933904e28a80336edf93cf4ac5e4cf8dafd234abc5c6a"


@pytest.mark.parametrize(
    ("factory", "options", "match"),
    [
        (FrozenLakeEnv, {"size": 2}, "size"),
        (FrozenLakeEnv, {"hole_percent": 61}, "hole_percent"),
        (FrozenLakeEnv, {"is_slippery": 1}, "is_slippery"),
        (FrozenLakeEnv, {"max_steps": True}, "max_steps"),
        (CountdownEnv, {"num_numbers": 9}, "num_numbers"),
        (CountdownEnv, {"largest": 1.5}, "largest"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(factory: Any, options: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        factory(**options)


@pytest.mark.parametrize("factory", [FrozenLakeEnv, CountdownEnv])
def test_unknown_reset_options_are_refused(factory: Any):
    with pytest.raises(ValueError, match="options"):
        factory().reset(seed=0, options={"x": 1})


def test_both_play_over_http():
    with serve({"lake": FrozenLakeEnv, "countdown": CountdownEnv}) as service:
        env_id = service.open("lake", seed=3)
        start = service.get(env_id, "render").json()["render"]
        answers = [service.step(env_id, call("move", {"direction": way})).json() for way in walk_to_goal(start)]
        assert (answers[-1]["done"], answers[-1]["reward"]) == (True, 1.0)
        env_id = service.open("countdown", seed=3)
        numbers, target = countdown.make_puzzle(3, 3, 20)
        answers = [service.step(env_id, combine(*step)).json() for step in combine_to_target(numbers, target) or []]
        assert (answers[-1]["done"], answers[-1]["reward"]) == (True, 1.0)
        assert service.step(service.open("countdown"), call("combine", {"left": "2"})).status_code == 422


@pytest.mark.parametrize("module", [frozen_lake, countdown])
def test_examples_stay_small(module: Any):
    assert len(Path(module.__file__).read_text().splitlines()) < 150
