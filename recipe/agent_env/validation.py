# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Validation numbers whose denominators are exact, also when some episodes failed.

verl names a mean after the number of values that a row happened to have: with one of four rollouts failed, `mean@4` is
over the other rows only, and a `mean@3` appears beside it. Owns what replaces that. Knows nothing of trainers.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Chance that at least one of k rollouts drawn from these, without putting back, is solved.

    Args:
        num_rollouts: Rollouts of a row; at least k.
        num_solved: Those that solved it.
        k: Rollouts drawn.

    Source: the unbiased estimator of Chen et al., arXiv:2107.03374.
    """
    return 1.0 - math.comb(num_rollouts - num_solved, k) / math.comb(num_rollouts, k)


def reported_sizes(num_rollouts: int) -> list[int]:
    """The k of verl's `best@k`: 2, 4, 8, ... and the number of rollouts; only that where there is one rollout."""
    powers = [2**i for i in range(1, 32) if 2**i < num_rollouts]
    return [*powers, num_rollouts]


def with_exact_denominators(
    metrics: dict[str, float],
    data_sources: Sequence[str],
    uids: Sequence[str],
    columns: dict[str, list[Any]],
    *,
    num_rollouts: int,
) -> dict[str, float]:
    """Put right what verl made of episodes that do not count.

    Args:
        metrics: verl's validation metrics over `columns`.
        data_sources: Group of each episode, length B.
        uids: Row of each episode, length B.
        columns: Numbers of each episode, None where it does not count; `metrics.validation_columns`.
        num_rollouts: N, `val_kwargs.n`.

    Returns:
        `metrics` without keys `@k` of a k that is neither N nor one of verl's powers of two, and with
        `val-{core,aux}/<data_source>/<column>/mean@N`, the mean over rows of the mean over a row's episodes that count;
        `val-{core,aux}/<data_source>/acc/pass@k` where N > 1, over rows with at least k episodes that count;
        `val-aux/<data_source>/num_episodes`, those that count, and `num_unplayed_episodes`.
    """
    exact = dict(metrics)
    sizes = reported_sizes(num_rollouts)
    for data_source in dict.fromkeys(data_sources):
        of_source = [i for i, source in enumerate(data_sources) if source == data_source]
        by_row = {name: _by_row([(uids[i], values[i]) for i in of_source]) for name, values in columns.items()}
        core = "acc" if by_row.get("acc") else "reward"
        for name, rows in by_row.items():
            prefixes = tuple(f"val-{section}/{data_source}/{name}/" for section in ("core", "aux"))
            for key in [key for key in exact if key.startswith(prefixes)]:
                size = key.rpartition("@")[2].partition("/")[0]
                if size.isdigit() and int(size) not in sizes:
                    del exact[key]
            if rows:
                section = "core" if name == core else "aux"
                mean = float(np.mean([np.mean(values) for values in rows.values()]))
                exact[f"val-{section}/{data_source}/{name}/mean@{num_rollouts}"] = mean
        if num_rollouts > 1:
            for k in sizes:
                solved = [pass_at_k(len(v), int(sum(v)), k) for v in by_row.get("acc", {}).values() if len(v) >= k]
                if solved:
                    section = "core" if k == num_rollouts else "aux"
                    exact[f"val-{section}/{data_source}/acc/pass@{k}"] = float(np.mean(solved))
        num_counted = sum(len(values) for values in by_row["reward"].values())
        exact[f"val-aux/{data_source}/num_episodes"] = num_counted
        exact[f"val-aux/{data_source}/num_unplayed_episodes"] = len(of_source) - num_counted
    return exact


def _by_row(values: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    """The values of each row that count; rows without any are left out."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for uid, value in values:
        if value is not None and not isinstance(value, str):
            rows[uid].append(value)
    return dict(rows)
