# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What reaches a gradient: verl's losses on batches with observations, padding and masked rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss

from recipe.agent_env.algorithms.mini_batches import spread_trained_rows, update_on_trained_rows
from tests.algorithms.batches import compute, make_batch
from tests.algorithms.updates import actor_loss, critic_loss, gradients

LOSS_MODES = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]
AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

MASKS = [[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 0]]
REWARDS = [[0, 1.0, 0, 0], [0, 0, 0, 0.25], [0, 0, 0, 0]]
VALUES = [[0.3, 0.1, 0.0, 0.2], [0.5, 0.0, 0.0, 0.1], [0.2, 0.4, 0.1, 0.0]]


def batch_with_failed_rows(num_failed: int, *, rewards=REWARDS, estimator: str = "rloo") -> DataProto:
    """Three trained rows after `num_failed` masked ones, with advantages."""
    batch = make_batch(
        [[0] * 4] * num_failed + MASKS,
        [[0.0] * 4] * num_failed + rewards,
        values=[[0.0] * 4] * num_failed + VALUES,
        uids="a" * (num_failed + 3),
    )
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"] - 0.25
    compute(batch, estimator, num_repeat=num_failed + 3)
    return batch


def on_trained(gradient: torch.Tensor) -> torch.Tensor:
    """The last three rows: the trained ones; the table's numbers are the same whatever comes before."""
    return gradient[-3:]


# Masked rows


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("loss", ["actor", "critic"])
def test_failed_row_changes_no_gradient(loss, agg_mode):
    """P20, P27: one failed row in the mini-batch, alone in its micro-batch."""
    make_loss = critic_loss if loss == "critic" else lambda **o: actor_loss(use_kl_loss=True, entropy_coeff=0.1, **o)
    ((expected,), _) = gradients(batch_with_failed_rows(0), make_loss(loss_agg_mode=agg_mode), mini_batch_size=3)
    ((got,), _) = gradients(batch_with_failed_rows(1), make_loss(loss_agg_mode=agg_mode), mini_batch_size=4)
    torch.testing.assert_close(on_trained(got), expected)
    assert not got[0].any()
    assert expected.any()


def test_verl_alone_divides_by_failed_rows_too():
    """seq-mean losses shrink with the number of failures; when this fails, `count_trained_rows` can go."""
    loss = actor_loss(loss_agg_mode="seq-mean-token-mean")
    ((expected,), _) = gradients(batch_with_failed_rows(0), loss, mini_batch_size=3, as_verl=True)
    ((got,), _) = gradients(batch_with_failed_rows(1), loss, mini_batch_size=4, as_verl=True)
    torch.testing.assert_close(on_trained(got), expected * 3 / 4)


def test_verl_alone_has_no_loss_of_a_masked_mini_batch():
    """NaN in the log, and an optimizer step on nothing; when this fails, `spread_trained_rows` can go."""
    _, metrics = gradients(batch_with_failed_rows(3), actor_loss(), mini_batch_size=3, as_verl=True)
    assert math.isnan(_number(metrics[0]["actor/pg_loss"]))


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_no_mini_batch_is_without_a_trained_row(mode):
    """P27: three failed rows would fill the first mini-batch of three."""
    all_gradients, metrics = gradients(batch_with_failed_rows(3), actor_loss(loss_mode=mode), mini_batch_size=3)
    assert len(all_gradients) == 2
    assert all(torch.isfinite(gradient).all() for gradient in all_gradients)
    assert all(math.isfinite(_number(m)) for micro_batch in metrics for m in micro_batch.values())
    assert not sum(all_gradients)[:3].any()


def test_batch_of_failed_rows_makes_no_update():
    batch = batch_with_failed_rows(3).select_idxs(np.arange(3))
    done = update_on_trained_rows(_never, batch, mini_batch_size=1, num_ranks=1)
    assert done.meta_info["metrics"] == {}


def test_batch_without_failed_rows_is_sent_as_it_is():
    batch = batch_with_failed_rows(0)
    assert update_on_trained_rows(lambda sent: sent, batch, mini_batch_size=3, num_ranks=1) is batch


