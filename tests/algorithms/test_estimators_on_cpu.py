# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Every estimator on random rows of several turns, against an independent float64 reference.

gamma = 0.9 and lambda = 0.8: with 1 and 1 most mistakes cancel out.
"""

import numpy as np
import pytest
import torch

from recipe.agent_env.algorithms.catalog import ESTIMATORS
from tests.algorithms.batches import GAMMA, LAM, STEP_WEIGHT, TOKEN_LAM, compute, make_batch, random_batch
from tests.algorithms.reference import REFERENCES, episodes_of

ALLOWED = sorted(name for name, traits in ESTIMATORS.items() if traits.refusal is None)


def reference(batch, name):
    """Advantages and returns of the reference, and where they count; float64, shape (B, R)."""
    tables = REFERENCES[name](episodes_of(batch), gamma=GAMMA, lam=LAM, token_lam=TOKEN_LAM, step_weight=STEP_WEIGHT)
    arrays = [np.zeros(batch.batch["response_mask"].shape) for _ in tables]
    for array, table in zip(arrays, tables, strict=True):
        for place, number in table.items():
            array[place] = number
    return arrays


def test_every_allowed_estimator_has_a_reference():
    assert set(ALLOWED) == set(REFERENCES)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ALLOWED)
def test_equals_the_reference_on_random_turns(name, seed):
    """P19, P20: observation spans of any length, and a masked row in the first group."""
    batch = random_batch(seed)
    expected_advantages, expected_returns = reference(batch, name)
    advantages, returns = compute(batch, name)
    np.testing.assert_allclose(advantages, expected_advantages, atol=2e-5)
    np.testing.assert_allclose(returns, expected_returns, atol=2e-5)


@pytest.mark.parametrize("noise", [1000.0, float("nan"), float("-inf")], ids=["1000", "nan", "-inf"])
@pytest.mark.parametrize("name", ALLOWED)
def test_is_deaf_to_what_stands_at_tokens_that_were_not_sampled(name, noise):
    """P14, P19: values, rewards and log-probs of observations, padding and masked rows."""
    clean, noisy = random_batch(0), random_batch(0)
    off_mask = noisy.batch["response_mask"] == 0
    for key in ("values", "token_level_rewards", "old_log_probs", "sum_pi_squared"):
        noisy.batch[key][off_mask] = noise
    for got, expected in zip(compute(noisy, name), compute(clean, name), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_workers_are_sent_is_finite_everywhere(name):
    """NaN times 0 is NaN in a gradient, so a mask in the worker's loss does not help."""
    batch = random_batch(0)
    off_mask = batch.batch["response_mask"] == 0
    for key in ("values", "token_level_rewards", "old_log_probs", "sum_pi_squared"):
        batch.batch[key][off_mask] = float("nan")
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    compute(batch, name)
    for key in ("advantages", "returns", "values", "old_log_probs", "ref_log_prob", "rollout_log_probs"):
        assert torch.isfinite(batch.batch[key]).all(), key


@pytest.mark.parametrize("name", ALLOWED)
def test_row_order_and_padding_change_nothing(name):
    """Rows are balanced over ranks before advantages are computed, and padded to the longest of the batch."""
    batch, shuffled = random_batch(3), random_batch(3)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    shuffled.reorder(order)
    for key, tensor in shuffled.batch.items():
        if key not in ("prompts", "reward_baselines"):
            shuffled.batch[key] = torch.nn.functional.pad(tensor, (0, 3))
    for got, expected in zip(compute(shuffled, name), compute(batch, name), strict=True):
        np.testing.assert_allclose(got[:, :-3], expected[order.numpy()], atol=1e-5)
        assert not got[:, -3:].any()


GROUPED = sorted(name for name in ALLOWED if ESTIMATORS[name].is_grouped)


