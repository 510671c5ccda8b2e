# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dynamic sampling through the rollout manager: which groups are given up, what comes in their place, when it ends."""

import json

import numpy as np
import pytest
import torch
from verl import DataProto

from recipe.agent_env.agent_dataset import AgentDataset
from recipe.agent_env.rollout.agent_loop import TooManyFailedEpisodesError
from recipe.agent_env.rollout.batch import object_array
from recipe.agent_env.rollout.episode import EndReason
from recipe.agent_env.rollout.refill import SpareRows, flat_groups
from tests.rollout.episodes import make_episode
from tests.rollout.test_agent_loop_on_cpu import FakeWorker, make_manager

NUM_ROLLOUTS = 4


class Rollouts(FakeWorker):
    """Plays the rows of a data set: `rewards_of(seed)` are the returns of a row's rollouts."""

    def __init__(self, rewards_of):
        super().__init__(None)
        self._rewards_of = rewards_of
        self.rounds: list[list[int]] = []

    async def _generate(self, batch: DataProto):
        columns = batch.non_tensor_batch
        self.rounds.append(sorted(set(columns["seed"].tolist())))
        return [
            self.episode(self._rewards_of(seed)[rollout], seed)
            for seed, rollout in zip(columns["seed"], columns["rollout_index"], strict=True)
        ]

    @staticmethod
    def episode(reward, seed):
        failed = reward is None
        return make_episode(
            rewards=[0.0 if failed else reward],
            prompt_ids=[100 + seed],
            end_reason=EndReason.FAILED if failed else EndReason.TERMINATED,
        )


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"env_name": "game", "seed": seed, "env_kwargs": {"level": seed}} for seed in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return AgentDataset(str(path))


def make_prompts(dataset, num_groups: int) -> DataProto:
    """The first rows of the data set, as `fit` hands them over: each `NUM_ROLLOUTS` times, with the trainer's uid."""
    rows = [dataset[i] for i in range(num_groups) for _ in range(NUM_ROLLOUTS)]
    columns = {name: object_array([row[name] for row in rows]) for name in ("index", "env_name", "seed", "env_kwargs")}
    columns["uid"] = object_array([f"group{i // NUM_ROLLOUTS}" for i in range(len(rows))])
    tensors = {"dummy_tensor": torch.zeros(len(rows), 1)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"global_steps": 3})


async def play(dataset, rewards_of, *, num_groups: int = 16, max_num_gen_batches: int = 3, metric: str = "reward"):
    """One step with the filter on; the batch, its metrics and the rows of each round."""
    manager = make_manager(1)
    worker = Rollouts(rewards_of)
    manager.agent_loop_workers, manager.train_dataset = [worker], dataset
    manager.rollout_config.n = NUM_ROLLOUTS
    filter_groups = manager.config.algorithm.filter_groups
    filter_groups.enable, filter_groups.metric = True, metric
    filter_groups.max_num_gen_batches = max_num_gen_batches
    output = await manager.generate_sequences(make_prompts(dataset, num_groups))
    metrics = {k: v for k, v in output.meta_info.items() if k.startswith("group_filter/")}
    return output, metrics, worker.rounds


SPREAD, FLAT = [1.0, 0.0, 0.0, 0.0], [0.0] * 4


def some_are_flat(seed: int) -> list[float]:
    """Of the first 16 rows 13 have no spread; of the others every second one."""
    return SPREAD if (seed < 3 or (seed >= 16 and seed % 2)) else FLAT


async def test_flat_groups_are_refilled_and_the_batch_keeps_its_size(dataset):
    """P23: 16 groups, 13 of zero spread."""
    output, metrics, rounds = await play(dataset, some_are_flat, max_num_gen_batches=20)
    assert len(output) == 16 * NUM_ROLLOUTS
    columns = output.non_tensor_batch
    assert not columns["is_masked"].any()
    for uid_rows in np.arange(len(output)).reshape(16, NUM_ROLLOUTS):
        assert len(set(columns["seed"][uid_rows])) == len(set(columns["index"][uid_rows])) == 1
        assert some_are_flat(columns["seed"][uid_rows[0]]) == SPREAD
        assert columns["rollout_index"][uid_rows].tolist() == [0, 1, 2, 3]
        assert columns["env_kwargs"][uid_rows[0]] == {"level": columns["seed"][uid_rows[0]]}
    assert output.batch["prompts"][:, -1].tolist() == [100 + seed for seed in columns["seed"]]
    assert len(rounds) == metrics["group_filter/num_rounds"]
    assert len(rounds[1]) == 13 and not set(rounds[1]) & set(range(16)), "rows of the batch do not come again"


