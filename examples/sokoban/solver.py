# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shortest solutions of a room.

Owns: A* over (player, boxes) with dead cells pruned. Refuses to know: generation, rewards, chat.
"""

from collections import deque
from heapq import heappop, heappush

from examples.sokoban.rules import DIRECTIONS, Cell, Room

Plan = list[str]
"""Action names such as `move_up` and `push_left`."""


class SearchLimitError(Exception):
    """The search gave up before it knew an answer."""


def solve(room: Room, max_positions: int = 500_000) -> Plan | None:
    """Find a solution with the fewest actions, walking included.

    Args:
        room: The position to solve.
        max_positions: Positions to look at before giving up.

    Returns:
        Actions that solve the room (`push_*` where a box moves, else `move_*`), or None when there is no solution.

    Raises:
        SearchLimitError: More positions than `max_positions` would be needed.
    """
    distances = push_distances(room)
    start = (room.player, tuple(sorted(room.boxes)))
    bound = _lower_bound(start[1], distances)
    if bound is None:
        return None
    came_from: dict[tuple[Cell, tuple[Cell, ...]], tuple[tuple[Cell, tuple[Cell, ...]], str] | None] = {start: None}
    best_cost = {start: 0}
    frontier = [(bound, 0, 0, start)]
    num_pushed = 0
    done: set[tuple[Cell, tuple[Cell, ...]]] = set()
    while frontier:
        _, _, cost, position = heappop(frontier)
        if position in done:
            continue
        done.add(position)
        if len(done) > max_positions:
            raise SearchLimitError(f"no answer within {max_positions} positions")
        player, boxes = position
        if all(box in room.targets for box in boxes):
            return _trace(came_from, position)
        for name, (d_row, d_column) in DIRECTIONS.items():
            cell = (player[0] + d_row, player[1] + d_column)
            if cell in room.walls:
                continue
            if cell in boxes:
                behind = (cell[0] + d_row, cell[1] + d_column)
                if behind in room.walls or behind in boxes or behind not in distances:
                    continue
                moved = tuple(sorted(behind if box == cell else box for box in boxes))
                action = f"push_{name}"
            else:
                moved, action = boxes, f"move_{name}"
            following = (cell, moved)
            if following in done or best_cost.get(following, cost + 2) <= cost + 1:
                continue
            bound = _lower_bound(moved, distances)
            if bound is None:
                continue
            best_cost[following] = cost + 1
            came_from[following] = (position, action)
            num_pushed += 1
            heappush(frontier, (cost + 1 + bound, -num_pushed, cost + 1, following))
    return None


def push_distances(room: Room) -> dict[Cell, int]:
    """Fewest pushes from each cell to the nearest target, other boxes ignored. A missing cell is dead.

    Source: pulling backwards from every target; a box on a cell that no pull reaches can never come home.
    """
    distances = dict.fromkeys(room.targets, 0)
    queue = deque(sorted(room.targets))
    while queue:
        cell = queue.popleft()
        for d_row, d_column in DIRECTIONS.values():
            box = (cell[0] - d_row, cell[1] - d_column)
            player = (box[0] - d_row, box[1] - d_column)
            if box not in distances and box not in room.walls and _inside(room, player) and player not in room.walls:
                distances[box] = distances[cell] + 1
                queue.append(box)
    return distances


def _inside(room: Room, cell: Cell) -> bool:
    return 0 <= cell[0] < room.num_rows and 0 <= cell[1] < room.num_columns


def _lower_bound(boxes: tuple[Cell, ...], distances: dict[Cell, int]) -> int | None:
    """Pushes that are needed at least; None when a box can never come home."""
    total = 0
    for box in boxes:
        distance = distances.get(box)
        if distance is None:
            return None
        total += distance
    return total


def _trace(
    came_from: dict[tuple[Cell, tuple[Cell, ...]], tuple[tuple[Cell, tuple[Cell, ...]], str] | None],
    position: tuple[Cell, tuple[Cell, ...]],
) -> Plan:
    plan: Plan = []
    while (step := came_from[position]) is not None:
        position, action = step
        plan.append(action)
    return plan[::-1]
