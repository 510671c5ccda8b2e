# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's own PPO, end to end on the CPU platform, in one start of Ray and vLLM: actor, critic, reference policy, engine
and the weight sync between them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from examples.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
STOCK_PPO = ROOT / "tests" / "platform_cpu" / "stock_ppo.py"
SYNC_LIMIT_S = 8.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Four steps; the sync after the second is left out; then the receiver breaks in three ways."""
    folder = tmp_path_factory.mktemp("stock")
    model = save_tiny_model(folder / "model", num_layers=2)
    row = {"data_source": "toy", "reward_model": {"style": "rule", "ground_truth": ""}}
    prompts = [[{"role": "user", "content": f"Push box {i}"}] for i in range(8)]
    rows = [{**row, "prompt": prompt, "extra_info": {"index": i}} for i, prompt in enumerate(prompts)]
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    overrides = {
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        # Packed rows in the actor, padded ones (the overlay's choice) in the critic: both have to work.
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.optim.lr": 0.02,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.custom.weight_sync_timeout_s": SYNC_LIMIT_S,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": (
            "tests.platform_cpu.broken_receiver.BreakableExtension"
        ),
        "critic.model.path": model,
        "critic.ppo_micro_batch_size_per_gpu": 4,
        "reward.custom_reward_function.path": STOCK_PPO,
        "reward.custom_reward_function.name": "score_letters",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": 4,
        "trainer.val_before_train": False,
        "trainer.save_freq": 4,
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.use_v1": False,
        "hydra.run.dir": folder / "hydra",
        "hydra.searchpath": f"[file://{ROOT / 'recipe' / 'agent_env' / 'config'}]",
    }
    command = [sys.executable, str(STOCK_PPO), "+platform=cpu", *(f"{k}={v}" for k, v in overrides.items())]
    with open(folder / "log.txt", "w") as log:
        process = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.STDOUT
        )
    assert process.returncode == 0, "\n".join((folder / "log.txt").read_text().splitlines()[-60:])
    noted = json.loads((folder / "record.json").read_text())
    assert (folder / "checkpoints" / "global_step_4" / "actor").is_dir()
    return noted


def test_actor_and_critic_train_on_non_zero_gradients(record):
    assert len(record["grad_norm"]) == 2 * 4
    assert all(norm > 0 for norm in record["grad_norm"])


def test_engine_and_trainer_agree_after_each_sync(record):
    """The learning rate is large: weights that did not arrive would show, as the next test proves."""
    assert max(record["gap"][step] for step in ("1", "2", "4")) < 1e-3


def test_engine_and_trainer_disagree_when_one_sync_is_left_out(record):
    assert record["gap"]["3"] > 0.1


@pytest.mark.parametrize("where, reason", [("receive", "broken on purpose"), ("load", "no room")])
def test_a_receiver_that_fails_ends_the_run_with_its_error(record, where, reason):
    error, seconds = record[where]
    assert "WeightSyncError: weight sync: the rollout engine failed to" in error and reason in error
    assert seconds < SYNC_LIMIT_S


def test_a_receiver_that_hangs_ends_the_run_within_the_limit(record):
    error, seconds = record["hang"]
    assert f"within {SYNC_LIMIT_S:g} s" in error
    assert seconds < SYNC_LIMIT_S + 20
