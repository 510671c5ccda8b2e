# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The rules: moves, pushes, the serialised form, generation."""

import hashlib
import json
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.sokoban import rules, solver
from examples.sokoban.sokoban_env import SYMBOLS, draw

SIZES = st.sampled_from([(5, 5, 1), (6, 7, 1), (7, 7, 1), (7, 7, 2), (8, 6, 2), (9, 9, 3)])
SEEDS = st.integers(-(10**12), 10**12)
PROPERTIES = settings(max_examples=60, deadline=None)


def read(text: str) -> rules.Room:
    """A room from its map."""
    values = {symbol: value for value, symbol in SYMBOLS.items()}
    state = [[values[symbol] for symbol in line.split()] for line in text.strip().splitlines()]
    wants_box = (rules.TARGET, rules.BOX_ON_TARGET, rules.PLAYER_ON_TARGET)
    fixed = [
        [rules.WALL if value == rules.WALL else rules.TARGET if value in wants_box else rules.FLOOR for value in row]
        for row in state
    ]
    return rules.deserialise({"room_fixed": fixed, "room_state": state})


CORRIDOR = read("""
# # # # # # #
# @ $ - . - #
# # # # # # #
""")


def test_push_moves_box_and_player():
    after = rules.push(CORRIDOR, "right")
    assert draw(after).splitlines()[1] == "# - @ $ . - #"
    assert rules.push(after, "right").is_solved


def test_push_off_target_counts():
    solved = rules.push(rules.push(CORRIDOR, "right"), "right")
    off = rules.push(solved, "right")
    assert (solved.num_boxes_on_target, off.num_boxes_on_target) == (1, 0)
    assert draw(off).splitlines()[1] == "# - - - + $ #"


@pytest.mark.parametrize(
    ("line", "action", "direction"),
    [
        ("# @ $ # . - #", rules.push, "right"),
        ("# @ $ $ . . #", rules.push, "right"),
        ("# @ - $ . - #", rules.push, "left"),
        ("# @ $ - . - #", rules.move, "right"),
        ("# @ * - $ . #", rules.move, "right"),
        ("# @ - $ . - #", rules.move, "up"),
    ],
    ids=["wall-behind", "box-behind", "wall", "walk-into-box", "walk-into-placed-box", "walk-into-wall"],
)
def test_blocked_action_changes_nothing(line: str, action: Any, direction: str):
    room = read(f"# # # # # # #\n{line}\n# # # # # # #")
    assert action(room, direction) is room


def test_push_without_a_box_walks():
    room = read("# # # # # #\n# @ - $ . #\n# # # # # #")
    assert rules.push(room, "right") == rules.move(room, "right") != room


@PROPERTIES
@given(seed=SEEDS, size=SIZES)
def test_generated_room_is_solvable_and_unsolved(seed: int, size: tuple[int, int, int]):
    room = rules.generate(seed, *size)
    assert (room.num_rows, room.num_columns, len(room.boxes), len(room.targets)) == (*size, size[2])
    assert not room.is_solved and room.num_boxes_on_target == 0
    plan = solver.solve(room)
    assert plan
    for action in plan:
        kind, direction = action.split("_")
        moved = (rules.push if kind == "push" else rules.move)(room, direction)
        assert moved is not room
        assert (moved.boxes != room.boxes) == (kind == "push")
        room = moved
    assert room.is_solved


@PROPERTIES
@given(seed=SEEDS, size=SIZES)
def test_same_seed_gives_the_same_room(seed: int, size: tuple[int, int, int]):
    random.seed(1)
    first = rules.generate(seed, *size)
    random.seed(2)
    assert rules.generate(seed, *size) == first


def test_seeds_give_different_rooms():
    rooms = {json.dumps(rules.serialise(rules.generate(seed))) for seed in range(-50, 150)}
    assert len(rooms) > 190


def fingerprint() -> str:
    """One hash over many rooms."""
    rooms = [rules.serialise(rules.generate(seed, *size)) for size in ((7, 7, 1), (9, 8, 3)) for seed in range(40)]
    return hashlib.sha256(json.dumps(rooms).encode()).hexdigest()


def test_rooms_are_the_same_on_every_machine():
    """Data sets name rooms by their seeds: a change of this hash makes every one of them another data set."""
    assert fingerprint() == "95143bebb0b36071769c41e8fef718a89a7a102617b6252f9ab416b93ec97354"


def test_rooms_do_not_depend_on_hash_seeds():
    code = "from tests.sokoban.test_rules_on_cpu import fingerprint; print(fingerprint())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77", "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.stdout.strip() == fingerprint(), done.stderr


