# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The wrappers around verl's functions, and for each what verl does without it.

A test named `test_verl_alone_...` that fails says that verl mended the defect: the wrapper can then go.
"""

import math

import numpy as np
import pytest
import torch
import verl
from verl.trainer.ppo import ray_trainer, rollout_corr_helper
from verl.trainer.ppo.core_algos import AdaptiveKLController, get_adv_estimator_fn
from verl.utils.debug.metrics import calculate_debug_metrics

from recipe.agent_env import verl_patches
from recipe.agent_env.rollout.batch import assemble
from recipe.agent_env.rollout.episode import EndReason
from recipe.agent_env.verl_patches import apply_verl_patches
from tests.algorithms.batches import CONFIG, compute, make_batch
from tests.rollout.episodes import make_episode
from tests.test_config_on_cpu import composed


@pytest.fixture(autouse=True)
def patched():
    apply_verl_patches()


def alone(module, name):
    """verl's own function."""
    return getattr(module, name).__wrapped__


def advantages_alone(batch, name):
    done = alone(ray_trainer, "compute_advantage")(
        batch, adv_estimator=name, gamma=0.9, lam=0.8, num_repeat=2, config=CONFIG
    )
    return done.batch["advantages"]


def test_other_versions_of_verl_are_refused(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(RuntimeError, match=r"found 0\.10\.0.*REQUIRED_VERL"):
        apply_verl_patches()


def test_functions_are_wrapped_once():
    before = [getattr(module, name) for module, name, _ in verl_patches._WRAPPERS]
    apply_verl_patches()
    assert before == [getattr(module, name) for module, name, _ in verl_patches._WRAPPERS]
    assert all(not hasattr(function.__wrapped__, "__wrapped_by_agent_env__") for function in before)


# compute_advantage


def test_verl_alone_lets_a_value_that_was_never_sampled_poison_its_row():
    batch = make_batch([[1, 0, 1]], [[0, 0, 1.0]], values=[[0.1, float("nan"), 0.2]])
    assert torch.isnan(advantages_alone(batch, "gae")[0, 0])


def test_verl_alone_raises_on_a_batch_without_sampled_tokens():
    with pytest.raises(ValueError, match="At least one element"):
        advantages_alone(make_batch([[0, 0]], [[0, 0]]), "gae")


def test_verl_alone_gives_a_lone_survivor_its_raw_score():
    batch = make_batch([[1, 1]], [[0, 5.0]])
    assert advantages_alone(batch, "grpo")[0, 1] == pytest.approx(5.0, abs=1e-4)


def test_verl_alone_counts_a_failed_row_in_the_baseline():
    batch = make_batch([[1], [1], [0]], [[1.0], [1.0], [0.0]], uids="aaa")
    assert advantages_alone(batch, "grpo")[0, 0] > 0.5


def test_verl_alone_compares_what_is_left_of_an_episode_with_the_whole_greedy_one():
    batch = make_batch([[1, 0, 1]], [[1.0, 0, 0]])
    batch.batch["reward_baselines"] = torch.tensor([1.0])
    assert advantages_alone(batch, "remax")[0].tolist() == [0.0, 0.0, -1.0]


def test_optimal_token_baseline_is_refused_because_observations_shift_it():
    """The same sampled tokens, once with an observation between the turns of the first row."""
    rows = {"together": ([[1, 1, 0], [1, 1, 0]], [[0, 2.0, 0], [0, 1.0, 0]])}
    rows["apart"] = ([[1, 0, 1], [1, 1, 0]], [[0, 0, 2.0], [0, 1.0, 0]])
    last_tokens = []
    for masks, rewards in rows.values():
        batch = make_batch(masks, rewards, uids="aa")
        batch.batch["sum_pi_squared"] = torch.full(batch.batch["response_mask"].shape, 0.5)
        batch.batch["old_log_probs"] *= batch.batch["response_mask"]
        estimate = get_adv_estimator_fn("optimal_token_baseline")
        advantages, _ = estimate(
            token_level_rewards=batch.batch["token_level_rewards"],
            response_mask=batch.batch["response_mask"],
            index=batch.non_tensor_batch["uid"],
            old_log_probs=batch.batch["old_log_probs"],
            sum_pi_squared=batch.batch["sum_pi_squared"],
        )
        last_tokens.append(float(advantages[0].flip(0)[batch.batch["response_mask"][0].flip(0).bool()][0]))
    assert last_tokens[0] != pytest.approx(last_tokens[1])


@pytest.mark.parametrize(("is_bootstrapped", "last_return"), [(True, 1.0 + 0.9 * 4.0), (False, 1.0)])
@pytest.mark.parametrize("name", ["gae", "turn_gae", "bilevel_gae"])
def test_truncated_row_is_bootstrapped_from_its_last_state(name, is_bootstrapped, last_return):
    """P29: two turns, then the last observation (7, 7) and the placeholder, whose value is that of the last state."""
    batch = make_batch(
        [[1, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0]],
        [[0, 0, 1.0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0, 0]],
        values=[[0.1, 9, 0.2, 9, 9, 4.0, 9], [0.1, 9, 0.2, 9, 9, 9, 9]],
        is_bootstrapped=[is_bootstrapped, False],
    )
    batch.batch["attention_mask"][:, 2:] = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
    _, returns = compute(batch, name, num_repeat=1)
    assert returns[0, 2] == pytest.approx(last_return)
    assert returns[1, 2] == pytest.approx(1.0)
    assert torch.equal(batch.batch["token_level_scores"], batch.batch["token_level_rewards"])  # a return, not a score


# apply_kl_penalty


def kl_batch():
    batch = make_batch([[1, 0, 1], [0, 0, 0]], [[0, 0, 1.0], [0, 0, 0]])
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"] - 0.5
    return batch


def test_verl_alone_lets_a_failed_row_halve_the_mean_kl():
    _, metrics = alone(ray_trainer, "apply_kl_penalty")(kl_batch(), AdaptiveKLController(0.1, 6.0, 100))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)


