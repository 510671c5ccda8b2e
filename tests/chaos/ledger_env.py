# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An environment that writes down what really happened to it, beside and before anything it answers.

Owns the game and the ledger file that the variable `CHAOS_LEDGER` names. Refuses to know: services, faults, clients.
Every observation names its environment by a key of its own, so that a row tells which one it was played on.
"""

import json
import os
import random
import secrets
from typing import Any

from recipe.agent_env.env_service.environment import Environment, read_tool_calls, tool

LEDGER_VARIABLE = "CHAOS_LEDGER"
DIRECTIONS = ("north", "east", "south", "west")


class LedgerEnv(Environment):
    """A walk of two to five moves; each pays a random reward. Every fifth seed is cut after its third move."""

    task_prompt = "Walk until you are told that you have arrived."
    tools_schema = [tool("walk", "Walk one room.", {"direction": {"type": "string", "enum": list(DIRECTIONS)}})]

    def __init__(self) -> None:
        self._ledger = os.open(os.environ[LEDGER_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._key = secrets.token_hex(6)
        self._num_moves = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start; the seed decides length and rewards."""
        assert seed is not None
        self._seed = seed
        self._rng = random.Random(seed)
        observation = f"Room {self._key}-0."
        self._write("start", observation=observation)
        return observation, {}

    def step(self, action: dict[str, Any]) -> Any:
        """Apply one action, whatever it is, and write it down before it is answered."""
        calls = read_tool_calls(action)
        move = calls[0].arguments["direction"] if calls else "nothing"
        self._num_moves += 1
        reward = round(self._rng.uniform(-1.0, 1.0), 4)
        terminated = self._num_moves >= 2 + self._seed % 4
        truncated = not terminated and self._seed % 5 == 0 and self._num_moves == 3
        observation = f"Room {self._key}-{self._num_moves}: {move}, code {self._rng.randrange(10**6)}."
        self._write(
            "step", move=move, reward=reward, terminated=terminated, truncated=truncated, observation=observation
        )
        return observation, reward, terminated, truncated, {"success": terminated}

    def close(self) -> None:
        """The last line of this environment."""
        self._write("close")
        os.close(self._ledger)

    def _write(self, event: str, **fields: Any) -> None:
        """One line, in one write, since several environments and processes share the file."""
        line = {"key": self._key, "event": event, **fields}
        os.write(self._ledger, json.dumps(line).encode() + b"\n")
