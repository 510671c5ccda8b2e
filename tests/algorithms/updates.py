# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's update of actor and critic in one process: its mini-batches, micro-batches and losses on a table for a model.

The policy is a table of log-probs, one number per row and position, so that a gradient says which tokens were pushed.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import CriticConfig, FSDPActorConfig
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.agent_env.algorithms.mini_batches import count_trained_rows, update_on_trained_rows


def actor_loss(*, loss_mode: str = "vanilla", **options: Any) -> Callable[..., Any]:
    """verl's ppo_loss with these options of `actor_rollout_ref.actor`."""
    config = FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **options)
    object.__setattr__(config.policy_loss, "loss_mode", loss_mode)
    return lambda model_output, data: ppo_loss(config, model_output, data)


def critic_loss(*, loss_agg_mode: str = "token-mean") -> Callable[..., Any]:
    """verl's value_loss."""
    config = OmegaConf.create({"cliprange_value": 0.5, "loss_agg_mode": loss_agg_mode, "loss_scale_factor": None})
    return lambda model_output, data: value_loss(cast(CriticConfig, config), model_output, data)


class TableModel:
    """One trainable number per row and position, the last rows' the same for any number of rows before them."""

    def __init__(self, num_rows: int, num_positions: int):
        generator = torch.Generator().manual_seed(0)
        from_last_row = torch.randn(16, num_positions, generator=generator) * 0.1 - 1.0
        self.table = from_last_row[:num_rows].flip(0).requires_grad_()

    def __call__(self, micro_batch: TensorDict) -> dict[str, torch.Tensor]:
        rows = micro_batch["row"]
        # verl reads log-probs and values one position before their token.
        outputs = torch.roll(self.table[rows], -1, dims=1)[micro_batch["attention_mask"].bool()]
        return {"log_probs": outputs, "values": outputs, "entropy": outputs**2}


def gradients(
    batch: DataProto,
    loss: Callable[..., Any],
    *,
    mini_batch_size: int,
    as_verl: bool = False,
    num_ranks: int = 1,
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """One epoch of updates without an optimizer.

    Args:
        batch: With advantages, returns, old log-probs and values.
        loss: `actor_loss(...)` or `critic_loss(...)`.
        mini_batch_size: Rows of one mini-batch over all ranks.
        as_verl: Send the batch as verl does, without what this recipe does first.
        num_ranks: Data-parallel ranks.

    Returns:
        For each mini-batch the gradient of the table, and the metrics of each micro-batch of one row.
    """
    batch.batch["row"] = torch.arange(len(batch))
    batch.batch["input_ids"] = torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1)
    batch.batch["position_ids"] = torch.arange(batch.batch["input_ids"].shape[1]).repeat(len(batch), 1)
    model = TableModel(len(batch), batch.batch["attention_mask"].shape[1])
    all_gradients: list[torch.Tensor] = []
    all_metrics: list[dict[str, Any]] = []

    def send(data: TensorDict) -> None:
        slice_size = mini_batch_size // num_ranks
        shares = torch.arange(len(data)).chunk(num_ranks)
        for start in range(0, len(shares[0]), slice_size):
            rows = torch.cat([share[start : start + slice_size] for share in shares])
            num_tokens = tu.index_select_tensor_dict(data, rows)["loss_mask"].sum().item()
            for row in rows.split(1):
                micro_batch = tu.index_select_tensor_dict(data, row)
                tu.assign_non_tensor(micro_batch, batch_num_tokens=num_tokens, dp_size=1)
                loss_value, metrics = loss(model(micro_batch), micro_batch)
                loss_value.backward()
                all_metrics.append(metrics)
            assert model.table.grad is not None
            all_gradients.append(model.table.grad)
            model.table.grad = None

    def update(sent: DataProto) -> DataProto:
        data = left_right_2_no_padding(sent.to_tensordict())
        tu.assign_non_tensor(data, global_batch_size=mini_batch_size)
        (send if as_verl else count_trained_rows(send))(data)
        return sent

    if as_verl:
        update(batch)
    else:
        update_on_trained_rows(update, batch, mini_batch_size=mini_batch_size, num_ranks=num_ranks)
    return all_gradients, all_metrics