@given(
    is_trained=st.lists(st.booleans(), min_size=24, max_size=24).filter(any),
    layout=st.sampled_from([(24, 1), (24, 4), (12, 2), (8, 4), (6, 1), (4, 4), (2, 1)]),
)
def test_trained_rows_are_spread_evenly(is_trained, layout):
    """P38: each trained row once, no row twice, mini-batches full, and at most one trained row more in one of them."""
    mini_batch_size, num_ranks = layout
    trained = np.array(is_trained)
    order = spread_trained_rows(trained, mini_batch_size=mini_batch_size, num_ranks=num_ranks)
    assert len(set(order)) == len(order)
    assert set(np.flatnonzero(trained)) <= set(order)
    assert len(order) % mini_batch_size == 0
    shares = order.reshape(num_ranks, -1, mini_batch_size // num_ranks)
    counts = trained[shares].sum(axis=(0, 2))
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1
    assert len(counts) == min(24 // mini_batch_size, trained.sum())
    for rank, share in enumerate(shares):  # rows stay on their rank
        assert set(share.flatten() * num_ranks // 24) <= {rank}


# Tokens that were not sampled


@pytest.mark.parametrize("noise", [0.0, 1.0, float("-inf"), float("nan")])
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_placeholders_of_observations_change_no_loss_and_no_ratio(mode, noise):
    """P14: whatever stands there as log-prob, value or reward before advantages are computed."""
    clean, noisy = batch_with_failed_rows(1), batch_with_failed_rows(1)
    off_mask = noisy.batch["response_mask"] == 0
    for key in ("old_log_probs", "ref_log_prob", "values", "token_level_rewards"):
        noisy.batch[key][off_mask] = noise
    compute(noisy, "rloo")
    loss = actor_loss(loss_mode=mode, use_kl_loss=True)
    expected, expected_metrics = gradients(clean, loss, mini_batch_size=4)
    got, metrics = gradients(noisy, loss, mini_batch_size=4)
    torch.testing.assert_close(got, expected)
    assert _numbers(metrics) == _numbers(expected_metrics)


def test_verl_alone_lets_a_placeholder_poison_the_gradient():
    """A mask over the loss does not stop NaN times 0 in its gradient."""
    batch = batch_with_failed_rows(0)
    batch.batch["old_log_probs"][batch.batch["response_mask"] == 0] = float("nan")
    ((gradient,), _) = gradients(batch, actor_loss(loss_mode="cispo"), mini_batch_size=3)
    assert torch.isnan(gradient).any()


@pytest.mark.parametrize("kl_loss_type", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_kl_loss_and_entropy_push_sampled_tokens_only(kl_loss_type):
    """P24: with all rewards equal nothing but KL and entropy pushes, and only where the policy acted."""
    batch = batch_with_failed_rows(1, rewards=[[0.0, 0.0, 0.0, 0.0]] * 3, estimator="grpo")
    assert not batch.batch["advantages"].any()
    loss = actor_loss(use_kl_loss=True, kl_loss_type=kl_loss_type, kl_loss_coef=0.5, entropy_coeff=0.1)
    ((gradient,), _) = gradients(batch, loss, mini_batch_size=4)
    is_sampled = batch.batch["response_mask"].bool()
    assert gradient[:, 2:][is_sampled].abs().min() > 0
    assert not gradient[:, 2:][~is_sampled].any()
    assert not gradient[:, :2].any()


def test_group_without_spread_is_not_pushed_by_rewards():
    batch = batch_with_failed_rows(0, rewards=[[0, 0, 0, 0.5], [0, 0, 0, 0.5], [0, 0, 0.5, 0]], estimator="grpo")
    ((gradient,), _) = gradients(batch, actor_loss(), mini_batch_size=3)
    assert not gradient.any()


# Groups and mini-batches


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3]])
def test_group_may_be_split_over_mini_batches(order):
    """P40: advantages are compared in the whole batch, before it is cut; verl balances rows over ranks by length."""
    batch = make_batch([[1]] * 4, [[1.0], [0.0], [3.0], [1.0]], uids="aabb")
    compute(batch, "rloo", num_repeat=2)
    batch.reorder(torch.tensor(order))
    parts, _ = gradients(batch, actor_loss(), mini_batch_size=2)
    assert torch.sign(-sum(parts)[:, 2])[torch.argsort(torch.tensor(order))].tolist() == [1, -1, 1, -1]


def _never(sent):
    raise AssertionError("nothing may be sent")


def _number(metric):
    return float(metric.aggregate()) if hasattr(metric, "aggregate") else float(metric)


def _numbers(metrics):
    return [{key: pytest.approx(_number(m)) for key, m in micro_batch.items()} for micro_batch in metrics]


LONG_AND_SHORT = [[1] + [0] * 18, [1, 0] * 9 + [1], [1] + [0] * 18]
"""One turn, ten turns, and one turn that earns nothing; a token each."""


def long_and_short() -> DataProto:
    rewards = [[1.0] + [0.0] * 18, [0.0] * 18 + [1.0], [0.0] * 19]
    return make_batch(LONG_AND_SHORT, rewards, uids="aaa")


@pytest.mark.parametrize(
    ("name", "advantage"),
    [("grpo", (1 - 2 / 3) / math.sqrt(1 / 3)), ("rloo", 1 - 1 / 2), ("opo", 1 - 11 / 12)],  # opo weighs by tokens
)
def test_group_counts_a_long_episode_once(name, advantage):
    """P32: ten turns are one row; its return enters the baseline once, and it is judged as the short one's."""
    advantages, _ = compute(long_and_short(), name, num_repeat=3)
    assert advantages[0, 0] == pytest.approx(advantage, rel=1e-4)
    assert advantages[1, 0] == advantages[1, 18] == pytest.approx(advantage, rel=1e-4)


@pytest.mark.parametrize(("mode", "share"), [("token-mean", 10 / 12), ("seq-mean-token-mean", 1 / 3)])
def test_weight_of_a_long_episode_in_the_loss_is_the_modes(mode, share):
    """P32: per token, or per row."""
    loss_mat = torch.ones(3, 19, requires_grad=True)
    agg_loss(loss_mat=loss_mat, loss_mask=torch.tensor(LONG_AND_SHORT), loss_agg_mode=mode).backward()
    assert loss_mat.grad is not None
    assert float(loss_mat.grad[1].sum() / loss_mat.grad.sum()) == pytest.approx(share)


def test_number_of_updates_depends_on_rows_and_not_on_turns():
    """P39: three episodes of 1, 4 and 6 turns in a batch of eight rows, two mini-batches on two ranks."""
    masks = [[1, 0] * num_turns + [0] * (12 - 2 * num_turns) for num_turns in (1, 4, 6)] + [[0] * 12] * 5
    is_trained = torch.tensor(masks).bool().any(dim=-1).numpy()
    order = spread_trained_rows(is_trained, mini_batch_size=4, num_ranks=2)
    assert sorted(order.tolist()) == list(range(8)), "what fills up is a masked row of its own, no copy"
