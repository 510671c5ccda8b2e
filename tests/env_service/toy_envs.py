# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Small environments that behave well or badly on demand.

Owns: environments for the service's tests. Refuses to know: the service.
"""

import asyncio
import os
import threading
import time
from typing import Any

from recipe.agent_env.env_service.environment import Environment, read_tool_calls, tool, tool_result

MISSING = object()


class EchoEnv(Environment):
    """Answers with what it was told; ends after `max_steps`."""

    version = "7"
    task_prompt = "Say something."
    tools_schema = [tool("say", "Say it.", {"text": {"type": "string"}}), tool("wait", "Do nothing.")]
    num_closed = 0

    def __init__(self, max_steps: int = 10_000, size: int = 0) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps: expected 1 or more, got {max_steps}")
        self.max_steps = max_steps
        self.size = size
        self.num_steps = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options and "refuse" in options:
            raise ValueError("refused: this option is not known")
        self.num_steps = 0
        return f"seed {seed} options {options}", {"seed": seed}

    def step(self, action: dict[str, Any]) -> Any:
        self.num_steps += 1
        calls = read_tool_calls(action)
        text = calls[0].arguments.get("text", "") if calls else action["content"]
        is_end = self.num_steps >= self.max_steps
        return f"{self.num_steps}: {text}" + "x" * self.size, float(self.num_steps), is_end, False, {}

    def render(self) -> str:
        return f"<b>{self.num_steps}</b>"

    def close(self) -> None:
        type(self).num_closed += 1


class PlainEnv:
    """Has nothing but the two methods."""

    def reset(self, seed, options):
        return "start", None

    def step(self, action):
        return "next", 1, False, False, None


class ParallelEnv(PlainEnv):
    """Takes several calls at once."""

    allow_parallel_tool_call = True
    tools_schema = [tool("a", "A."), tool("b", "B.")]

    def step(self, action):
        results = [tool_result(call, f"did {call.name}") for call in read_tool_calls(action)]
        return results, 0.5 * len(results), False, False, {}


class AsyncEnv:
    """Coroutines throughout."""

    num_closed = 0

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def reset(self, seed, options):
        await asyncio.sleep(0)
        return "start", {}

    async def step(self, action):
        await asyncio.sleep(self.delay_s)
        return "next", 0.25, False, True, {"thread": threading.current_thread().name}

    async def close(self):
        type(self).num_closed += 1


class SolvedEnv(PlainEnv):
    """Its start is already its end."""

    is_over = True


class RawEnv:
    """Returns from `reset` and `step` whatever it is set to."""

    def __init__(self, reset_result: Any = MISSING, step_result: Any = MISSING, **attributes: Any) -> None:
        self.reset_result = ("start", {}) if reset_result is MISSING else reset_result
        self.step_result = ("next", 0.0, False, False, {}) if step_result is MISSING else step_result
        for name, value in attributes.items():
            setattr(self, name, value)

    def reset(self, seed, options):
        return self.reset_result

    def step(self, action):
        return self.step_result


class FaultyEnv(PlainEnv):
    """Fails in the way its options say: a place (`init`, `reset`, `step`, `close`) and what happens there."""

    num_created = 0
    num_alive = 0

    def __init__(self, where: str = "", what: str = "raise", seconds: float = 0.0) -> None:
        self.where, self.what, self.seconds = where, what, seconds
        self._maybe("init")
        type(self).num_created += 1
        type(self).num_alive += 1

    def _maybe(self, place: str) -> None:
        if place != self.where:
            return
        if self.what == "raise":
            raise RuntimeError(f"broken in {place}\nTraceback (most recent call last): secret.py line 3")
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "sleep":
            time.sleep(self.seconds)
        if self.what == "die":
            os._exit(9)
        if self.what == "burn":
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                sum(range(1000))

    def reset(self, seed, options):
        self._maybe("reset")
        return "start", {}

    def step(self, action):
        self._maybe("step")
        return "next", 1.0, False, False, {"pid": os.getpid()}

    def close(self):
        type(self).num_alive -= 1
        self._maybe("close")
