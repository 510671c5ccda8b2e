# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Batches of multi-turn rows made by hand or at random, and the estimators' answers on them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from recipe.agent_env.rollout.batch import object_array
from recipe.agent_env.verl_patches import apply_verl_patches

GAMMA, LAM, TOKEN_LAM, STEP_WEIGHT = 0.9, 0.8, 0.7, 0.5

CONFIG = OmegaConf.create(
    {
        "gamma": GAMMA,
        "lam": LAM,
        "token_lam": TOKEN_LAM,
        "gigpo_step_weight": STEP_WEIGHT,
        "norm_adv_by_std_in_grpo": True,
        "use_pf_ppo": False,
    }
)


def make_batch(
    masks: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float]],
    *,
    values: Sequence[Sequence[float]] | None = None,
    uids: Sequence[str] | None = None,
    responses: Sequence[Sequence[int]] | None = None,
    **columns: Any,
) -> DataProto:
    """A batch as `fit` holds it before advantages are computed: scores equal rewards, rows are right-padded."""
    mask = torch.tensor(masks, dtype=torch.int64)
    reward = torch.tensor(rewards, dtype=torch.float32)
    num_rows, num_positions = mask.shape
    tensors = {
        "prompts": torch.ones(num_rows, 2, dtype=torch.int64),
        "responses": torch.tensor(responses) if responses else torch.arange(num_positions).repeat(num_rows, 1),
        "attention_mask": torch.ones(num_rows, 2 + num_positions, dtype=torch.int64),
        "response_mask": mask,
        "token_level_scores": reward.clone(),
        "token_level_rewards": reward.clone(),
        "values": torch.tensor(values, dtype=torch.float32) if values else torch.zeros_like(reward),
        "old_log_probs": torch.full_like(reward, -1.0),
    }
    is_masked = ~mask.bool().any(dim=-1).numpy()
    return DataProto(
        batch=TensorDict(tensors, batch_size=num_rows),
        non_tensor_batch={
            "uid": object_array(list(uids) if uids else [str(i) for i in range(num_rows)]),
            "is_masked": is_masked,
            **{name: np.asarray(column) for name, column in columns.items()},
        },
    )


def random_batch(seed: int, *, group_size: int = 4, num_groups: int = 3) -> DataProto:
    """Rows of 1 to 4 turns of 1 to 4 tokens with observations of 1 to 3 tokens, a reward per turn, one masked row.

    Observations are few, so that several turns of a group answer the same one.
    """
    rng = np.random.default_rng(seed)
    num_rows = group_size * num_groups
    rows = []
    for row in range(num_rows):
        mask: list[int] = []
        rewards: list[float] = []
        responses: list[int] = []
        for turn in range(rng.integers(1, 5)):
            if turn > 0:
                length = int(rng.integers(1, 4))
                mask += [0] * length
                rewards += [0.0] * length
                responses += [900 + length] * length
            length = int(rng.integers(1, 5))
            mask += [0 if row == 2 else 1] * length
            rewards += [0.0] * (length - 1) + [0.0 if row == 2 else float(rng.normal())]
            responses += rng.integers(10, 20, size=length).tolist()
        rows.append((mask, rewards, responses))
    width = max(len(mask) for mask, _, _ in rows)

    def padded(values: list[Any], fill: Any) -> list[Any]:
        return values + [fill] * (width - len(values))

    batch = make_batch(
        [padded(mask, 0) for mask, _, _ in rows],
        [padded(rewards, 0.0) for _, rewards, _ in rows],
        values=rng.normal(size=(num_rows, width)).tolist(),
        uids=[f"group{row // group_size}" for row in range(num_rows)],
        responses=[padded(responses, 0) for _, _, responses in rows],
    )
    lengths = torch.tensor([len(mask) for mask, _, _ in rows])
    batch.batch["attention_mask"][:, 2:] = (torch.arange(width) < lengths.unsqueeze(1)).long()
    batch.batch["old_log_probs"] = torch.from_numpy(-rng.random((num_rows, width))).float()
    batch.batch["sum_pi_squared"] = torch.from_numpy(rng.random((num_rows, width))).float()
    batch.batch["reward_baselines"] = torch.from_numpy(np.repeat(rng.normal(size=num_groups), group_size)).float()
    return batch


def compute(batch: DataProto, name: str, *, num_repeat: int = 4, **config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns as the trainer gets them; float64, shape (B, R)."""
    apply_verl_patches()
    merged = OmegaConf.merge(CONFIG, config)
    if name != "remax":  # as in `fit`, which plays greedy episodes for ReMax only
        batch.batch.pop("reward_baselines", None)
    done = ray_trainer.compute_advantage(
        batch,
        adv_estimator=name,
        gamma=merged.gamma,
        lam=merged.lam,
        num_repeat=num_repeat,
        norm_adv_by_std_in_grpo=merged.norm_adv_by_std_in_grpo,
        config=merged,
    )
    return done.batch["advantages"].double().numpy(), done.batch["returns"].double().numpy()
