# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which row goes into which mini-batch, so that each of them has something to learn from.

verl 0.9.1 divides by the number of sampled tokens of a mini-batch: where all its rows are masked the loss is NaN and
the optimizer takes a step on nothing. Its `seq-mean-*` losses divide by the number of rows, masked ones included. Both
are put right on the trainer's side, before rows are sent: workers are other processes and stay verl's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu

_TRAINED_SHARE_KEY = "trained_row_share"
"""Meta info: trained rows over all rows that are sent; where it is missing, all are trained."""


def spread_trained_rows(is_trained: np.ndarray, *, mini_batch_size: int, num_ranks: int) -> np.ndarray:
    """Order rows so that trained ones are spread evenly over the mini-batches.

    verl gives each rank an equal contiguous share, of which each mini-batch takes the next slice. A row stays on its
    rank, which keeps verl's balance of tokens over ranks.

    Args:
        is_trained: Whether the row has a sampled token, shape (B,); at least one has.
        mini_batch_size: Rows of one mini-batch over all ranks; divides B.
        num_ranks: Data-parallel ranks; divides `mini_batch_size`.

    Returns:
        Positions of rows. Each trained row once; masked rows fill the mini-batches up. The trained rows of two
        mini-batches differ by at most one. With fewer trained rows than mini-batches, as many mini-batches as there are
        trained rows, and the other masked rows are left out.
    """
    num_rows, num_trained = len(is_trained), int(is_trained.sum())
    num_mini_batches = min(num_rows // mini_batch_size, num_trained)
    slice_size = mini_batch_size // num_ranks
    order = []
    turn = 0  # mini-batch that gets the next trained row
    for share in np.split(np.arange(num_rows), num_ranks):
        slices: list[list[int]] = [[] for _ in range(num_mini_batches)]
        for row in share[is_trained[share]]:
            slices[turn % num_mini_batches].append(int(row))
            turn += 1
        masked = share[~is_trained[share]].tolist()
        for rows in slices:
            num_missing = slice_size - len(rows)
            order += rows + masked[:num_missing]
            masked = masked[num_missing:]
    return np.asarray(order, dtype=np.int64)


def update_on_trained_rows(
    update: Callable[[DataProto], DataProto], batch: DataProto, *, mini_batch_size: int, num_ranks: int
) -> DataProto:
    """Run verl's update of actor or critic on a batch that may hold masked rows.

    Args:
        update: `RayPPOTrainer._update_actor` or `_update_critic`.
        batch: With `response_mask`.
        mini_batch_size: Rows of one mini-batch over all ranks.
        num_ranks: Data-parallel ranks.

    Returns:
        What `update` returns. When no row is trained no update is made and there are no metrics of it: the weights, the
        optimizer and its schedule stay as they are, and `env/all_masked` says so.
    """
    is_trained = batch.batch["response_mask"].any(dim=-1).numpy()
    if is_trained.all():
        return update(batch)
    if not is_trained.any():
        return DataProto.from_single_dict(data={}, meta_info={"metrics": {}})
    order = spread_trained_rows(is_trained, mini_batch_size=mini_batch_size, num_ranks=num_ranks)
    sent = batch.select_idxs(order)
    sent.meta_info = {**batch.meta_info, _TRAINED_SHARE_KEY: float(is_trained.sum() / len(order))}
    if "global_token_num" in sent.meta_info:
        sent.meta_info["global_token_num"] = torch.sum(sent.batch["attention_mask"], dim=-1).tolist()
    return update(sent)


def count_trained_rows(send: Callable[[TensorDict], Any]) -> Callable[[TensorDict], Any]:
    """Wrap a worker group's update so that `seq-mean-*` losses divide by trained rows instead of all rows."""

    def send_with_trained_count(data: TensorDict) -> Any:
        share = tu.pop(data, key=_TRAINED_SHARE_KEY, default=1.0)
        if share < 1:
            tu.assign_non_tensor(data, global_batch_size=tu.get(data, key="global_batch_size") * share)
        return send(data)

    return send_with_trained_count
