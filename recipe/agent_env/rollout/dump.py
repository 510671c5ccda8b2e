# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Episodes as people and tools read them after a run: text, ids, mask and numbers per token, turn by turn.

Owns the columns of the JSONL dumps. Reads an assembled batch; changes nothing in it.
"""

from typing import Any

import numpy as np
from verl import DataProto

from recipe.agent_env.rollout.token_texts import TokenTexts

_TOKEN_COLUMNS = {
    "rewards": "rm_scores",
    "advantages": "advantages",
    "returns": "returns",
    "log_probs": "old_log_probs",
    "rollout_log_probs": "rollout_log_probs",
}
_EPISODE_COLUMNS = (
    "env_name",
    "seed",
    "env_kwargs",
    "uid",
    "rollout_index",
    "end_reason",
    "acc",
    "episode_return",
    "num_restarts",
    "failure",
    "renderings",
    "service",
)


def dump_columns(batch: DataProto, tokenizer: Any) -> dict[str, list[Any]]:
    """Columns of a dump, one value per row.

    Args:
        batch: An assembled batch; token columns that it lacks are left out.
        tokenizer: For the text; control tokens stay visible.

    Returns:
        `prompt_ids`, `response_ids` and the text of each token (`*_tokens`), `response_mask`, per-token `rewards`,
        `advantages`, `returns`, `log_probs` (trainer), `rollout_log_probs` (engine), each without padding; `turns`, a
        list of `{reply, observation, reward}`; and what the episode was.
    """
    tensors = {name: batch.batch[key].numpy() for name, key in _TOKEN_COLUMNS.items() if key in batch.batch.keys()}
    prompts, responses = batch.batch["prompts"].numpy(), batch.batch["responses"].numpy()
    attention_mask = batch.batch["attention_mask"].numpy().astype(bool)
    response_mask = batch.batch["response_mask"].numpy()
    texts = TokenTexts(tokenizer)
    names = ("prompt_ids", "prompt_tokens", "response_ids", "response_tokens", "response_mask", "turns")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    columns.update({name: [] for name in tensors})
    for i in range(len(batch)):
        num_response = int(attention_mask[i, prompts.shape[1] :].sum())
        response, mask = responses[i, :num_response], response_mask[i, :num_response]
        columns["prompt_ids"].append(prompts[i][attention_mask[i, : prompts.shape[1]]].tolist())
        columns["response_ids"].append(response.tolist())
        columns["response_mask"].append(mask.tolist())
        columns["prompt_tokens"].append(texts(columns["prompt_ids"][-1]))
        columns["response_tokens"].append(texts(columns["response_ids"][-1]))
        for name, values in tensors.items():
            columns[name].append([round(float(value), 6) for value in values[i, :num_response]])
        columns["turns"].append(_turns(response, mask, tensors["rewards"][i, :num_response], tokenizer))
    for name in _EPISODE_COLUMNS:
        if name in batch.non_tensor_batch:
            columns[name] = batch.non_tensor_batch[name].tolist()
    return columns


def _turns(response: np.ndarray, mask: np.ndarray, rewards: np.ndarray, tokenizer: Any) -> list[dict[str, Any]]:
    """One entry per sampled span, with the text that followed it."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    starts, stops = edges[::2], edges[1::2]
    next_starts = np.append(starts[1:], len(response))
    return [
        {
            "reply": tokenizer.decode(response[start:stop].tolist()),
            "observation": tokenizer.decode(response[stop:next_start].tolist()),
            "reward": round(float(rewards[start:stop].sum()), 6),
        }
        for start, stop, next_start in zip(starts, stops, next_starts, strict=False)
    ]
