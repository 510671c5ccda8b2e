# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantage estimators by name: what each needs from a run, and why some are refused.

Owns the verdict on each estimator of verl 0.9.1 for rows of several turns, and the names of this recipe's own. Imports
nothing heavy, because the config is checked with it before verl, torch or Ray are imported. What each estimator
computes is worked out in docs/algorithms.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraits:
    """What an estimator needs, and whether it may be used."""

    is_grouped: bool = False
    """The baseline comes from the other rollouts of the same row."""
    min_rollouts: int = 1
    """Least `actor_rollout_ref.rollout.n`."""
    needs_critic: bool = False
    """It reads the critic's values."""
    is_turn_level: bool = False
    """It is this recipe's own and is given the turn structure of a row."""
    needs_sum_pi_squared: bool = False
    """It reads the actor's sum of squared probabilities."""
    refusal: str | None = None
    """Why it cannot be right on rows of several turns, with what to take instead; None where it is."""


ESTIMATORS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(needs_critic=True),
    "reinforce_plus_plus": EstimatorTraits(),
    "remax": EstimatorTraits(),
    "grpo": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "grpo_vectorized": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "grpo_passk": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "rloo": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "rloo_vectorized": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "opo": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "reinforce_plus_plus_baseline": EstimatorTraits(is_grouped=True, min_rollouts=2),
    "gpg": EstimatorTraits(is_grouped=True),
    "tir_optimal_token_baseline": EstimatorTraits(is_grouped=True, min_rollouts=2, needs_sum_pi_squared=True),
    "optimal_token_baseline": EstimatorTraits(
        refusal="it compares rollouts at equal positions of the padded row and counts its tail in sampled tokens, so "
        "observations between turns shift both; take tir_optimal_token_baseline, which compares the n-th sampled tokens"
    ),
    "gdpo": EstimatorTraits(
        refusal="it normalises named reward components one by one, and an environment service pays one number per "
        "turn; take grpo"
    ),
    "turn_gae": EstimatorTraits(needs_critic=True, is_turn_level=True),
    "bilevel_gae": EstimatorTraits(needs_critic=True, is_turn_level=True),
    "turn_grpo": EstimatorTraits(is_grouped=True, min_rollouts=2, is_turn_level=True),
    "gigpo": EstimatorTraits(is_grouped=True, min_rollouts=2, is_turn_level=True),
}
"""Estimators by the name that `algorithm.adv_estimator` takes."""

_UNKNOWN = EstimatorTraits()


def estimator_traits(name: str) -> EstimatorTraits:
    """Traits of an estimator; of one that a user registered nothing is known, so it is taken as it is."""
    return ESTIMATORS.get(name, _UNKNOWN)


def compares_rollouts(name: str, num_rollouts: int) -> bool:
    """Whether an estimator compares episodes of one row with each other, which makes sense from one start only.

    Args:
        name: Of the estimator.
        num_rollouts: `actor_rollout_ref.rollout.n`.
    """
    if name == "remax":  # with the greedy episode
        return True
    return num_rollouts > 1 and (name not in ESTIMATORS or ESTIMATORS[name].is_grouped)
