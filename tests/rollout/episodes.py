# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Episodes made by hand for tests of what comes after playing."""

import numpy as np

from recipe.agent_env.rollout.episode import EndReason, Episode, EpisodeStats
from recipe.agent_env.rollout.ledger import TokenLedger


def make_episode(
    *,
    num_turns: int | None = None,
    rewards: list[float] | None = None,
    end_reason: EndReason = EndReason.TERMINATED,
    success: float | None = None,
    prompt_ids: list[int] | None = None,
    num_written: int = 2,
    first_id: int = 10,
) -> Episode:
    """An episode of two sampled tokens per turn, `num_written` tokens between turns, and the given rewards per turn."""
    if rewards is None:
        rewards = [0.0] * (1 if num_turns is None else num_turns)
    is_empty = end_reason in (EndReason.FAILED, EndReason.PROMPT_TOO_LONG)
    ledger = TokenLedger(prompt_ids or [1, 2, 3])
    engine_ids: list[int] = []
    for turn, reward in enumerate(rewards):
        if turn > 0:
            ledger.add_written([5] * num_written)
        ids = [first_id + 2 * turn, first_id + 2 * turn + 1]
        ledger.add_sampled(ids, [-0.25, -0.5])
        ledger.add_reward(reward)
        engine_ids += ids
    empty = np.zeros(0, dtype=np.int32)
    return Episode(
        prompt_ids=empty if is_empty else ledger.prompt(),
        response_ids=empty if is_empty else ledger.response(),
        response_mask=empty.astype(np.int8) if is_empty else ledger.response_mask(),
        log_probs=empty.astype(np.float32) if is_empty else ledger.log_probs(),
        rewards=empty.astype(np.float32) if is_empty else ledger.rewards(),
        engine_ids=empty if is_empty else np.asarray(engine_ids, dtype=np.int32),
        episode_return=0.0 if is_empty else float(sum(rewards)),
        end_reason=end_reason,
        success=success,
        num_assistant_turns=0 if is_empty else len(rewards),
        num_restarts=0,
        failure="made by hand" if end_reason is EndReason.FAILED else None,
        service=None,
        stats=EpisodeStats(num_env_steps=len(rewards)),
    )