async def test_refill_ends_and_masks_what_is_left(dataset):
    """P23: no row has any spread. The batch has its size, is masked whole, and says so."""
    output, metrics, rounds = await play(dataset, lambda seed: FLAT, num_groups=4)
    assert [len(rows) for rows in rounds] == [4, 4, 4]
    assert output.non_tensor_batch["is_masked"].all() and len(output) == 16
    assert not output.batch["response_mask"].any() and not output.batch["rm_scores"].any()
    assert metrics["group_filter/num_masked_groups"] == 4 and metrics["group_filter/flat_group_ratio"] == 1.0


async def test_refill_ends_when_no_row_is_left(dataset):
    _, metrics, rounds = await play(dataset, lambda seed: FLAT, num_groups=40, max_num_gen_batches=9)
    assert [len(rows) for rows in rounds] == [40, 24]
    assert metrics["group_filter/num_masked_groups"] == 40


async def test_metrics_count_every_episode_that_was_played(dataset):
    """The batch is a selection; its own mean would flatter the policy."""
    output, metrics, _ = await play(dataset, some_are_flat, max_num_gen_batches=2)
    num_spread = 3 + sum(1 for index in output.non_tensor_batch["index"][::NUM_ROLLOUTS] if index >= 16 and index % 2)
    assert metrics["group_filter/episode_return/mean"] == pytest.approx(num_spread / ((16 + 13) * NUM_ROLLOUTS))
    assert metrics["group_filter/flat_group_ratio"] == pytest.approx((16 + 13 - num_spread) / (16 + 13))


async def test_order_of_spare_rows_is_the_same_after_a_resume(dataset):
    first, second = [await play(dataset, some_are_flat) for _ in range(2)]
    assert first[2] == second[2]
    other_step = SpareRows(dataset, seed=1, step=4, taken=set(range(16)))
    this_step = SpareRows(dataset, seed=1, step=3, taken=set(range(16)))
    assert this_step._rows != other_step._rows


@pytest.mark.parametrize(
    ("rewards", "is_filtered"),
    [([0.5] * 4, True), ([-0.3] * 4, True), ([0.5, 0.5, 0.5, 0.51], False), ([0.5, 0.5, None, None], True)],
    ids=["equal", "equal-negative", "one-differs", "equal-and-failed"],
)
def test_groups_are_flat_by_their_unmasked_scores(rewards, is_filtered):
    """P22."""
    episodes = [Rollouts.episode(reward, 0) for reward in rewards]
    flat = flat_groups(episodes, np.array(["a"] * 4, dtype=object), "reward")
    assert [group.tolist() for group in flat] == ([[0, 1, 2, 3]] if is_filtered else [])


def test_filter_by_success_does_not_look_at_returns():
    episodes = [make_episode(rewards=[reward], success=success) for reward, success in [(0.5, 1.0), (0.1, 1.0)]]
    assert flat_groups(episodes, np.array(["a", "a"], dtype=object), "reward") == []
    assert len(flat_groups(episodes, np.array(["a", "a"], dtype=object), "acc")) == 1


async def test_outage_during_a_refill_stops_the_run(dataset):
    """P81: counted over the whole step, so that one broken group of a small refill does not end it."""

    def breaks_later(seed):
        return FLAT if seed < 4 else [None] * NUM_ROLLOUTS

    with pytest.raises(TooManyFailedEpisodesError, match="32 of 48"):
        await play(dataset, breaks_later, num_groups=4, max_num_gen_batches=9)


async def test_filter_leaves_validation_alone(dataset):
    manager = make_manager(1)
    manager.agent_loop_workers, manager.train_dataset = [Rollouts(lambda seed: FLAT)], dataset
    manager.config.algorithm.filter_groups.enable = True
    prompts = make_prompts(dataset, 2)
    prompts.meta_info["validate"] = True
    manager.rollout_config.val_kwargs.n = NUM_ROLLOUTS
    output = await manager.generate_sequences(prompts)
    assert not output.non_tensor_batch["is_masked"].any()
