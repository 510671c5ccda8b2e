# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The rules of Sokoban: rooms, moves, pushes, and how a room is generated.

Owns: what a room is, what an action does to it, generation by reverse play, and the serialised form of a room.
Refuses to know: HTTP, chat, rewards, numpy. Plain Python with integer draws, so a seed gives the same room anywhere.

A room is a grid of cells. Walls and targets are fixed; boxes and the player move. In the serialised form
(`room_fixed`, `room_state`, `box_mapping`) cells are the integers below, and coordinates are (row, column) from 0.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from examples.integer_draws import make_draw, pick

Cell: TypeAlias = tuple[int, int]
"""(row, column)."""

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)

DIRECTIONS: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

MIN_DIM = 5
"""Rows and columns, walls included. Below it there is no place to push."""

MAX_DIM = 32

MAX_BOXES = 8

_MAX_TRIES = 400
_COORDINATE = re.compile(r"\(\s*(?:np\.int\d+\()?(\d+)\)?\s*,\s*(?:np\.int\d+\()?(\d+)\)?\s*\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """One position of the game; immutable."""

    num_rows: int
    """Rows, the outer walls included."""

    num_columns: int
    """Columns, the outer walls included."""

    walls: frozenset[Cell]
    """Cells nobody enters."""

    targets: frozenset[Cell]
    """Cells that want a box."""

    boxes: tuple[Cell, ...]
    """Where the boxes are; a box keeps its place in this tuple when it moves."""

    player: Cell
    """Where the player is."""

    @property
    def num_boxes_on_target(self) -> int:
        """Boxes that are where they should be."""
        return sum(box in self.targets for box in self.boxes)

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a target."""
        return self.num_boxes_on_target == len(self.boxes)


def move(room: Room, direction: str) -> Room:
    """Walk one cell. A wall or a box in the way leaves the room as it is.

    Args:
        room: The position before.
        direction: A key of `DIRECTIONS`.

    Returns:
        The position after; `room` itself when nothing moved.
    """
    d_row, d_column = DIRECTIONS[direction]
    cell = (room.player[0] + d_row, room.player[1] + d_column)
    if cell in room.walls or cell in room.boxes:
        return room
    return _with(room, room.boxes, cell)


def push(room: Room, direction: str) -> Room:
    """Walk one cell and push the box that stands there, if any, one cell further.

    A wall in the way, or a box that cannot move because a wall or another box is behind it, leaves the room as it is.

    Args:
        room: The position before.
        direction: A key of `DIRECTIONS`.

    Returns:
        The position after; `room` itself when nothing moved.
    """
    d_row, d_column = DIRECTIONS[direction]
    cell = (room.player[0] + d_row, room.player[1] + d_column)
    if cell not in room.boxes:
        return move(room, direction)
    behind = (cell[0] + d_row, cell[1] + d_column)
    if behind in room.walls or behind in room.boxes:
        return room
    return _with(room, tuple(behind if box == cell else box for box in room.boxes), cell)


def _with(room: Room, boxes: tuple[Cell, ...], player: Cell) -> Room:
    return Room(
        num_rows=room.num_rows,
        num_columns=room.num_columns,
        walls=room.walls,
        targets=room.targets,
        boxes=boxes,
        player=player,
    )


# ---- the serialised form ---------------------------------------------------------------------------------------------


def to_grid(room: Room) -> list[list[int]]:
    """The `room_state` form: one integer per cell."""
    grid = [list(row) for row in _fixed_grid(room.num_rows, room.num_columns, room.walls, room.targets)]
    for row, column in room.boxes:
        grid[row][column] = BOX_ON_TARGET if grid[row][column] == TARGET else BOX
    row, column = room.player
    grid[row][column] = PLAYER_ON_TARGET if grid[row][column] == TARGET else PLAYER
    return grid


@lru_cache(maxsize=4096)
def _fixed_grid(
    num_rows: int, num_columns: int, walls: frozenset[Cell], targets: frozenset[Cell]
) -> tuple[tuple[int, ...], ...]:
    """The `room_fixed` form: what no action changes."""
    return tuple(
        tuple(
            WALL if (row, column) in walls else TARGET if (row, column) in targets else FLOOR
            for column in range(num_columns)
        )
        for row in range(num_rows)
    )


def serialise(room: Room) -> dict[str, Any]:
    """Write a room as JSON.

    Returns:
        `room_fixed` (walls, floor, targets), `room_state` (everything), `box_mapping` (target to box, keys like
        `"(1, 3)"`; boxes are given to targets in order of the boxes and of the sorted targets).
    """
    fixed = [list(row) for row in _fixed_grid(room.num_rows, room.num_columns, room.walls, room.targets)]
    mapping = {str(target): list(box) for target, box in zip(sorted(room.targets), room.boxes, strict=True)}
    return {"room_fixed": fixed, "room_state": to_grid(room), "box_mapping": mapping}


def deserialise(setup: Mapping[str, Any]) -> Room:
    """Read a room.

    Args:
        setup: The form of `serialise`. `box_mapping` may be missing; when present, its keys must be the targets (its
            values are not needed: boxes are read from `room_state`). A player on a target may be 5 or 6.

    Raises:
        ValueError: Not a room; the text says what is wrong.
    """
    if not isinstance(setup, Mapping):
        raise ValueError(f"room_setup: expected an object, got {type(setup).__name__}")
    unknown = sorted(set(setup) - {"room_fixed", "room_state", "box_mapping"})
    if unknown:
        raise ValueError(f"room_setup: unknown key {unknown[0]!r}")
    fixed = _read_grid(setup, "room_fixed", TARGET)
    state = _read_grid(setup, "room_state", PLAYER_ON_TARGET)
    num_rows, num_columns = len(fixed), len(fixed[0])
    if (len(state), len(state[0])) != (num_rows, num_columns):
        raise ValueError(f"room_setup: room_fixed is {num_rows}x{num_columns}, room_state {len(state)}x{len(state[0])}")
    cells = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    walls = frozenset(cell for cell in cells if fixed[cell[0]][cell[1]] == WALL)
    targets = frozenset(cell for cell in cells if fixed[cell[0]][cell[1]] == TARGET)
    allowed = {
        WALL: {WALL},
        FLOOR: {FLOOR, BOX, PLAYER},
        TARGET: {TARGET, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET},
    }
    for row, column in cells:
        if state[row][column] not in allowed[fixed[row][column]]:
            raise ValueError(
                f"room_setup: room_state has {state[row][column]} at {(row, column)}, room_fixed {fixed[row][column]}"
            )
        on_edge = row in (0, num_rows - 1) or column in (0, num_columns - 1)
        if on_edge and fixed[row][column] != WALL:
            raise ValueError(f"room_setup: no wall at the edge {(row, column)}")
    boxes = tuple(cell for cell in cells if state[cell[0]][cell[1]] in (BOX, BOX_ON_TARGET))
    players = [cell for cell in cells if state[cell[0]][cell[1]] in (PLAYER, PLAYER_ON_TARGET)]
    if len(players) != 1:
        raise ValueError(f"room_setup: expected one player, got {len(players)}")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(f"room_setup: expected as many boxes as targets, got {len(boxes)} and {len(targets)}")
    _check_mapping(setup.get("box_mapping"), targets)
    return Room(
        num_rows=num_rows, num_columns=num_columns, walls=walls, targets=targets, boxes=boxes, player=players[0]
    )


def _read_grid(setup: Mapping[str, Any], key: str, largest: int) -> list[list[int]]:
    grid = setup.get(key)
    if not isinstance(grid, Sequence) or not grid or not all(isinstance(row, Sequence) and row for row in grid):
        raise ValueError(f"room_setup: {key}: expected a list of rows")
    if len({len(row) for row in grid}) != 1:
        raise ValueError(f"room_setup: {key}: rows differ in length")
    for name, size in (("rows", len(grid)), ("columns", len(grid[0]))):
        if not 3 <= size <= MAX_DIM:
            raise ValueError(f"room_setup: {key}: expected 3 to {MAX_DIM} {name}, got {size}")
    for row in grid:
        for value in row:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
                raise ValueError(f"room_setup: {key}: expected integers 0 to {largest}, got {value!r:.40}")
    return [list(row) for row in grid]


def _check_mapping(mapping: Any, targets: frozenset[Cell]) -> None:
    if mapping is None:
        return
    if not isinstance(mapping, Mapping):
        raise ValueError(f"room_setup: box_mapping: expected an object, got {type(mapping).__name__}")
    keys = {parse_cell(key) for key in mapping}
    if keys != targets:
        raise ValueError(f"room_setup: box_mapping names {sorted(keys)}, the targets are {sorted(targets)}")


def parse_cell(text: Any) -> Cell:
    """Read a coordinate such as `"(1, 3)"`; also the form that numpy 2 prints, `"(np.int64(1), np.int64(3))"`.

    Raises:
        ValueError: Another form.
    """
    match = _COORDINATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'expected a coordinate like "(1, 3)", got {text!r:.60}')
    return int(match[1]), int(match[2])


