# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shared by the end-to-end tests: one policy and one data set for all of them."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.sokoban.curate_data import main as curate
from tests.e2e.talking_policy import make_talking_policy


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a run needs besides a service."""

    model: Path
    train_file: Path
    test_file: Path

    def overrides(self, url: str) -> list[str]:
        """A small run: 8 rows a step, up to 4 turns of 32 tokens."""
        return [
            f"env.environment_endpoint={url}",
            "env.max_turn=4",
            f"data.train_files={self.train_file}",
            f"data.val_files={self.test_file}",
            "data.max_prompt_length=3072",
            "data.max_response_length=40",
            f"actor_rollout_ref.model.path={self.model}",
            f"critic.model.path={self.model}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
            "critic.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "critic.optim.lr=1e-3",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=False",
            "trainer.test_freq=2",
        ]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """Rooms, and a policy that writes calls."""
    folder = tmp_path_factory.mktemp("material")
    curate(["--out-dir", str(folder), "--num-train", "64", "--num-test", "4", "--dim", "6", "6", "--quiet"])
    make_talking_policy(folder / "model")
    return Material(model=folder / "model", train_file=folder / "train.parquet", test_file=folder / "test.parquet")