def test_kl_in_the_reward_sees_sampled_tokens_of_trained_rows_only():
    batch = kl_batch()
    off_mask = batch.batch["response_mask"] == 0
    batch.batch["old_log_probs"][off_mask] = float("nan")
    batch.batch["ref_log_prob"][off_mask] = float("-inf")
    batch, metrics = ray_trainer.apply_kl_penalty(batch, AdaptiveKLController(0.1, 6.0, 100))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert batch.batch["token_level_rewards"].tolist() == [pytest.approx([-0.05, 0.0, 0.95]), [0.0, 0.0, 0.0]]


def test_kl_controller_is_not_moved_by_a_batch_without_trained_rows():
    controller = AdaptiveKLController(0.1, 6.0, 100)
    batch = kl_batch()
    batch.batch["response_mask"][:] = 0
    _, metrics = ray_trainer.apply_kl_penalty(batch, controller)
    assert (controller.value, metrics) == (0.1, {})


# agg_loss: the trainer's mean entropy


def test_verl_alone_has_no_mean_entropy_of_no_tokens():
    assert torch.isnan(alone(ray_trainer, "agg_loss")(torch.ones(1, 2), torch.zeros(1, 2), "token-mean"))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_mean_entropy_sees_sampled_tokens_only(mode):
    entropy = torch.tensor([[2.0, float("nan"), 2.0], [float("nan")] * 3])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    mean = ray_trainer.agg_loss(loss_mat=entropy, loss_mask=mask, loss_agg_mode=mode, loss_scale_factor=None)
    assert mean == pytest.approx(4.0 if mode == "seq-mean-token-sum" else 2.0)
    assert ray_trainer.agg_loss(loss_mat=entropy, loss_mask=torch.zeros(2, 3), loss_agg_mode=mode) == 0


# compute_rollout_correction_and_add_to_batch


CORRECTION = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5}


def correction_batch():
    batch = make_batch([[1, 0, 1], [1, 0, 1], [0, 0, 0]], [[0, 0, 1.0], [0, 0, 0.0], [0, 0, 0]], uids="aaa")
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"][0, 2] = -9.0  # the trainer finds this token far likelier: rejected
    return batch


def test_verl_alone_counts_masked_rows_as_agreeing():
    correct = alone(rollout_corr_helper, "compute_rollout_correction_and_add_to_batch")
    _, metrics = correct(correction_batch(), CORRECTION)
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(2 / 3)  # true: 1, all log-probs are -1


def test_verl_alone_raises_on_a_batch_without_sampled_tokens_in_rollout_correction():
    batch = correction_batch()
    batch.batch["response_mask"][:] = 0
    with pytest.raises(ValueError, match="at least one valid token"):
        alone(rollout_corr_helper, "compute_rollout_correction_and_add_to_batch")(batch, CORRECTION)


def test_rollout_correction_sees_sampled_tokens_of_trained_rows_only():
    batch = correction_batch()
    off_mask = batch.batch["response_mask"] == 0
    batch.batch["old_log_probs"][off_mask] = float("nan")
    batch.batch["rollout_log_probs"][off_mask] = 0.0
    batch, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, CORRECTION)
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert batch.batch["response_mask"].tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert torch.isfinite(batch.batch["rollout_is_weights"]).all()


