# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sokoban as an environment for language-model agents.

Owns: the text map, the task prompt, the tools, rewards and limits. Refuses to know: HTTP, and how rooms are made.

Serve it with `examples/sokoban/serve.sh`, or
`python -m recipe.agent_env.env_service examples.sokoban.sokoban_env:SokobanEnv --name sokoban-v0`.
"""

import secrets
from typing import Any

from examples.sokoban import rules
from recipe.agent_env.env_service.environment import (
    Environment,
    Message,
    ResetResult,
    StepResult,
    read_tool_calls,
    tool,
    tool_result,
)

ENV_NAME = "sokoban-v0"

SYMBOLS = {
    rules.WALL: "#",
    rules.FLOOR: "-",
    rules.TARGET: ".",
    rules.BOX_ON_TARGET: "*",
    rules.BOX: "$",
    rules.PLAYER: "@",
    rules.PLAYER_ON_TARGET: "+",
}

STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0

_TASK_PROMPT = """\
You play Sokoban. Push every box ($) onto a target (.).
The map has one symbol per cell: # wall, - floor, . target, $ box, * box on a target, @ you, + you on a target.
move_* walks one cell; a wall or a box in the way stops you. push_* walks one cell too, and pushes a box in the way \
one cell further unless a wall or another box is behind it. Boxes cannot be pulled.
Every action costs 0.1. A box pushed onto a target earns 1, one pushed off a target loses 1, solving the room earns 10.
You have {max_steps} actions. Answer each map with {num_calls}."""

TOOLS = [
    tool(f"{kind}_{direction}", f"{text} {direction}.")
    for kind, text in (("push", "Walk one cell, pushing a box in the way,"), ("move", "Walk one cell"))
    for direction in rules.DIRECTIONS
]
_ACTIONS = {entry["function"]["name"] for entry in TOOLS}


class SokobanEnv(Environment):
    """One player, one room.

    Args:
        dim_room: Rows and columns of generated rooms, walls included.
        num_boxes: Boxes of generated rooms.
        max_steps: Actions after which the episode is truncated.
        room_setup: Play this room (the form of `rules.serialise`) instead of a generated one.
        allow_parallel_tool_call: Whether an action may hold several calls, played in order.

    Raises:
        ValueError: An option is out of its bounds.

    After the end a further `step` changes nothing: reward 0 and the same flags again.
    """

    version = "1"

    def __init__(
        self,
        dim_room: tuple[int, int] = (7, 7),
        num_boxes: int = 1,
        max_steps: int = 20,
        room_setup: dict[str, Any] | None = None,
        allow_parallel_tool_call: bool = False,
    ) -> None:
        if not isinstance(allow_parallel_tool_call, bool):
            raise ValueError(f"allow_parallel_tool_call: expected a boolean, got {allow_parallel_tool_call!r:.40}")
        self.allow_parallel_tool_call = allow_parallel_tool_call
        self.tools_schema = TOOLS
        self._options = _check_options(
            {"dim_room": dim_room, "num_boxes": num_boxes, "max_steps": max_steps, "room_setup": room_setup}
        )
        self._room: rules.Room | None = None
        self._num_steps = 0

    @property
    def room(self) -> rules.Room:
        """The present position."""
        if self._room is None:
            raise RuntimeError("reset has not been called")
        return self._room

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Whether the room is solved."""
        return self.room.is_solved

    @property
    def task_prompt(self) -> str:  # type: ignore[override]
        """Rules and legend."""
        num_calls = "one or more tool calls" if self.allow_parallel_tool_call else "exactly one tool call"
        return _TASK_PROMPT.format(max_steps=self._options["max_steps"], num_calls=num_calls)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start in the given room, else in the one that `seed` generates (None: any)."""
        chosen = _check_options({**self._options, **(options or {})})
        if chosen["room_setup"] is not None:
            room = rules.deserialise(chosen["room_setup"])
        else:
            seed = secrets.randbits(31) if seed is None else seed
            room = rules.generate(seed, chosen["dim_room"][0], chosen["dim_room"][1], chosen["num_boxes"])
        self._options, self._room, self._num_steps = chosen, room, 0
        return [{"role": "user", "content": draw(room)}], self._info()

    def step(self, action: Message) -> StepResult:
        """Play the calls of one message. A message without calls, or with an unknown tool, costs an action too."""
        reward, messages = 0.0, []
        for call in read_tool_calls(action):
            if not self._is_ended:
                reward += self._play(call.name)
            messages.append(tool_result(call, draw(self.room)))
        if not messages:
            if not self._is_ended:
                reward += self._play(None)
            messages.append({"role": "user", "content": f"No tool was called.\n{draw(self.room)}"})
        return messages, reward, self.room.is_solved, self._is_ended and not self.room.is_solved, self._info()

    def render(self) -> str:
        """The map as text."""
        return draw(self.room)

    @property
    def _is_ended(self) -> bool:
        return self.room.is_solved or self._num_steps >= self._options["max_steps"]

    def _play(self, name: str | None) -> float:
        before = self.room
        if name in _ACTIONS:
            kind, direction = str(name).split("_")
            self._room = (rules.push if kind == "push" else rules.move)(before, direction)
        self._num_steps += 1
        reward = STEP_REWARD + BOX_REWARD * (self.room.num_boxes_on_target - before.num_boxes_on_target)
        return reward + (SOLVED_REWARD if self.room.is_solved else 0.0)

    def _info(self) -> dict[str, Any]:
        return {
            "success": self.room.is_solved,
            "num_steps": self._num_steps,
            "num_boxes_on_target": self.room.num_boxes_on_target,
        }


def draw(room: rules.Room) -> str:
    """The map: one line per row, symbols separated by blanks (so that tokenizers see one token per cell)."""
    return "\n".join(" ".join(SYMBOLS[value] for value in row) for row in rules.to_grid(room))


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - {"dim_room", "num_boxes", "max_steps", "room_setup"})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r:.40}; known: dim_room, num_boxes, max_steps, room_setup")
    for name in ("num_boxes", "max_steps"):
        if isinstance(options[name], bool) or not isinstance(options[name], int) or options[name] < 1:
            raise ValueError(f"{name}: expected an integer from 1, got {options[name]!r:.40}")
    dim = options["dim_room"]
    if (
        not isinstance(dim, list | tuple)
        or len(dim) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) for size in dim)
    ):
        raise ValueError(f"dim_room: expected two integers, rows and columns, got {dim!r:.40}")
    if options["room_setup"] is None:
        rules.check_size(dim[0], dim[1], options["num_boxes"])
    else:
        rules.deserialise(options["room_setup"])
    return {**options, "dim_room": (dim[0], dim[1])}
