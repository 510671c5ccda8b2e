# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`env/*` metrics and validation columns: names and denominators."""

import numpy as np
import pytest

from recipe.agent_env.metrics import env_metrics, fill_success, validation_columns
from recipe.agent_env.rollout.batch import episode_columns
from recipe.agent_env.rollout.episode import EndReason
from tests.rollout.episodes import make_episode


def columns(*episodes, env_names=None):
    return {**episode_columns(episodes), "env_name": np.array(env_names or ["a"] * len(episodes), dtype=object)}


def test_turn_counts_of_one_two_and_five_turns():
    """P47."""
    metrics = env_metrics(columns(*[make_episode(num_turns=n) for n in (1, 2, 5)]))
    assert metrics["env/num_assistant_turns/mean"] == pytest.approx(8 / 3)
    assert metrics["env/num_assistant_turns/max"] == 5
    assert metrics["env/num_assistant_turns/min"] == 1


def test_return_is_the_sum_of_rewards_without_discount():
    """P31: rewards [1, 0, 2] are a return of 3."""
    metrics = env_metrics(columns(make_episode(rewards=[1.0, 0.0, 2.0])))
    assert metrics["env/episode_return/mean"] == 3.0


def test_tokenizing_share_is_over_all_seconds_of_played_episodes():
    """P16: a rollout that slows down by tokenising shows it."""
    fast, slow, failed = make_episode(), make_episode(), make_episode(end_reason=EndReason.FAILED)
    fast.stats.generate_s, fast.stats.env_s = 6.0, 3.0
    slow.stats.generate_s, slow.stats.tokenize_s = 9.0, 2.0
    failed.stats.tokenize_s = 100.0
    assert env_metrics(columns(fast, slow, failed))["env/tokenize_time_ratio"] == pytest.approx(0.1)


def test_failed_rows_count_as_failed_and_nowhere_else():
    """P81: 3 of 10 episodes failed."""
    episodes = [make_episode(rewards=[1.0])] * 7 + [make_episode(end_reason=EndReason.FAILED)] * 3
    metrics = env_metrics(columns(*episodes))
    assert metrics["env/failed_episode_ratio"] == pytest.approx(0.3)
    assert metrics["env/episode_return/mean"] == 1.0
    assert metrics["env/end_reason/terminated"] == pytest.approx(0.7)


def test_a_batch_of_failed_rows_is_visible_and_finite():
    """P27: every trajectory failed."""
    metrics = env_metrics(columns(make_episode(end_reason=EndReason.FAILED)))
    assert metrics["env/all_masked"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    assert "env/episode_return/mean" not in metrics


def test_truncation_flags_of_three_ends():
    """P28: a natural stop, a cut at the limit, a cut by the turn limit."""
    reasons = [EndReason.TERMINATED, EndReason.CONTEXT_FULL, EndReason.MAX_TURN]
    assert episode_columns([make_episode(end_reason=r) for r in reasons])["is_truncated"].tolist() == [
        False,
        True,
        True,
    ]


def test_success_has_exact_denominators():
    """One that speaks counts its silent episodes as unsolved; a mute one and masked episodes count nowhere."""
    filled = fill_success(["a", "a", "a", "b", "a"], [1.0, None, 0.0, None, 1.0], [True, True, True, True, False])
    assert filled.tolist() == [1.0, 0.0, 0.0, None, None]


def test_success_rate_per_environment():
    episodes = [make_episode(success=1.0), make_episode(success=0.0), make_episode(success=None)]
    metrics = env_metrics(columns(*episodes, env_names=["a", "a", "b"]))
    assert metrics["env/success_rate/a"] == metrics["env/success_rate"] == 0.5
    assert "env/success_rate/b" not in metrics


def test_validation_leaves_masked_episodes_out():
    counted = validation_columns(
        ["a", "a", "a"],
        {"reward": [1.0, 2.0, 0.0], "acc": [1.0, None, None], "end_reason": ["terminated", "max_turn", "failed"]},
    )
    assert counted["reward"] == [1.0, 2.0, None]
    assert counted["acc"] == [1.0, 0.0, None]
    assert counted["end_reason/failed"] == [0.0, 0.0, 1.0]
    assert "end_reason" not in counted