# ---- generation ------------------------------------------------------------------------------------------------------


def check_size(num_rows: int, num_columns: int, num_boxes: int) -> None:
    """Refuse sizes for which there is no room.

    Raises:
        ValueError: The text says which bound is broken.
    """
    for name, size in (("rows", num_rows), ("columns", num_columns)):
        if not MIN_DIM <= size <= MAX_DIM:
            raise ValueError(f"dim_room: expected {MIN_DIM} to {MAX_DIM} {name}, walls included, got {size}")
    num_inner = (num_rows - 2) * (num_columns - 2)
    most = min(MAX_BOXES, (num_inner - 1) // 4)
    if not 1 <= num_boxes <= most:
        raise ValueError(
            f"num_boxes: expected 1 to {most} in {num_rows}x{num_columns} (a box, its target and space around both "
            f"need 4 of the {num_inner} inner cells), got {num_boxes}"
        )


def generate(seed: int, num_rows: int = 7, num_columns: int = 7, num_boxes: int = 1) -> Room:
    """Make a room that can be solved and is not solved yet.

    The room is carved from rock by a random walk; boxes start on their targets and are pulled away by a player who
    plays backwards. Every backward move undone is a legal move, so the room is solvable.

    Args:
        seed: Same seed and size, same room, on every machine and Python version.
        num_rows: Rows, walls included.
        num_columns: Columns, walls included.
        num_boxes: Boxes, and targets.

    Raises:
        ValueError: The size is impossible (see `check_size`), or no room was found.
    """
    check_size(num_rows, num_columns, num_boxes)
    draw = make_draw(f"sokoban/{num_rows}x{num_columns}/{num_boxes}/{seed}")
    for _ in range(_MAX_TRIES):
        floor = _carve(draw, num_rows, num_columns)
        if len(floor) < 2 * num_boxes + 1:
            continue
        cells = sorted(floor)
        walls = frozenset(
            (row, column) for row in range(num_rows) for column in range(num_columns) if (row, column) not in floor
        )
        targets = pick(draw, cells, num_boxes)
        player = pick(draw, [cell for cell in cells if cell not in targets], 1)[0]
        start = Room(
            num_rows=num_rows,
            num_columns=num_columns,
            walls=walls,
            targets=frozenset(targets),
            boxes=tuple(sorted(targets)),
            player=player,
        )
        room = _play_backwards(draw, start)
        if not any(box in room.targets for box in room.boxes):
            return room
    raise ValueError(f"no room of {num_rows}x{num_columns} with {num_boxes} boxes found for seed {seed}")


def _carve(draw: Callable[[int], int], num_rows: int, num_columns: int) -> set[Cell]:
    """Dig a connected cave into 45 to 80 of 100 inner cells: a walk that keeps its direction for a while."""
    inner_rows, inner_columns = num_rows - 2, num_columns - 2
    wanted = max(4, inner_rows * inner_columns * (45 + draw(36)) // 100)
    row, column = 1 + draw(inner_rows), 1 + draw(inner_columns)
    floor = {(row, column)}
    steps = list(DIRECTIONS.values())
    d_row, d_column = steps[draw(4)]
    while len(floor) < wanted:
        if draw(100) < 40:
            d_row, d_column = steps[draw(4)]
        row = min(max(row + d_row, 1), inner_rows)
        column = min(max(column + d_column, 1), inner_columns)
        floor.add((row, column))
    return floor


def _play_backwards(draw: Callable[[int], int], room: Room) -> Room:
    """Walk and pull at random from a solved position; keep the position in which the boxes are farthest from home."""
    steps = list(DIRECTIONS.values())
    homes = room.boxes
    boxes, player = list(room.boxes), room.player
    best, best_score = room, -1
    held: int | None = None
    for _ in range(20 + draw(150 * len(boxes))):
        if held is None or draw(100) < 15:
            beside = [index for index, box in enumerate(boxes) if _distance(box, player) == 1]
            held = beside[draw(len(beside))] if beside and draw(100) < 80 else None
        d_row, d_column = steps[draw(4)]
        cell = (player[0] + d_row, player[1] + d_column)
        if cell in room.walls or cell in boxes:
            continue
        if held is not None and boxes[held] == (player[0] - d_row, player[1] - d_column):
            boxes[held] = player
        else:
            held = None
        player = cell
        num_home = sum(box in room.targets for box in boxes)
        score = sum(_distance(box, home) for box, home in zip(boxes, homes, strict=True)) - 10 * num_home
        # Equal scores replace too, so that the player's place varies.
        if score > best_score or (score == best_score and draw(2)):
            best, best_score = _with(room, tuple(boxes), player), score
    return best


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