def test_batch_without_trained_rows_passes_rollout_correction():
    batch = correction_batch()
    batch.batch["response_mask"][:] = 0
    assert rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, CORRECTION) == (batch, {})


def test_default_measures_the_mismatch_and_corrects_nothing():
    """What the config says without any override: `rollout_corr/*` each step, weights and mask as they were."""
    batch = correction_batch()
    mask = batch.batch["response_mask"].clone()
    default = composed().algorithm.rollout_correction
    batch, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, default)
    assert metrics["rollout_corr/kl"] == pytest.approx((-9.0 - -1.0) / 4)  # over four sampled tokens
    assert torch.equal(batch.batch["response_mask"], mask)
    assert "rollout_is_weights" not in batch.batch.keys()


def test_difference_between_engine_and_trainer_is_taken_over_sampled_tokens():
    """verl's own, called by `fit` each step; NaN between the turns and a masked row do not reach it."""
    batch = correction_batch()
    off_mask = batch.batch["response_mask"] == 0
    batch.batch["old_log_probs"][off_mask] = float("nan")
    metrics = calculate_debug_metrics(batch)
    gap = math.exp(-1.0) - math.exp(-9.0)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(gap)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(gap / 4)


@pytest.mark.parametrize("name", ["grpo", "gae", "turn_grpo"])
def test_rejected_token_leaves_the_loss_and_its_reward_still_counts(name):
    """The reward of the first row sits on the very token that is rejected."""
    corrected, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(correction_batch(), CORRECTION)
    got, _ = compute(corrected, name, num_repeat=3)
    expected, _ = compute(correction_batch(), name, num_repeat=3)
    expected[0, 2] = 0.0
    np.testing.assert_array_equal(got, expected)
    assert "sampled_mask" not in corrected.batch.keys()


# compute_data_metrics


def played_batch(*episodes):
    columns = {name: np.array(["a"] * len(episodes), dtype=object) for name in ("env_name", "uid")}
    batch = assemble(episodes, pad_token_id=0, passed_on=columns)
    scores = batch.batch["rm_scores"]
    for name in ("token_level_scores", "token_level_rewards", "advantages", "returns", "values"):
        batch.batch[name] = scores.clone()
    return batch


def test_verl_alone_counts_a_failed_row_as_score_zero():
    batch = played_batch(make_episode(rewards=[1.0]), make_episode(end_reason=EndReason.FAILED))
    assert alone(ray_trainer, "compute_data_metrics")(batch)["critic/score/mean"] == 0.5


def test_means_are_over_unmasked_rows():
    """P20, P31: the score is the sum of the turns' rewards."""
    batch = played_batch(make_episode(rewards=[1.0, 0.0, 2.0]), make_episode(end_reason=EndReason.FAILED))
    metrics = ray_trainer.compute_data_metrics(batch=batch, use_critic=True)
    assert metrics["critic/score/mean"] == metrics["critic/score/min"] == 3.0
    assert metrics["prompt_length/min"] == 3.0
    assert metrics["env/failed_episode_ratio"] == 0.5
    assert metrics["env/group_without_spread_ratio"] == 1.0  # a lone survivor has nothing to be compared with


def test_batch_of_failed_rows_has_finite_metrics_and_says_so():
    """P27."""
    batch = played_batch(make_episode(end_reason=EndReason.FAILED), make_episode(end_reason=EndReason.FAILED))
    metrics = ray_trainer.compute_data_metrics(batch=batch, use_critic=True)
    assert metrics["env/all_masked"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_batch_that_rollout_correction_rejected_whole_says_so():
    batch = played_batch(make_episode(rewards=[1.0]), make_episode(rewards=[0.0]))
    batch.batch["response_mask"][:] = 0
    assert ray_trainer.compute_data_metrics(batch=batch, use_critic=False)["env/all_masked"] == 1.0


@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_row_without_any_reply_is_masked_and_harmless(name):
    """P37: `initialize` said done; P18 (d): the engine gave no token."""
    import dataclasses

    never_asked = dataclasses.replace(
        make_episode(end_reason=EndReason.FAILED), end_reason=EndReason.TERMINATED, failure=None
    )
    batch = played_batch(make_episode(rewards=[1.0]), make_episode(rewards=[0.0]), never_asked)
    assert batch.non_tensor_batch["is_masked"].tolist() == [False, False, True]
    advantages, _ = compute(batch, name, num_repeat=3)
    assert not advantages[2].any()
    assert np.isfinite(advantages).all()
    assert ray_trainer.compute_data_metrics(batch=batch)["env/masked_episode_ratio"] == pytest.approx(1 / 3)
