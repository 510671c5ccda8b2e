# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the trainer sends its workers: verl's own `_update_actor` and `_update_critic` over recording worker groups."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from recipe.agent_env.agent_ray_trainer import AgentRayPPOTrainer, RayPPOTrainer
from recipe.agent_env.config_checks import finish_config
from tests.algorithms.batches import compute, make_batch
from tests.test_config_on_cpu import composed


class RecordingWorkers:
    """A worker group that keeps what it is sent; two data-parallel ranks."""

    def __init__(self, role: str):
        self._dispatch_info = {role: [0, 1]}
        self.sent: list[TensorDict] = []

    def update_actor(self, data: TensorDict) -> TensorDict:
        self.sent.append(data)
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": 0.5, "pg_loss": 1.0}})

    def train_mini_batch(self, data: TensorDict) -> Any:
        self.update_actor(data)

        class Future:
            def get(self) -> TensorDict:
                return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": 0.5}})

        return Future()


@pytest.fixture
def trainer(monkeypatch):
    """Mini-batches of two rows of `data`, four with two rollouts each."""
    overrides = ["trainer.logger=console", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    mini_batch = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"]
    trainer = object.__new__(AgentRayPPOTrainer)
    trainer.config = finish_config(composed(*overrides, *mini_batch))
    trainer.distillation_config = None
    trainer.use_critic = True
    trainer.tokenizer = SimpleNamespace(pad_token_id=7)
    trainer.train_dataset, trainer.train_dataloader = [], []

    def init_workers(self):
        self.async_rollout_manager = SimpleNamespace()
        self.actor_rollout_wg, self.critic_wg = RecordingWorkers("actor"), RecordingWorkers("train")

    monkeypatch.setattr(RayPPOTrainer, "init_workers", init_workers)
    trainer.init_workers()
    return trainer


def test_padding_is_the_tokenizers(trainer):
    assert trainer.async_rollout_manager.pad_token_id == 7


def a_batch(is_trained: list[int]):
    batch = make_batch([[t, t] for t in is_trained], [[0.0, float(i)] for i in range(8)], uids="aabbccdd")
    batch.batch["input_ids"] = torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1)
    batch.batch["position_ids"] = torch.arange(4).repeat(8, 1)
    batch.meta_info["global_token_num"] = [4] * 8
    compute(batch, "gae", num_repeat=2)
    return batch


def updates(trainer, batch):
    yield trainer._update_actor(batch), trainer.actor_rollout_wg.sent
    yield trainer._update_critic(batch), trainer.critic_wg.sent


def test_batch_without_masked_rows_is_sent_as_verl_sends_it(trainer):
    for _, (sent,) in updates(trainer, a_batch([1] * 8)):
        assert len(sent) == 8
        assert tu.get(sent, "global_batch_size") == tu.get(sent, "mini_batch_size") == 4
        assert "trained_row_share" not in sent.keys()


def test_masked_rows_are_spread_and_not_counted(trainer):
    """Rank 0 holds rows 0 to 3, rank 1 rows 4 to 7; each mini-batch takes two rows of each."""
    for done, (sent,) in updates(trainer, a_batch([0, 0, 1, 1, 1, 1, 1, 1])):
        trained = sent["response_mask"].any(dim=-1).numpy().reshape(2, 2, 2)
        assert trained.sum(axis=(0, 2)).tolist() == [3, 3]
        assert tu.get(sent, "global_batch_size") == pytest.approx(4 * 6 / 8)
        assert tu.get(sent, "mini_batch_size") == 4
        assert done.meta_info["metrics"]


def test_fewer_trained_rows_than_mini_batches_make_fewer_mini_batches(trainer):
    for _, (sent,) in updates(trainer, a_batch([0, 0, 0, 0, 0, 1, 0, 0])):
        assert len(sent) == 4
        assert tu.get(sent, "global_batch_size") == 1
        assert len(tu.get(sent, "global_token_num")) == 4


def test_batch_of_masked_rows_is_not_sent(trainer):
    """P27."""
    for done, sent in updates(trainer, a_batch([0] * 8)):
        assert sent == []
        assert done.meta_info["metrics"] == {}


def test_trainers_own_batch_keeps_its_order(trainer):
    """Metrics and dumps come after the updates."""
    batch = a_batch([0, 1, 1, 1, 0, 1, 1, 1])
    before = batch.batch["token_level_scores"].clone()
    for _ in updates(trainer, batch):
        assert torch.equal(batch.batch["token_level_scores"], before)
    np.testing.assert_array_equal(batch.non_tensor_batch["uid"], list("aabbccdd"))
    assert "trained_row_share" not in batch.meta_info


def test_balanced_rows_keep_their_own_numbers(trainer):
    """verl orders rows by length over the ranks; tensors and columns of a row go together."""
    batch = a_batch([1] * 8)
    batch.batch["attention_mask"] = (torch.arange(4) < torch.tensor([4, 1, 3, 2, 2, 4, 1, 3]).unsqueeze(1)).long()
    batch.non_tensor_batch["seed"] = np.arange(8)
    batch.batch["row"] = torch.arange(8)
    by_row = {row: batch.batch["token_level_scores"][row].tolist() for row in range(8)}
    uids = dict(zip(range(8), batch.non_tensor_batch["uid"], strict=True))
    trainer._balance_batch(batch, metrics={})
    order = batch.batch["row"].tolist()
    assert order != list(range(8)) and batch.non_tensor_batch["seed"].tolist() == order
    assert batch.batch["token_level_scores"].tolist() == [by_row[row] for row in order]
    assert list(batch.non_tensor_batch["uid"]) == [uids[row] for row in order]