@PROPERTIES
@given(seed=SEEDS, size=SIZES, walk=st.lists(st.sampled_from(sorted(rules.DIRECTIONS)), max_size=30))
def test_serialised_room_survives_json(seed: int, size: tuple[int, int, int], walk: list[str]):
    room = rules.generate(seed, *size)
    for direction in walk:
        room = rules.push(room, direction)
    setup = json.loads(json.dumps(rules.serialise(room)))
    again = rules.deserialise(setup)
    assert (again.walls, again.targets, again.player) == (room.walls, room.targets, room.player)
    assert sorted(again.boxes) == sorted(room.boxes)
    assert rules.serialise(again)["room_state"] == setup["room_state"]
    mapping = {rules.parse_cell(target): tuple(box) for target, box in setup["box_mapping"].items()}
    assert set(mapping) == room.targets and sorted(mapping.values()) == sorted(room.boxes)


@PROPERTIES
@given(seed=SEEDS, walk=st.lists(st.sampled_from(sorted(rules.DIRECTIONS)), max_size=60))
def test_no_walk_breaks_the_room(seed: int, walk: list[str]):
    room = rules.generate(seed, 7, 7, 2)
    for direction in walk:
        room = rules.push(room, direction)
        assert room.player not in room.boxes and room.player not in room.walls
        assert len(set(room.boxes)) == 2 and not set(room.boxes) & room.walls


@pytest.mark.parametrize("text", ["(1, 3)", "(1,3)", "( 1 , 3 )", "(np.int64(1), np.int64(3))"])
def test_coordinates_are_read(text: str):
    assert rules.parse_cell(text) == (1, 3)


@pytest.mark.parametrize("text", ["1, 3", "(1, -3)", "(1, 3, 4)", "(1.0, 3)", "", None, "__import__('os')"])
def test_other_texts_are_no_coordinates(text: Any):
    with pytest.raises(ValueError, match="expected a coordinate"):
        rules.parse_cell(text)


def change(**changes: Any) -> dict[str, Any]:
    """The corridor's setup with some keys changed."""
    return {**rules.serialise(CORRIDOR), **changes}


WALLS = [0] * 7


@pytest.mark.parametrize(
    ("setup", "match"),
    [
        (None, "expected an object"),
        (change(colour=1), "unknown key 'colour'"),
        ({"room_fixed": [WALLS] * 3}, "room_state: expected a list of rows"),
        (change(room_state="x"), "room_state: expected"),
        (change(room_state=[WALLS, [0, 5], WALLS]), "differ in length"),
        (change(room_state=[WALLS] * 4), "room_fixed is 3x7"),
        (change(room_state=[WALLS, [0, 5, 4, 1, 9, 1, 0], WALLS]), "integers 0 to 6"),
        (change(room_state=[WALLS, [0, 5.0, 4, 1, 2, 1, 0], WALLS]), "integers 0 to 6"),
        (change(room_state=[WALLS, [0, True, 4, 1, 2, 1, 0], WALLS]), "integers 0 to 6"),
        (change(room_state=[WALLS, [0, 1, 4, 1, 2, 1, 0], WALLS]), "one player, got 0"),
        (change(room_state=[WALLS, [0, 5, 4, 5, 2, 1, 0], WALLS]), "one player, got 2"),
        (change(room_state=[WALLS, [0, 5, 1, 1, 2, 1, 0], WALLS]), "as many boxes as targets"),
        (change(room_state=[WALLS, [0, 5, 4, 3, 2, 1, 0], WALLS]), "room_state has 3"),
        (change(room_fixed=[WALLS, [1, 1, 1, 1, 2, 1, 0], WALLS]), "room_state has 0"),
        (
            change(room_fixed=[WALLS, [1, 1, 1, 1, 2, 1, 0], WALLS], room_state=[WALLS, [1, 5, 4, 1, 2, 1, 0], WALLS]),
            "no wall at the edge",
        ),
        (change(box_mapping={"(1, 1)": [1, 2]}), "the targets are"),
        (change(box_mapping={"1 1": [1, 2]}), "expected a coordinate"),
        (change(box_mapping=[1]), "box_mapping: expected an object"),
        (change(room_fixed=[[0] * 40] * 3), "3 to 32 columns"),
    ],
)
def test_malformed_setup_is_refused_with_the_reason(setup: Any, match: str):
    with pytest.raises(ValueError, match=match):
        rules.deserialise(setup)


def test_player_on_a_target_may_be_written_as_a_player():
    fixed = [WALLS, [0, 2, 1, 1, 1, 1, 0], WALLS]
    rooms = [
        rules.deserialise({"room_fixed": fixed, "room_state": [WALLS, [0, player, 1, 4, 1, 1, 0], WALLS]})
        for player in (rules.PLAYER, rules.PLAYER_ON_TARGET)
    ]
    assert rooms[0] == rooms[1]


@pytest.mark.parametrize(
    ("size", "match"),
    [((4, 7, 1), "5 to 32 rows"), ((7, 33, 1), "5 to 32 columns"), ((7, 7, 0), "1 to 6"), ((5, 5, 3), "1 to 2")],
)
def test_impossible_sizes_are_refused_with_the_reason(size: tuple[int, int, int], match: str):
    with pytest.raises(ValueError, match=match):
        rules.generate(0, *size)
