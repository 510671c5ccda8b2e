# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Countdown: combine numbers until one of them is the target. An environment whose tool has several arguments.

Owns: the numbers, their generation, tools and rewards. Refuses to know: HTTP.
Serve it with `python -m recipe.agent_env.env_service examples.countdown:CountdownEnv --name countdown-v0`.
"""

import secrets
from typing import Any

from examples.integer_draws import make_draw, pick
from recipe.agent_env.env_service.environment import (
    Environment,
    Message,
    ResetResult,
    StepResult,
    read_tool_calls,
    tool,
)

OPERATORS = ("+", "-", "*", "/")
MAX_NUMBER = 9999

_PROMPT = """\
Reach the target by combining numbers. Each call of `combine` takes two of the numbers and puts their result in their \
place; a number is used up by it. Results are whole numbers from 0 to {max_number}; / needs a division without rest.
Reaching the target earns 1. You have {max_steps} calls."""


class CountdownEnv(Environment):
    """One set of numbers and one target that can be reached from them.

    Args:
        num_numbers: Numbers at the start, 2 to 8.
        largest: Largest number at the start, 5 to 100.
        max_steps: Turns after which the episode is truncated.

    Raises:
        ValueError: An option is out of its bounds.

    The episode ends when the target is among the numbers (reward 1), or one number is left that is not (reward 0).
    """

    version = "1"
    tools_schema = [
        tool(
            "combine",
            "Replace two of the numbers by the result of left operator right.",
            {
                "left": {"type": "integer"},
                "operator": {"type": "string", "enum": list(OPERATORS)},
                "right": {"type": "integer"},
            },
        ),
    ]

    def __init__(self, num_numbers: int = 3, largest: int = 20, max_steps: int = 8) -> None:
        for name, value, low, high in (
            ("num_numbers", num_numbers, 2, 8),
            ("largest", largest, 5, 100),
            ("max_steps", max_steps, 1, 1000),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value!r:.40}")
        self._num_numbers, self._largest, self._max_steps = num_numbers, largest, max_steps
        self.task_prompt = _PROMPT.format(max_number=MAX_NUMBER, max_steps=max_steps)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Draw numbers and a target."""
        if options:
            raise ValueError(f"options: this environment has none, got {sorted(options)!r:.40}")
        seed = secrets.randbits(31) if seed is None else seed
        self.numbers, self.target = make_puzzle(seed, self._num_numbers, self._largest)
        self._num_steps = 0
        return self._describe(), self._info()

    def step(self, action: Message) -> StepResult:
        """Combine; what cannot be combined is explained and costs a turn, as does a turn without a call."""
        calls = read_tool_calls(action)
        note = "" if calls else "Call `combine`.\n"
        for call in calls:
            note = self._combine(call.arguments["left"], call.arguments["operator"], call.arguments["right"])
        self._num_steps += 1
        terminated = self.target in self.numbers or len(self.numbers) == 1
        truncated = not terminated and self._num_steps >= self._max_steps
        reward = float(self.target in self.numbers)
        return note + self._describe(), reward, terminated, truncated, self._info()

    def _combine(self, left: int, operator: str, right: int) -> str:
        rest = list(self.numbers)
        for number in (left, right):
            if number not in rest:
                return f"{number} is not among the numbers that are left.\n"
            rest.remove(int(number))
        result = calculate(int(left), operator, int(right))
        if result is None:
            return f"{left} {operator} {right} is no whole number from 0 to {MAX_NUMBER}.\n"
        self.numbers = [*rest, result]
        return f"{left} {operator} {right} = {result}\n"

    def _describe(self) -> str:
        return f"Numbers: {' '.join(map(str, self.numbers))}\nTarget: {self.target}"

    def _info(self) -> dict[str, Any]:
        return {"success": self.target in self.numbers, "num_steps": self._num_steps}


def calculate(left: int, operator: str, right: int) -> int | None:
    """The result, or None when it is no whole number from 0 to `MAX_NUMBER`."""
    if operator == "/":
        result = left // right if right and left % right == 0 else -1
    else:
        result = left + right if operator == "+" else left - right if operator == "-" else left * right
    return result if 0 <= result <= MAX_NUMBER else None


def make_puzzle(seed: int, num_numbers: int, largest: int) -> tuple[list[int], int]:
    """Draw numbers, and combine all of them at random into a target that is not among them."""
    draw = make_draw(f"countdown/{num_numbers}/{largest}/{seed}")
    while True:
        numbers = [1 + draw(largest) for _ in range(num_numbers)]
        left = list(numbers)
        while len(left) > 1:
            first, second = pick(draw, range(len(left)), 2)
            result = calculate(left[first], OPERATORS[draw(4)], left[second])
            if result is not None:
                left = [number for index, number in enumerate(left) if index not in (first, second)] + [result]
        if left[0] not in numbers:
            return numbers, left[0]
