# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The solver against plain breadth-first search and rooms with known answers."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.sokoban import rules, solver
from tests.sokoban.test_rules_on_cpu import CORRIDOR, read


def search_blindly(room: rules.Room) -> int | None:
    """Fewest actions by trying everything."""
    start = (room.player, frozenset(room.boxes))
    seen, queue = {start}, deque([(room, 0)])
    while queue:
        room, depth = queue.popleft()
        if room.is_solved:
            return depth
        for direction in rules.DIRECTIONS:
            after = rules.push(room, direction)
            key = (after.player, frozenset(after.boxes))
            if key not in seen:
                seen.add(key)
                queue.append((after, depth + 1))
    return None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), walk=st.lists(st.sampled_from(sorted(rules.DIRECTIONS)), max_size=25))
def test_solution_is_shortest_and_dead_ends_are_known(seed: int, walk: list[str]):
    """Random pushes first, so that many positions are lost."""
    room = rules.generate(seed, 6, 6, 1 + seed % 2)
    for direction in walk:
        room = rules.push(room, direction)
    plan = solver.solve(room)
    assert (None if plan is None else len(plan)) == search_blindly(room)


def test_known_solution():
    assert solver.solve(CORRIDOR) == ["push_right", "push_right"]


def test_solved_room_needs_nothing():
    assert solver.solve(rules.push(rules.push(CORRIDOR, "right"), "right")) == []


def test_box_in_a_corner_is_lost():
    assert solver.solve(read("# # # # #\n# $ @ . #\n# - - - #\n# # # # #")) is None


def test_search_gives_up_at_its_limit():
    room = rules.generate(0, 10, 10, 3)
    with pytest.raises(solver.SearchLimitError, match="5 positions"):
        solver.solve(room, max_positions=5)
