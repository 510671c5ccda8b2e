# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The only place that reaches into verl where it leaves no hook.

`RayPPOTrainer.fit` calls three module-level functions by name. They are wrapped here, in the trainer's process, so
that rows without a learning signal (mask 0 everywhere: failed episodes) enter no baseline, no KL and no metric mean,
and so that the `env/*` metrics join verl's. Everything else in verl is reached through its own extension points.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import verl
from packaging.specifiers import SpecifierSet
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from recipe.agent_env.metrics import env_metrics

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
"""Versions whose source was read for these wrappers."""

GROUPED_ESTIMATORS = frozenset(
    {"grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg"}
)
"""Estimators whose baseline comes from the other rollouts of the same row."""


def apply_verl_patches() -> None:
    """Wrap the functions, once per process.

    Raises:
        RuntimeError: The installed verl is not one that these wrappers were written for.
    """
    if verl.__version__ not in SUPPORTED_VERL:
        raise RuntimeError(
            f"expected verl {SUPPORTED_VERL}, found {verl.__version__}: verl_patches.py wraps "
            "functions of its trainer and must be read against the new source; install what REQUIRED_VERL.txt names"
        )
    for name, wrap in _WRAPPERS.items():
        function = getattr(ray_trainer, name)
        if not hasattr(function, "__wrapped_by_agent_env__"):
            setattr(ray_trainer, name, wrap(function))


def _wrapper(wrap: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn `wrap(function, *args, **kwargs)` into a decorator that marks what it made."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrap(function, *args, **kwargs)

        wrapped.__wrapped_by_agent_env__ = True  # type: ignore[attr-defined]
        return wrapped

    return decorate


def trained_rows(batch: DataProto) -> np.ndarray:
    """Positions of the rows with at least one sampled token."""
    return torch.nonzero(batch.batch["response_mask"].any(dim=-1)).flatten().numpy()


def _select(batch: DataProto, rows: np.ndarray) -> DataProto:
    """A batch of these rows; the batch itself where that is all of them."""
    return batch if len(rows) == len(batch) else batch.select_idxs(rows)


def _scatter(batch: DataProto, rows: np.ndarray, part: DataProto, keys: tuple[str, ...]) -> None:
    """Write tensors of `part` into the rows they belong to; zero in all others."""
    for key in keys:
        whole = torch.zeros((len(batch), *part.batch[key].shape[1:]), dtype=part.batch[key].dtype)
        whole[torch.from_numpy(rows)] = part.batch[key]
        batch.batch[key] = whole


def _zero_off_mask(batch: DataProto, *keys: str) -> None:
    """Zero these tensors where nothing was sampled: a NaN there must not reach a sampled token through a sum."""
    mask = batch.batch["response_mask"].bool()
    for key in keys:
        if key in batch.batch.keys():
            batch.batch[key] = torch.where(mask, batch.batch[key], torch.zeros_like(batch.batch[key]))


def _compute_advantage(
    compute_advantage: Callable[..., DataProto], data: DataProto, *args: Any, **kwargs: Any
) -> DataProto:
    """Advantages over trained rows only.

    A masked row gets 0. A row whose group lost all its other rollouts gets 0: verl 0.9.1 gives it its raw score. Fewer
    than two sampled tokens in the whole batch give 0 everywhere: verl's whitening raises on them.
    """
    rows = trained_rows(data)
    _zero_off_mask(data, "values", "token_level_rewards")
    if data.batch["response_mask"].sum() < 2:
        zeros = torch.zeros_like(data.batch["token_level_rewards"])
        data.batch["advantages"], data.batch["returns"] = zeros, data.batch["token_level_rewards"].clone()
        return data
    part = compute_advantage(_select(data, rows), *args, **kwargs)
    estimator = kwargs.get("adv_estimator", args[0] if args else None)
    if str(getattr(estimator, "value", estimator)) in GROUPED_ESTIMATORS and kwargs.get("num_repeat", 1) > 1:
        _, group, group_sizes = np.unique(part.non_tensor_batch["uid"], return_inverse=True, return_counts=True)
        is_alone = torch.from_numpy(group_sizes[group] == 1)
        part.batch["advantages"][is_alone] = 0.0
        part.batch["returns"][is_alone] = 0.0
    _scatter(data, rows, part, ("advantages", "returns"))
    return data


def _apply_kl_penalty(
    apply_kl_penalty: Callable[..., tuple[DataProto, dict[str, float]]], data: DataProto, *args: Any, **kwargs: Any
) -> tuple[DataProto, dict[str, float]]:
    """KL in the reward over sampled tokens of trained rows only; also the adaptive controller sees no other."""
    rows = trained_rows(data)
    if len(rows) == 0:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        return data, {}
    _zero_off_mask(data, "old_log_probs", "ref_log_prob")
    part, metrics = apply_kl_penalty(_select(data, rows), *args, **kwargs)
    _scatter(data, rows, part, ("token_level_rewards",))
    return data, metrics


def _compute_data_metrics(
    compute_data_metrics: Callable[..., dict[str, Any]], batch: DataProto, use_critic: bool = True
) -> dict[str, Any]:
    """verl's means over trained rows, and the `env/*` metrics."""
    rows = trained_rows(batch)
    metrics = compute_data_metrics(batch=_select(batch, rows), use_critic=use_critic) if len(rows) else {}
    return {**metrics, **env_metrics(batch.non_tensor_batch)}


_WRAPPERS = {
    "compute_advantage": _wrapper(_compute_advantage),
    "apply_kl_penalty": _wrapper(_apply_kl_penalty),
    "compute_data_metrics": _wrapper(_compute_data_metrics),
}
