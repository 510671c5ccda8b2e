# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The `env/*` metrics of a training batch, and what validation counts.

Owns names and denominators. Reads the columns that batch assembly writes; knows nothing of the trainer or of how
episodes are played.
"""

from typing import Any

import numpy as np

from recipe.agent_env.algorithms.groups import lacks_spread
from recipe.agent_env.rollout.episode import UNPLAYED_REASONS, EndReason

_PER_EPISODE = {
    "episode_return": "episode_return",
    "num_assistant_turns": "num_assistant_turns",
    "num_env_steps": "num_env_steps",
    "num_tool_calls": "num_tool_calls",
}
_PER_TURN_RATIO = {
    "parse_error_ratio": "num_parse_errors",
    "reply_cut_ratio": "num_replies_cut",
    "empty_reply_ratio": "num_empty_replies",
}


def env_metrics(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Metrics of one training batch.

    Args:
        columns: The batch's columns, as `rollout.batch.episode_columns` writes them plus `env_name`.

    Returns:
        `env/<quantity>/{mean,max,min}` over played episodes, those with a turn; ratios `env/*_ratio`, of which
        `failed_episode_ratio`, `masked_episode_ratio`, `restart_ratio` and `end_reason/*` are over all episodes and the
        others over played episodes or their turns; `env/all_masked`, 1 when nothing of the batch can be trained on;
        `env/success_rate` overall and `env/success_rate/<env_name>` where the environment says. A quantity without any
        episode to count is left out. `env/tokenize_time_ratio` is the share of the episodes' seconds that went into
        turning chat into tokens and replies into calls.
    """
    is_masked = columns["is_masked"]
    is_played = columns["num_assistant_turns"] > 0
    end_reasons = columns["end_reason"]
    metrics = {
        "env/failed_episode_ratio": float(np.mean(columns["is_failed"])),
        "env/masked_episode_ratio": float(np.mean(is_masked)),
        "env/restart_ratio": float(np.mean(columns["num_restarts"] > 0)),
        "env/all_masked": float(is_masked.all()),
    }
    for reason in EndReason:
        metrics[f"env/end_reason/{reason.value}"] = float(np.mean(end_reasons == reason.value))
    if not is_played.any():
        return metrics
    for name, column in _PER_EPISODE.items():
        values = columns[column][is_played]
        metrics[f"env/{name}/mean"] = float(values.mean())
        metrics[f"env/{name}/max"] = float(values.max())
        metrics[f"env/{name}/min"] = float(values.min())
    metrics["env/truncated_ratio"] = float(columns["is_truncated"][is_played].mean())
    num_turns = columns["num_assistant_turns"][is_played].sum()
    for name, column in _PER_TURN_RATIO.items():
        metrics[f"env/{name}"] = float(columns[column][is_played].sum() / num_turns)
    num_reread = columns["num_reread_tokens"][is_played].sum()
    if num_reread > 0:
        metrics["env/prefix_cache_hit_rate"] = float(columns["num_cached_tokens"][is_played].sum() / num_reread)
    seconds = {name: columns[f"{name}_s"][is_played].sum() for name in ("generate", "env", "tokenize")}
    if sum(seconds.values()) > 0:
        metrics["env/tokenize_time_ratio"] = float(seconds["tokenize"] / sum(seconds.values()))
    metrics.update(_success_rates(columns["env_name"], columns["acc"], is_played))
    return metrics


def group_metrics(scores: np.ndarray, uids: np.ndarray, is_masked: np.ndarray) -> dict[str, float]:
    """How many groups give nothing to compare: all scores equal, or fewer than two unmasked rows.

    Such a group has advantage 0 under every grouped estimator, but its tokens still enter the KL loss and the entropy.

    Args:
        scores: Score of each row, shape (B,).
        uids: Group of each row, shape (B,).
        is_masked: Shape (B,).

    Returns:
        `env/group_without_spread_ratio`, over groups; nothing when every row is its own group.
    """
    _, first_rows = np.unique(uids, return_index=True)
    if len(first_rows) == len(uids):
        return {}
    is_flat = lacks_spread(scores, uids, ~is_masked)
    return {"env/group_without_spread_ratio": float(is_flat[first_rows].mean())}


def token_metrics(responses: np.ndarray, response_mask: np.ndarray) -> dict[str, float]:
    """How repetitive the policy is.

    Args:
        responses: Token ids, shape (B, R).
        response_mask: Shape (B, R), nonzero on sampled tokens.

    Returns:
        `env/repeated_token_ratio`: share of sampled tokens that equal the sampled token right before them, over tokens
        that have one. A policy that collapsed to one character is near 1. Nothing when no token has one.
    """
    is_sampled = response_mask.astype(bool)
    has_neighbour = is_sampled[:, 1:] & is_sampled[:, :-1]
    if not has_neighbour.any():
        return {}
    is_repeated = responses[:, 1:] == responses[:, :-1]
    return {"env/repeated_token_ratio": float(is_repeated[has_neighbour].mean())}


def _success_rates(env_names: np.ndarray, acc: np.ndarray, is_played: np.ndarray) -> dict[str, float]:
    counted = fill_success(env_names, acc, is_played)
    rates = {}
    all_known: list[float] = []
    for env_name in sorted(set(env_names)):
        known = [value for value in counted[env_names == env_name] if value is not None]
        if known:
            rates[f"env/success_rate/{env_name}"] = float(np.mean(known))
            all_known.extend(known)
    if all_known:
        rates["env/success_rate"] = float(np.mean(all_known))
    return rates


def fill_success(env_names: Any, acc: Any, is_counted: Any) -> np.ndarray:
    """Success per episode with exact denominators.

    An environment that says of some episodes whether they were solved counts all its other played episodes (cut by a
    limit before it could say) as not solved. One that never says has no success rate. Masked episodes count nowhere.

    Args:
        env_names: Environment of each episode, shape (B,).
        acc: 1.0, 0.0 or None for each episode, shape (B,).
        is_counted: False for masked episodes, shape (B,).

    Returns:
        Object array, shape (B,): 1.0, 0.0, or None where the episode does not count.
    """
    env_names, acc, is_counted = (
        np.asarray(env_names),
        np.asarray(acc, dtype=object),
        np.asarray(is_counted, dtype=bool),
    )
    speaks = {
        name for name, value, counts in zip(env_names, acc, is_counted, strict=True) if counts and value is not None
    }
    filled = np.empty(len(acc), dtype=object)
    for i, (name, value, counts) in enumerate(zip(env_names, acc, is_counted, strict=True)):
        if counts and name in speaks:
            filled[i] = 0.0 if value is None else value
    return filled


def validation_columns(data_sources: Any, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What verl's validation averages, over the episodes that count.

    Args:
        data_sources: Group of each episode, shape (B,).
        columns: `reward`, `acc`, `end_reason` and other numbers, each a list of length B.

    Returns:
        The same columns with None (which verl leaves out) on masked episodes, `acc` filled as `fill_success` says, and
        one 0/1 column `end_reason/<reason>` over all episodes for each reason that occurred.
    """
    end_reasons = columns["end_reason"]
    is_counted = [EndReason(reason) not in UNPLAYED_REASONS for reason in end_reasons]
    counted: dict[str, list[Any]] = {}
    for name, values in columns.items():
        if name != "end_reason":
            counted[name] = [value if counts else None for value, counts in zip(values, is_counted, strict=True)]
    counted["acc"] = list(fill_success(data_sources, columns["acc"], is_counted))
    for reason in sorted(set(end_reasons)):
        counted[f"end_reason/{reason}"] = [float(end_reason == reason) for end_reason in end_reasons]
    return counted
