# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The only place that reaches into verl where it leaves no hook.

`RayPPOTrainer.fit` calls five functions by name. They are wrapped here, in the trainer's process, so that rows without
a learning signal (mask 0 everywhere: failed episodes) enter no baseline, no KL and no metric mean, so that nothing at a
token that was not sampled reaches one that was, and so that the `env/*` metrics join verl's. Worker processes are left
as they are: what is sent to them can do no harm there. Everything else in verl is reached through its own extension
points. `tests/test_verl_patches_on_cpu.py` shows for each wrapper what verl does without it.
"""

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import verl
from packaging.specifiers import SpecifierSet
from verl import DataProto
from verl.trainer.ppo import ray_trainer, rollout_corr_helper
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipe.agent_env.algorithms import estimators  # noqa: F401  registers them
from recipe.agent_env.algorithms.catalog import EstimatorTraits, estimator_traits
from recipe.agent_env.algorithms.groups import is_alone
from recipe.agent_env.metrics import env_metrics, group_metrics, token_metrics
from recipe.agent_env.rollout.batch import BOOTSTRAPPED_ROW_KEY, MASKED_ROW_KEY
from recipe.agent_env.rollout.refill import METRIC_PREFIX

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
"""Versions whose source was read for these wrappers."""

_SAMPLED_MASK_KEY = "sampled_mask"
# While advantages are computed: the mask before rollout correction took tokens out of the loss.

_PER_TOKEN_KEYS = (
    "values",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "sum_pi_squared",
    "token_level_rewards",
)


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
    for module, name, wrapper in _WRAPPERS:
        function = getattr(module, name)
        if not hasattr(function, "__wrapped_by_agent_env__"):
            setattr(module, name, _wrap(function, wrapper))


def _wrap(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Put `wrapper(function, *args, **kwargs)` in the place of `function`, marked."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    wrapped.__wrapped_by_agent_env__ = True  # type: ignore[attr-defined]
    return wrapped


def trained_rows(batch: DataProto) -> np.ndarray:
    """Positions of the rows with at least one sampled token."""
    return torch.nonzero(batch.batch["response_mask"].any(dim=-1)).flatten().numpy()


def _select(batch: DataProto, rows: np.ndarray) -> DataProto:
    """A batch of these rows; the batch itself where that is all of them."""
    return batch if len(rows) == len(batch) else batch.select_idxs(rows)


def _scatter(batch: DataProto, rows: np.ndarray, part: DataProto, keys: Iterable[str]) -> None:
    """Write tensors of `part` into the rows they belong to; zero in all others."""
    for key in keys:
        if key not in part.batch.keys():
            continue
        whole = torch.zeros((len(batch), *part.batch[key].shape[1:]), dtype=part.batch[key].dtype)
        whole[torch.from_numpy(rows)] = part.batch[key]
        batch.batch[key] = whole


def _zero_off_mask(batch: DataProto, mask: torch.Tensor, keys: Iterable[str]) -> None:
    """Zero these tensors where nothing was sampled: a NaN there reaches sampled tokens through sums and gradients."""
    for key in keys:
        if key in batch.batch.keys():
            tensor = batch.batch[key]
            batch.batch[key] = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))


def _compute_advantage(
    compute_advantage: Callable[..., DataProto],
    data: DataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    **kwargs: Any,
) -> DataProto:
    """Advantages over trained rows only, 0 for all others and wherever a token is not in the loss.

    A row whose group lost all its other rollouts gets 0 and stays out of what is whitened: verl 0.9.1 gives it its raw
    score. Fewer than two sampled tokens give 0: verl's whitening raises on them. Tokens that rollout correction
    rejected leave the loss but stay part of their episode: its rewards still count.
    """
    name = str(getattr(adv_estimator, "value", adv_estimator))
    traits = estimator_traits(name)
    loss_mask = data.batch["response_mask"]
    sampled_mask = data.batch.pop(_SAMPLED_MASK_KEY, loss_mask)
    state_values = _values_after_truncation(data) if traits.needs_critic else None
    _zero_off_mask(data, sampled_mask, _PER_TOKEN_KEYS)
    rewards = data.batch["token_level_rewards"]
    if state_values is not None:
        rewards = _add_to_last_token(rewards, sampled_mask, gamma * state_values)
    if name == "remax":
        # verl counts rewards from each token on, against the greedy episode's whole return. The two agree only where
        # every reward comes at the end, so it is put there.
        rewards = _add_to_last_token(torch.zeros_like(rewards), sampled_mask, rewards.sum(dim=-1))

    rows = _comparable_rows(data, sampled_mask, name, traits, num_repeat)
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    returns[rows] = rewards[rows]
    if sampled_mask[rows].sum() >= 2:
        part = data.select_idxs(rows)
        part.batch["response_mask"], part.batch["token_level_rewards"] = sampled_mask[rows], rewards[rows]
        if traits.is_turn_level:
            advantages[rows], returns[rows] = get_adv_estimator_fn(name)(
                **dict(part.batch.items()), index=part.non_tensor_batch.get("uid"), config=kwargs["config"]
            )
        else:
            part = compute_advantage(
                part, adv_estimator=adv_estimator, gamma=gamma, lam=lam, num_repeat=num_repeat, **kwargs
            )
            advantages[rows], returns[rows] = part.batch["advantages"], part.batch["returns"]
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    _zero_off_mask(data, loss_mask, ("advantages", "returns"))
    return data


def _comparable_rows(
    data: DataProto, sampled_mask: torch.Tensor, name: str, traits: EstimatorTraits, num_repeat: int
) -> np.ndarray:
    """Positions of the trained rows that have what the estimator compares them with."""
    is_comparable = sampled_mask.any(dim=-1)
    if name == "remax":  # the greedy episode failed
        is_comparable &= torch.isfinite(data.batch["reward_baselines"])
    rows = torch.nonzero(is_comparable).flatten().numpy()
    if traits.is_grouped and num_repeat > 1 and len(rows):
        rows = rows[~is_alone(data.non_tensor_batch["uid"][rows])]
    return rows


def _values_after_truncation(data: DataProto) -> torch.Tensor | None:
    """The critic's value of the state in which an episode was cut off, 0 in rows that ended or say nothing of it.

    verl's value at a position is that of the state before its token. Such a row has one attended token more than was
    read, see `rollout.episode`, so its last position holds the value of all that was read.

    Returns:
        float, shape (B,); None when no row is bootstrapped.
    """
    is_bootstrapped = data.non_tensor_batch.get(BOOTSTRAPPED_ROW_KEY)
    if is_bootstrapped is None or not is_bootstrapped.any():
        return None
    num_response_positions = data.batch["response_mask"].shape[1]
    last = data.batch["attention_mask"][:, -num_response_positions:].sum(dim=-1, keepdim=True) - 1
    values = data.batch["values"].gather(1, last.clamp(min=0)).squeeze(1)
    return torch.where(torch.from_numpy(is_bootstrapped), values, torch.zeros_like(values))


def _add_to_last_token(rewards: torch.Tensor, sampled_mask: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """Add one amount per row, (B,), to its last sampled token; (B, R) to (B, R)."""
    positions = torch.arange(sampled_mask.shape[1])
    last = (sampled_mask.bool() * positions).amax(dim=-1, keepdim=True)
    return rewards.scatter_add(1, last, torch.where(sampled_mask.any(dim=-1), amounts, 0.0).unsqueeze(1))


def _apply_kl_penalty(
    apply_kl_penalty: Callable[..., tuple[DataProto, dict[str, float]]], data: DataProto, *args: Any, **kwargs: Any
) -> tuple[DataProto, dict[str, float]]:
    """KL in the reward over sampled tokens of trained rows only; also the adaptive controller sees no other."""
    rows = trained_rows(data)
    if len(rows) == 0:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        return data, {}
    _zero_off_mask(data, data.batch["response_mask"], ("old_log_probs", "ref_log_prob"))
    part, metrics = apply_kl_penalty(_select(data, rows), *args, **kwargs)
    _scatter(data, rows, part, ("token_level_rewards",))
    return data, metrics


def _compute_rollout_correction(
    compute_rollout_correction: Callable[..., tuple[DataProto, dict[str, float]]], batch: DataProto, *args: Any
) -> tuple[DataProto, dict[str, float]]:
    """Rollout correction over trained rows only: a masked row counts as perfect agreement in verl's means, and a batch
    without any trained row raises. The mask that it changes is kept for the advantages."""
    rows = trained_rows(batch)
    if len(rows) == 0:
        return batch, {}
    mask = batch.batch["response_mask"]
    _zero_off_mask(batch, mask, ("old_log_probs", "rollout_log_probs"))
    part, metrics = compute_rollout_correction(_select(batch, rows), *args)
    _scatter(batch, rows, part, ("response_mask", "rollout_is_weights"))
    batch.batch[_SAMPLED_MASK_KEY] = mask
    return batch, metrics


def _agg_loss(
    agg_loss: Callable[..., torch.Tensor], loss_mat: torch.Tensor, loss_mask: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The trainer's mean entropy over sampled tokens: 0 where there are none (verl: NaN), deaf to NaN elsewhere."""
    if not loss_mask.any():
        return loss_mat.new_zeros(())
    return agg_loss(torch.where(loss_mask.bool(), loss_mat, 0.0), loss_mask, *args, **kwargs)


