# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""FrozenLake: cross the ice, avoid the holes. A small environment of another kind than Sokoban.

Owns: the lake, its generation, the text map, tools and rewards. Refuses to know: HTTP.
Serve it with `python -m recipe.agent_env.env_service examples.frozen_lake:FrozenLakeEnv --name frozen_lake-v0`.
"""

import secrets
from collections.abc import Callable
from typing import Any

from examples.integer_draws import make_draw
from recipe.agent_env.env_service.environment import (
    Environment,
    Message,
    ResetResult,
    StepResult,
    read_tool_calls,
    tool,
)

STEPS = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
"""In turning order: the neighbours of a direction are those at a right angle."""

_PROMPT = """\
You stand on a frozen lake. Reach the goal (G) without falling into a hole (O).
The map has one symbol per cell: @ you, _ ice, O hole, G goal. {ice}
Reaching the goal earns 1; a hole ends the game with 0. You have {max_steps} moves, one tool call each."""


class FrozenLakeEnv(Environment):
    """One walker on a square lake.

    Args:
        size: Rows and columns, 3 to 12.
        hole_percent: Chance of a hole per cell, 0 to 60; lakes without a way to the goal are drawn again.
        is_slippery: Whether a move goes to either side one time in three each.
        max_steps: Moves after which the episode is truncated.

    Raises:
        ValueError: An option is out of its bounds.
    """

    version = "1"
    tools_schema = [
        tool("move", "Move one cell.", {"direction": {"type": "string", "enum": list(STEPS)}}),
    ]

    def __init__(self, size: int = 4, hole_percent: int = 20, is_slippery: bool = False, max_steps: int = 20) -> None:
        for name, value, low, high in (
            ("size", size, 3, 12),
            ("hole_percent", hole_percent, 0, 60),
            ("max_steps", max_steps, 1, 1000),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value!r:.40}")
        if not isinstance(is_slippery, bool):
            raise ValueError(f"is_slippery: expected a boolean, got {is_slippery!r:.40}")
        self._size, self._hole_percent, self._max_steps = size, hole_percent, max_steps
        self._is_slippery = is_slippery
        ice = "The ice is slippery: one move in three slides to the left, one to the right." if is_slippery else ""
        self.task_prompt = _PROMPT.format(ice=ice, max_steps=max_steps)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Freeze a lake."""
        if options:
            raise ValueError(f"options: this environment has none, got {sorted(options)!r:.40}")
        seed = secrets.randbits(31) if seed is None else seed
        self._draw = make_draw(f"frozen_lake/{self._size}/{self._hole_percent}/{seed}")
        self._holes = make_lake(self._draw, self._size, self._hole_percent)
        self._cell, self._num_steps = (0, 0), 0
        return self.render(), self._info()

    def step(self, action: Message) -> StepResult:
        """Walk; a turn without a call is a move on the spot."""
        for call in read_tool_calls(action):
            directions = list(STEPS)
            index = directions.index(call.arguments["direction"])
            if self._is_slippery:
                index = (index + self._draw(3) - 1) % 4
            row, column = (a + b for a, b in zip(self._cell, STEPS[directions[index]], strict=True))
            self._cell = (min(max(row, 0), self._size - 1), min(max(column, 0), self._size - 1))
        self._num_steps += 1
        terminated = self._is_at_goal or self._cell in self._holes
        truncated = not terminated and self._num_steps >= self._max_steps
        return self.render(), float(self._is_at_goal), terminated, truncated, self._info()

    def render(self) -> str:
        """The map; the symbol of the walker's cell is kept when it is a hole."""
        goal = (self._size - 1, self._size - 1)

        def symbol(cell: tuple[int, int]) -> str:
            if cell == self._cell and cell not in self._holes:
                return "@"
            return "O" if cell in self._holes else "G" if cell == goal else "_"

        lines = (" ".join(symbol((row, column)) for column in range(self._size)) for row in range(self._size))
        fallen = "\nYou fell into a hole." if self._cell in self._holes else ""
        return "\n".join(lines) + fallen

    @property
    def _is_at_goal(self) -> bool:
        return self._cell == (self._size - 1, self._size - 1)

    def _info(self) -> dict[str, Any]:
        return {"success": self._is_at_goal, "num_steps": self._num_steps}


def make_lake(draw: Callable[[int], int], size: int, hole_percent: int) -> set[tuple[int, int]]:
    """Draw holes until there is a way from the first cell to the last."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        holes = {cell for cell in cells[1:-1] if draw(100) < hole_percent}
        reached, frontier = {cells[0]}, [cells[0]]
        while frontier:
            row, column = frontier.pop()
            for d_row, d_column in STEPS.values():
                cell = (row + d_row, column + d_column)
                if cell in cells and cell not in holes and cell not in reached:
                    reached.add(cell)
                    frontier.append(cell)
        if cells[-1] in reached:
            return holes
