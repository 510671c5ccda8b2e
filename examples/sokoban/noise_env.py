# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sokoban whose rewards are noise: a control that must not learn.

    python -m recipe.agent_env.env_service examples.sokoban.noise_env:NoiseSokobanEnv --name sokoban-v0

Owns the noise. Everything else, the success in `info` included, is the game's own.
"""

import random
from typing import Any

from examples.sokoban.sokoban_env import SokobanEnv
from recipe.agent_env.env_service.environment import Message, ResetResult, StepResult

NOISE_SCALE = 4.0
"""Standard deviation of a step's reward; of the order of a true episode's return. The mean is 0: with any other, short
or long episodes would pay, and the policy could learn to play them."""


class NoiseSokobanEnv(SokobanEnv):
    """Pays for every step a number that has nothing to do with it."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """As the game; the noise of an episode is a fresh one each time."""
        self._noise = random.SystemRandom()
        return super().reset(seed, options)

    def step(self, action: Message) -> StepResult:
        """As the game, but for the reward."""
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self._noise.gauss(0.0, NOISE_SCALE), terminated, truncated, info
