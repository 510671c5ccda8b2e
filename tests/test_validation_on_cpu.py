# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Validation through verl's own `_validate` and `fit`: what is counted, and what `trainer.val_only` leaves behind."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.agent_env.agent_ray_trainer import AgentRayPPOTrainer
from recipe.agent_env.rollout.episode import EndReason
from recipe.agent_env.validation import pass_at_k, reported_sizes
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer
from tests.rollout.episodes import make_episode
from tests.rollout.test_agent_loop_on_cpu import FakeWorker, make_manager
from tests.test_resume_on_cpu import Workers, make_trainer, play

F = None  # an episode that failed


class Rollouts(FakeWorker):
    """Plays row i: `outcomes[i]` are its rollouts, 1 solved, 0 not, None failed; the reward is three times that."""

    def __init__(self, outcomes):
        super().__init__(None)
        self._outcomes = outcomes
        self.close = SimpleNamespace(remote=self._close)

    async def _close(self):
        pass

    async def _generate(self, batch):
        columns = batch.non_tensor_batch
        return [
            make_episode(rewards=[1.0, 2.0 * outcome], success=float(outcome))
            if outcome is not None
            else make_episode(end_reason=EndReason.FAILED)
            for outcome in (
                self._outcomes[row][rollout]
                for row, rollout in zip(columns["index"], columns["rollout_index"], strict=True)
            )
        ]


def ready_to_validate(folder, outcomes, *, num_agent_workers: int = 2, **changes) -> AgentRayPPOTrainer:
    """A trainer whose validation rows are played as told."""
    path = folder / "val.jsonl"
    rows = [{"env_name": "game" if i < 3 else "chess", "seed": i, "env_kwargs": {}} for i in range(len(outcomes))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_rollouts = len(outcomes[0])
    sizes = {
        "actor_rollout_ref__rollout__val_kwargs__n": num_rollouts,
        "actor_rollout_ref__rollout__agent__num_workers": num_agent_workers,
    }
    trainer = make_trainer(folder / "checkpoints", str(path), **sizes, **changes)
    trainer.tokenizer, trainer.use_rm = qwen2_5_tokenizer(), False
    trainer._init_dump_executor()
    manager = make_manager(num_agent_workers)
    manager.config.trainer.validation_data_dir = trainer.config.trainer.validation_data_dir
    manager.rollout_config.val_kwargs.n = num_rollouts
    manager.config.env.max_failed_fraction = 1.0
    manager.agent_loop_workers = [Rollouts(outcomes) for _ in range(num_agent_workers)]
    manager.tokenizer = trainer.tokenizer
    trainer.async_rollout_manager = manager
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
    return trainer


OUTCOMES = [[1, 0, 0, 1], [0, 0, F, 1], [F, F, F, F], [1, 1, 1, 1]]
"""Three rows of one environment, one of another. 4 rows of 4 on 3 agent workers: verl pads by copies."""


def test_denominators_are_exact_when_episodes_fail(tmp_path):
    metrics = ready_to_validate(tmp_path, OUTCOMES, num_agent_workers=3)._validate()
    assert metrics["val-core/game/acc/mean@4"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert metrics["val-aux/game/reward/mean@4"] == pytest.approx((8 / 4 + 5 / 3) / 2)
    assert metrics["val-core/chess/acc/mean@4"] == 1.0
    assert metrics["val-aux/game/end_reason/failed/mean@4"] == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert (metrics["val-aux/game/num_episodes"], metrics["val-aux/game/num_unplayed_episodes"]) == (7, 5)
    assert metrics["val-aux/num_turns/min"] == metrics["val-aux/num_turns/max"] == 5, "a failed episode has no turns"
    assert not [key for key in metrics if "@3" in key], "verl's name for rows that lost a rollout"


def test_pass_at_k_counts_rows_with_enough_rollouts(tmp_path):
    metrics = ready_to_validate(tmp_path, OUTCOMES)._validate()
    assert metrics["val-core/game/acc/pass@4"] == 1.0  # one row has four rollouts, two of them solved
    first, second = 1 - (2 * 1) / (4 * 3), 1 - (2 * 1) / (3 * 2)
    assert metrics["val-aux/game/acc/pass@2"] == pytest.approx((first + second) / 2)
    assert metrics["val-core/chess/acc/pass@4"] == 1.0


def test_one_rollout_per_row_has_verls_own_names(tmp_path):
    """P38: three rows, of which one failed, on four workers."""
    metrics = ready_to_validate(tmp_path, [[1], [0], [F]], num_agent_workers=4)._validate()
    assert metrics["val-core/game/acc/mean@1"] == 0.5
    assert not [key for key in metrics if "pass@" in key]


def test_validation_of_failures_only_says_so(tmp_path):
    metrics = ready_to_validate(tmp_path, [[F], [F]])._validate()
    assert metrics["val-aux/game/end_reason/failed/mean@1"] == 1.0
    assert metrics["val-aux/game/num_episodes"] == 0
    assert "val-core/game/acc/mean@1" not in metrics


@pytest.mark.parametrize(("num_rollouts", "num_solved", "k"), [(4, 2, 2), (5, 1, 3), (4, 0, 4), (6, 6, 1), (3, 1, 3)])
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(num_rollouts, num_solved, k):
    rollouts = [1] * num_solved + [0] * (num_rollouts - num_solved)
    draws = [max(draw) for draw in itertools.combinations(rollouts, k)]
    assert math.isclose(pass_at_k(num_rollouts, num_solved, k), np.mean(draws))


def test_reported_sizes_are_verls():
    assert [reported_sizes(n) for n in (1, 2, 3, 4, 9)] == [[1], [2], [2, 3], [2, 4], [2, 4, 8, 9]]


def test_val_only_evaluates_a_checkpoint_and_writes_its_episodes(tmp_path):
    """Through verl's `fit`; no step is trained."""
    first = make_trainer(tmp_path / "checkpoints", write_rows(tmp_path))
    play(first, 3)
    first._save_checkpoint()
    keys = {"trainer__val_only": True, "trainer__validation_data_dir": str(tmp_path / "dump")}
    trainer = ready_to_validate(tmp_path, OUTCOMES, **keys)
    trainer.fit()
    workers: Workers = trainer.actor_rollout_wg
    assert workers.calls == ["load global_step_3/actor", "load global_step_3/critic"]
    rows = [json.loads(line) for line in (tmp_path / "dump" / "3.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert sorted(row["seed"] for row in rows) == [seed for seed in range(4) for _ in range(4)]
    solved = next(row for row in rows if row["acc"] == 1.0)
    assert [turn["reward"] for turn in solved["turns"]] == [1.0, 2.0]
    assert (solved["episode_return"], solved["score"], solved["end_reason"]) == (3.0, 3.0, "terminated")
    assert solved["response_mask"] == [1, 1, 0, 0, 1, 1] and len(solved["response_tokens"]) == 6
    assert len({row["uid"] for row in rows}) == 4
    failed = next(row for row in rows if row["end_reason"] == "failed")
    assert failed["failure"] == "made by hand" and failed["turns"] == []


def write_rows(folder) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"env_name": "game", "seed": i, "env_kwargs": {}}) + "\n" for i in range(15)))
    return str(path)