def _compute_data_metrics(
    compute_data_metrics: Callable[..., dict[str, Any]], batch: DataProto, use_critic: bool = True
) -> dict[str, Any]:
    """verl's means over unmasked rows, and the `env/*` metrics."""
    columns = batch.non_tensor_batch
    rows = np.flatnonzero(~columns[MASKED_ROW_KEY])
    metrics = compute_data_metrics(batch=_select(batch, rows), use_critic=use_critic) if len(rows) else {}
    scores = batch.batch["token_level_scores"].sum(dim=-1).numpy()
    mask = batch.batch["response_mask"].numpy()
    return {
        **metrics,
        **env_metrics(columns),
        **group_metrics(scores, columns["uid"], columns[MASKED_ROW_KEY]),
        **token_metrics(batch.batch["responses"].numpy(), mask),
        **{f"env/{name}": value for name, value in batch.meta_info.items() if name.startswith(METRIC_PREFIX)},
        "env/all_masked": float(not mask.any()),  # rollout correction may have rejected what was left
    }


_WRAPPERS: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (ray_trainer, "compute_advantage", _compute_advantage),
    (ray_trainer, "apply_kl_penalty", _apply_kl_penalty),
    (ray_trainer, "compute_data_metrics", _compute_data_metrics),
    (ray_trainer, "agg_loss", _agg_loss),
    (rollout_corr_helper, "compute_rollout_correction_and_add_to_batch", _compute_rollout_correction),
)
