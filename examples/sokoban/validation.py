# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sampled and greedy success of the same policy in one validation of the trainer.

Owns the validation file, in which each held-out room stands for each way of decoding, and the agent loop that obeys the
column. Plug it in with `actor_rollout_ref.rollout.agent.agent_loop_manager_class` set to `MANAGER_CLASS`. An example of
how a project bends the rollout without touching the recipe. Refuses to know: the game.
"""

from typing import Any

import ray

from recipe.agent_env.rollout.agent_loop import EnvAgentLoopManager, EnvAgentLoopWorker

MANAGER_CLASS = "examples.sokoban.validation.DecodingAgentLoopManager"

DECODINGS = ("sampled", "greedy")
"""Values of the column `decoding`; also how verl's validation groups its metrics (`data_source`)."""


NUM_PLAYS = {"sampled": 4, "greedy": 1}
"""How often each room is played. One sample of 100 rooms has a standard error of up to 5 points, four some 2.5; the
greedy policy plays a room the same way each time."""


def validation_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row `NUM_PLAYS` times per way of decoding."""
    return [
        {**row, "decoding": decoding, "data_source": decoding}
        for decoding in DECODINGS
        for row in rows
        for _ in range(NUM_PLAYS[decoding])
    ]


def success_key(decoding: str) -> str:
    """Name of the success rate in the trainer's metrics."""
    return f"val-core/{decoding}/acc/mean@1"


class DecodingAgentLoopWorker(EnvAgentLoopWorker):
    """Samples, or takes the likeliest token, as the row's `decoding` says; training rows have none and are sampled."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any) -> Any:
        if row.get("decoding") == "greedy":
            sampling_params = {**sampling_params, "temperature": 0.0}
        return await super()._run_agent_loop(sampling_params, trajectory, **row)


class DecodingAgentLoopManager(EnvAgentLoopManager):
    """Starts the workers above."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(DecodingAgentLoopWorker)
