# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Batch assembly: finished episodes become the padded tensors that verl's trainer reads.

Owns padding, the columns of the batch, and the two invariants that every batch is checked against. Knows nothing of
how the episodes were played. No loop runs over tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from recipe.agent_env.rollout.episode import TRUNCATION_REASONS, EndReason, Episode, EpisodeStats

MASKED_ROW_KEY = "is_masked"
"""Column: the row carries no learning signal and enters no baseline, KL or metric mean."""


BOOTSTRAPPED_ROW_KEY = "is_bootstrapped"
"""Column: the row's last attended token stands for what would have come next; its value is that of the last state."""


class LedgerMismatchError(AssertionError):
    """What would be trained is not what happened. A bug of this package, never of the policy or the service."""


def assemble(episodes: Sequence[Episode], *, pad_token_id: int, passed_on: dict[str, np.ndarray]) -> DataProto:
    """Pad episodes to the longest of the batch and check them.

    Prompts are padded on the left, responses on the right. B rows, P and R the longest prompt and response.

    Args:
        episodes: In row order.
        pad_token_id: Fills the padding. A masked row without tokens gets one prompt and one response token of it, since
            verl's padding-free layout needs them; their mask is 0.
        passed_on: Columns of the input batch that stay in the output, each of length B.

    Returns:
        Tensors `prompts` (B, P), `responses` (B, R), `input_ids`, `attention_mask`, `position_ids` (B, P+R) int64,
        `response_mask` (B, R) int64, `rm_scores` (B, R) float32 with each turn's reward on its last sampled token, and
        `rollout_log_probs` (B, R) float32 when every trained row has them. Columns as `episode_columns` says.

    Raises:
        LedgerMismatchError: See `check_batch`.
    """
    num_rows = len(episodes)
    placeholder = np.full(1, pad_token_id, dtype=np.int32)
    prompt_rows = [e.prompt_ids if len(e.prompt_ids) else placeholder for e in episodes]
    response_rows = [e.response_ids if len(e.response_ids) else placeholder for e in episodes]
    max_prompt = max(len(row) for row in prompt_rows)
    max_response = max(len(row) for row in response_rows)

    input_ids = np.full((num_rows, max_prompt + max_response), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    response_mask = np.zeros((num_rows, max_response), dtype=np.int64)
    rewards = np.zeros((num_rows, max_response), dtype=np.float32)
    has_log_probs = all(e.log_probs is not None for e in episodes if not e.is_masked)
    log_probs = np.zeros_like(rewards) if has_log_probs else None
    for i, (episode, prompt, response) in enumerate(zip(episodes, prompt_rows, response_rows, strict=True)):
        start, stop = max_prompt - len(prompt), max_prompt + len(response)
        input_ids[i, start:max_prompt] = prompt
        input_ids[i, max_prompt:stop] = response
        attention_mask[i, start:stop] = 1
        if episode.is_masked:
            continue
        response_mask[i, : len(response)] = episode.response_mask
        rewards[i, : len(response)] = episode.rewards
        if log_probs is not None:
            log_probs[i, : len(response)] = episode.log_probs

    position_ids = attention_mask.cumsum(axis=-1)
    position_ids -= 1
    np.maximum(position_ids, 0, out=position_ids)
    arrays = {
        "prompts": input_ids[:, :max_prompt].copy(),
        "responses": input_ids[:, max_prompt:].copy(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": response_mask,
        "rm_scores": rewards,
    }
    if log_probs is not None:
        arrays["rollout_log_probs"] = log_probs
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    columns = {**passed_on, **episode_columns(episodes)}
    output = DataProto(
        batch=TensorDict(tensors, batch_size=num_rows),
        non_tensor_batch=columns,
        meta_info={"reward_extra_keys": list(VALIDATION_KEYS)},
    )
    check_batch(output, episodes)
    return output


def check_batch(batch: DataProto, episodes: Sequence[Episode]) -> None:
    """The two invariants, against records kept apart from the ledger.

    Raises:
        LedgerMismatchError: In some row the ids with mask 1 are not, in order, the ids that the engine returned; or the
            rewards of an unmasked row do not add up to the episode's return, or sit on tokens with mask 0.
    """
    is_trained = torch.tensor([not e.is_masked for e in episodes])
    response_mask = batch.batch["response_mask"].bool()
    # By numpy: torch would first list the position of every token, at twice the memory of the tokens.
    trained_ids = batch.batch["responses"].numpy()[response_mask.numpy()]
    sampled = [e.engine_ids for e in episodes if not e.is_masked]
    engine_ids = np.concatenate(sampled) if sampled else np.zeros(0, dtype=np.int32)
    num_expected = torch.tensor([0 if e.is_masked else len(e.engine_ids) for e in episodes])
    is_wrong_length = batch.batch["response_mask"].sum(dim=-1) != num_expected
    if is_wrong_length.any() or not np.array_equal(trained_ids, engine_ids):
        rows = torch.nonzero(is_wrong_length).flatten().tolist()
        raise LedgerMismatchError(
            f"expected the tokens with mask 1 to be exactly the {len(engine_ids)} ids that the engine returned, got "
            f"{len(trained_ids)} ids; rows whose number differs: {rows}. This batch must not be trained on: report it"
        )
    # Few tokens carry a reward; working on those alone keeps the memory of a whole batch in float64 away.
    rewards = batch.batch["rm_scores"]
    rows, columns = torch.nonzero(rewards, as_tuple=True)
    paid = rewards[rows, columns].double()
    zeros = torch.zeros(len(episodes), dtype=torch.float64)
    sums = zeros.index_add(0, rows, paid)
    off_mask = zeros.index_add(0, rows, paid.abs() * ~response_mask[rows, columns])
    returns = torch.tensor([0.0 if e.is_masked else e.episode_return for e in episodes], dtype=torch.float64)
    is_wrong = ((sums - returns).abs() > 1e-5 * (1.0 + zeros.index_add(0, rows, paid.abs()))) | (off_mask > 0)
    if is_wrong.any():
        row = int(torch.nonzero(is_wrong)[0])
        raise LedgerMismatchError(
            f"row {row} ({episodes[row].end_reason.value}): its token rewards add up to {sums[row]:.6f}, of "
            f"which {off_mask[row]:.6f} on tokens with mask 0, but the episode's return is {returns[row]:.6f}. "
            "This batch must not be trained on: report it"
        )
    assert not response_mask[~is_trained].any()


def mark_missing_baselines(batch: DataProto, is_greedy: np.ndarray) -> None:
    """Make the reward of a masked greedy episode NaN: 0 would be a baseline that nobody played.

    Args:
        batch: What `assemble` made; changed in place.
        is_greedy: Whether the row is a greedy baseline (verl's ReMax), which the trainer only sums the rewards of.
    """
    is_missing = torch.from_numpy(is_greedy & batch.non_tensor_batch[MASKED_ROW_KEY])
    batch.batch["rm_scores"][is_missing, 0] = torch.nan


VALIDATION_KEYS = ("acc", "num_assistant_turns", "num_env_steps", "end_reason")
"""Columns that verl's validation averages per `data_source`; text and None are left out by verl."""


def episode_columns(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """One value per episode and column, the same columns for every batch."""
    columns = {
        "acc": object_array([e.success for e in episodes]),
        "end_reason": object_array([e.end_reason.value for e in episodes]),
        MASKED_ROW_KEY: np.array([e.is_masked for e in episodes], dtype=bool),
        "is_failed": np.array([e.end_reason is EndReason.FAILED for e in episodes], dtype=bool),
        BOOTSTRAPPED_ROW_KEY: np.array([e.is_bootstrapped for e in episodes], dtype=bool),
        "is_truncated": np.array([e.end_reason in TRUNCATION_REASONS for e in episodes], dtype=bool),
        "episode_return": np.array([e.episode_return for e in episodes], dtype=np.float64),
        "num_assistant_turns": np.array([e.num_assistant_turns for e in episodes], dtype=np.int32),
        "num_restarts": np.array([e.num_restarts for e in episodes], dtype=np.int32),
        "failure": object_array([e.failure for e in episodes]),
        "renderings": object_array([e.renderings for e in episodes]),
        "service": object_array([e.service for e in episodes]),
        # verl counts every message, the user's first one included.
        "__num_turns__": np.array([1 + e.num_assistant_turns * 2 for e in episodes], dtype=np.int32),
        # verl's trainer looks into it for images; observations are text.
        "multi_modal_inputs": object_array([{} for _ in episodes]),
    }
    for name in EpisodeStats.__dataclass_fields__:
        columns[name] = np.array([getattr(e.stats, name) for e in episodes])
    return columns


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array; numpy would make a matrix of values of equal length."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
