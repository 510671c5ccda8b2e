# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Serve a Gymnasium environment: its observations become text through a function that the user gives.

Owns: the translation between a tool call and a Gymnasium action, and between the two step results.
Refuses to know: what the observations mean. Gymnasium itself is not imported: anything with its interface will do.

A module of the user's holds one line, whose name then goes to the command line (`my_pkg.lake:lake`):

    lake = serve_gymnasium(lambda **kwargs: gymnasium.make("FrozenLake-v1", **kwargs), to_text, actions=["left", ...])
"""

from collections.abc import Callable, Sequence
from typing import Any

from recipe.agent_env.env_service.environment import (
    Environment,
    Message,
    ResetResult,
    StepResult,
    read_tool_calls,
    tool,
)


class GymnasiumEnvironment(Environment):
    """One Gymnasium environment behind one tool, `act`.

    Args:
        env: The Gymnasium environment.
        to_text: Turns an observation into what the policy reads.
        actions: Names of the actions of a `Discrete` space, in its order; None: the policy gives the number.
        task_prompt: What the policy is told once.

    Raises:
        ValueError: The action space is not `Discrete`, or has another size than `actions`.

    A turn without a call steps nothing: reward 0 and a reminder.
    """

    def __init__(
        self, env: Any, to_text: Callable[[Any], str], actions: Sequence[str] | None = None, task_prompt: str = ""
    ) -> None:
        size = getattr(env.action_space, "n", None)
        if size is None:
            raise ValueError(f"expected a Discrete action space, got {env.action_space}; write a class of your own")
        start = int(getattr(env.action_space, "start", 0))
        self._values: dict[Any, int] = {start + index: start + index for index in range(int(size))}
        choice: dict[str, Any] = {"type": "integer", "minimum": start, "maximum": start + int(size) - 1}
        if actions is not None:
            if len(actions) != size:
                raise ValueError(f"actions: expected {size} names, got {len(actions)}")
            self._values = {name: start + index for index, name in enumerate(actions)}
            choice = {"type": "string", "enum": list(actions)}
        self._env = env
        self._to_text = to_text
        self.task_prompt = task_prompt
        self.tools_schema = [tool("act", "Take one action.", {"action": choice})]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Reset the environment; `options` go through."""
        observation, info = self._env.reset(seed=seed, options=options)
        return self._to_text(observation), info

    def step(self, action: Message) -> StepResult:
        """Take the action of the call."""
        calls = read_tool_calls(action)
        if not calls:
            return "Call the tool `act`.", 0.0, False, False, {}
        observation, reward, terminated, truncated, info = self._env.step(self._values[calls[0].arguments["action"]])
        return self._to_text(observation), reward, terminated, truncated, info

    def render(self) -> str | None:
        """What the environment renders, where that is text (`render_mode="ansi"`)."""
        picture = self._env.render() if getattr(self._env, "render_mode", None) == "ansi" else None
        return picture if isinstance(picture, str) else None

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def serve_gymnasium(
    make: Callable[..., Any],
    to_text: Callable[[Any], str],
    actions: Sequence[str] | None = None,
    task_prompt: str = "",
) -> Callable[..., GymnasiumEnvironment]:
    """A factory for the registry or the command line.

    Args:
        make: Called with a row's `env_kwargs`; returns a Gymnasium environment.
        to_text: Turns an observation into what the policy reads.
        actions: Names of the actions, see `GymnasiumEnvironment`.
        task_prompt: What the policy is told once.
    """

    def create(**env_kwargs: Any) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(make(**env_kwargs), to_text, actions, task_prompt)

    return create
