# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Batch assembly: padding, masked rows, columns, and the invariants that must catch a wrong batch."""

import dataclasses

import numpy as np
import pytest
import torch

from recipe.agent_env.rollout.batch import LedgerMismatchError, assemble, check_batch, object_array
from recipe.agent_env.rollout.episode import EndReason
from tests.rollout.episodes import make_episode

PAD = 0


def test_rows_are_padded_to_the_longest_and_keep_their_tokens():
    short, long = make_episode(prompt_ids=[7], num_turns=1), make_episode(prompt_ids=[1, 2, 3], num_turns=3)
    batch = assemble([short, long], pad_token_id=PAD, passed_on={}).batch
    assert batch["prompts"].tolist() == [[PAD, PAD, 7], [1, 2, 3]]
    assert batch["responses"].shape[1] == len(long.response_ids)
    assert batch["responses"][0].tolist()[: len(short.response_ids)] == short.response_ids.tolist()
    assert batch["attention_mask"].sum(-1).tolist() == [1 + 2, 3 + len(long.response_ids)]
    assert batch["position_ids"][0].tolist()[:5] == [0, 0, 0, 1, 2]
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))


def test_rewards_sit_on_the_last_sampled_token_of_their_turn():
    """P18, P33: three turns, at most three places, and their sum is the return."""
    batch = assemble([make_episode(rewards=[0.1, 0.0, 1.0])], pad_token_id=PAD, passed_on={}).batch
    assert batch["response_mask"][0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    np.testing.assert_allclose(batch["rm_scores"][0].numpy(), [0, 0.1, 0, 0, 0, 0, 0, 0, 0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("reason", [EndReason.FAILED, EndReason.PROMPT_TOO_LONG])
def test_masked_rows_carry_no_mask_and_no_reward(reason):
    """P20, P37: the row is there for verl's layout, and nothing of it can be learned from."""
    batch = assemble(
        [make_episode(rewards=[1.0]), make_episode(end_reason=reason)], pad_token_id=PAD, passed_on={}
    ).batch
    assert batch["response_mask"][1].sum() == 0
    assert batch["rm_scores"][1].abs().sum() == 0
    assert batch["attention_mask"][1].sum() == 2


def test_log_probs_are_left_out_when_a_trained_row_lacks_them():
    without = dataclasses.replace(make_episode(), log_probs=None)
    assert "rollout_log_probs" not in assemble([make_episode(), without], pad_token_id=PAD, passed_on={}).batch.keys()
    assert "rollout_log_probs" in assemble([make_episode()], pad_token_id=PAD, passed_on={}).batch.keys()


def test_object_columns_stay_one_dimensional():
    """P43: conversations of equal length, and a batch of one."""
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    assert object_array([[1, 2]]).shape == (1,)


def test_batches_with_object_columns_concat_and_union():
    """P41, P42: columns are the same in every batch, also with failed rows."""
    from verl import DataProto

    good = assemble([make_episode()], pad_token_id=PAD, passed_on={"env_kwargs": object_array([{"a": [1]}])})
    bad = assemble(
        [make_episode(end_reason=EndReason.FAILED)], pad_token_id=PAD, passed_on={"env_kwargs": object_array([{}])}
    )
    assert good.non_tensor_batch.keys() == bad.non_tensor_batch.keys()
    same_size = assemble(
        [make_episode(num_turns=1)], pad_token_id=PAD, passed_on={"env_kwargs": object_array([{"a": [1]}])}
    )
    assert len(DataProto.concat([good, same_size])) == 2
    good.union(assemble([make_episode()], pad_token_id=PAD, passed_on={"env_kwargs": object_array([{"a": [1]}])}))


def _wrong_id(batch):
    batch.batch["responses"][0, 0] += 1


def _mask_on_observation(batch):
    batch.batch["response_mask"][0, 2] = 1


def _mask_lost(batch):
    batch.batch["response_mask"][0, 1] = 0


def _reward_lost(batch):
    batch.batch["rm_scores"][0] = 0


def _reward_on_observation(batch):
    batch.batch["rm_scores"][0] = batch.batch["rm_scores"][0].roll(1)


@pytest.mark.parametrize("spoil", [_wrong_id, _mask_on_observation, _mask_lost, _reward_lost, _reward_on_observation])
def test_a_spoiled_batch_is_not_trained_on(spoil):
    episodes = [make_episode(rewards=[1.0, 0.5])]
    batch = assemble(episodes, pad_token_id=PAD, passed_on={})
    check_batch(batch, episodes)
    spoil(batch)
    with pytest.raises(LedgerMismatchError, match="must not be trained on"):
        check_batch(batch, episodes)