@pytest.mark.parametrize("name", GROUPED)
def test_failed_row_leaves_the_group_as_if_it_had_not_been_played(name):
    """P20: rewards [1, 0, 0] and one failed row."""
    masks, rewards = [[1, 1]] * 3, [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    three = make_batch(masks, rewards, uids="aaa")
    four = make_batch([*masks, [0, 0]], [*rewards, [0.0, 0.0]], uids="aaaa")
    for batch in (three, four):
        batch.batch["sum_pi_squared"] = torch.full(batch.batch["response_mask"].shape, 0.5)
    expected, _ = compute(three, name, num_repeat=4)
    got, _ = compute(four, name, num_repeat=4)
    np.testing.assert_array_equal(got[:3], expected)
    assert expected[0, 0] > 0
    assert not got[3].any()


@pytest.mark.parametrize("name", GROUPED)
def test_lone_survivor_of_a_group_gets_nothing(name):
    masks = [[1, 1], [0, 0], [1, 1], [1, 1]]
    batch = make_batch(masks, [[0.0, 5.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], uids="aabb")
    batch.batch["sum_pi_squared"] = torch.full((4, 2), 0.5)
    without = make_batch(masks[2:], [[0.0, 1.0], [0.0, 0.0]], uids="bb")
    without.batch["sum_pi_squared"] = torch.full((2, 2), 0.5)
    got, returns = compute(batch, name, num_repeat=2)
    expected, _ = compute(without, name, num_repeat=2)
    assert not got[:2].any()
    assert name == "gae" or not returns[1].any()
    np.testing.assert_array_equal(got[2:], expected)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("masks", [[[0, 0], [0, 0]], [[0, 1], [0, 0]]], ids=["none", "one"])
def test_fewer_than_two_sampled_tokens_give_zero_and_do_not_raise(name, masks):
    """P27: verl's whitening raises on these."""
    batch = make_batch(masks, [[0.0, 1.0], [0.0, 0.0]], uids="aa")
    batch.batch["sum_pi_squared"] = torch.full((2, 2), 0.5)
    batch.batch["reward_baselines"] = torch.zeros(2)
    advantages, returns = compute(batch, name, num_repeat=2)
    assert not advantages.any()
    assert np.isfinite(returns).all()


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize(
    ("rewards", "uids"),
    [([1, 1, 1, 0.999999], "aaaa"), ([1, 0.999999], "aa"), ([0.1, 0.1, 0.1, 0.1], "aaaa"), ([1e-8, 0, 0, 0], "aaaa")],
    ids=["one lower", "two", "equal", "tiny"],
)
def test_near_equal_rewards_do_not_blow_up(name, rewards, uids):
    """P21: within a group of n no advantage is beyond (n - 1) / sqrt(n) spreads, whitened or not."""
    batch = make_batch([[1, 1]] * len(uids), [[0.0, r] for r in rewards], uids=uids)
    batch.batch["sum_pi_squared"] = torch.full((len(uids), 2), 0.5)
    batch.batch["reward_baselines"] = torch.full((len(uids),), 1.0)
    advantages, _ = compute(batch, name, num_repeat=len(uids))
    assert np.abs(advantages).max() <= 3.0


@pytest.mark.parametrize("name", GROUPED)
def test_group_without_spread_has_advantage_zero(name):
    """P24: such a group is not pushed by rewards."""
    batch = make_batch([[1, 1]] * 4, [[0.0, 0.3]] * 4, uids="aaaa")
    batch.batch["sum_pi_squared"] = torch.full((4, 2), 0.5)
    advantages, _ = compute(batch, name)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-4)


def test_bilevel_with_turns_of_one_token_is_turn_level():
    masks, rewards = [[1, 0, 1], [1, 0, 0]], [[0.5, 0.0, 1.0], [2.0, 0.0, 0.0]]
    values = [[0.3, 9.0, 0.1], [0.2, 9.0, 9.0]]
    expected = compute(make_batch(masks, rewards, values=values), "turn_gae")
    got = compute(make_batch(masks, rewards, values=values), "bilevel_gae")
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_turn_gae_does_not_discount_long_replies_more():
    """Token-level GAE with gamma < 1 pays a reply less for each token it is longer; turn-level does not."""
    long, short = make_batch([[1, 1, 1, 0, 1]], [[0, 0, 0, 0, 1.0]]), make_batch([[1, 0, 1]], [[0, 0, 1.0]])
    assert compute(long, "turn_gae")[1][0, 0] == compute(short, "turn_gae")[1][0, 0] == pytest.approx(0.9 * 0.8)


def test_gigpo_compares_turns_with_equal_observation_at_any_turn_number():
    """Row 0 sees observation 7 at its second turn, row 1 at its third."""
    masks = [[1, 0, 1, 0, 0], [1, 0, 1, 0, 1]]
    responses = [[10, 7, 11, 0, 0], [10, 8, 12, 7, 13]]
    batch = make_batch(masks, [[0, 0, 1.0, 0, 0], [0, 0, 0, 0, 0.0]], uids="aa", responses=responses)
    with_steps, _ = compute(batch, "gigpo", num_repeat=2, gigpo_step_weight=1.0)
    without, _ = compute(batch, "gigpo", num_repeat=2, gigpo_step_weight=0.0)
    step = with_steps - without
    assert step[0, 2] == pytest.approx(-step[1, 4])
    assert step[0, 2] > 0
    assert step[1, 2] == 0.0  # nobody else answered observation 8


def test_remax_baseline_counts_the_whole_greedy_episode():
    """P30: all reward at turn 1; verl's own sets the reward that is left at turn 2, 0, against the whole baseline."""
    batch = make_batch([[1, 0, 1]], [[1.0, 0.0, 0.0]])
    batch.batch["reward_baselines"] = torch.tensor([1.0])
    advantages, _ = compute(batch, "remax", num_repeat=1)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]


def test_remax_row_whose_greedy_episode_failed_is_not_compared_with_zero():
    batch = make_batch([[1, 1], [1, 1]], [[0.0, 1.0], [0.0, 1.0]])
    batch.batch["reward_baselines"] = torch.tensor([float("nan"), 0.25])
    advantages, returns = compute(batch, "remax", num_repeat=1)
    assert advantages.tolist() == [[0.0, 0.0], [0.75, 0.75]]
    assert np.isfinite(returns).all()
