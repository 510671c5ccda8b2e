# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Groups: the rollouts of one row, what they are compared by, and which of them say nothing.

Owns group statistics. Knows nothing of turns, tokens or verl.
"""

from collections.abc import Sequence

import numpy as np
import torch

_EPSILON = 1e-6  # verl's, in GRPO's division by the group's spread


def group_numbers(*keys: np.ndarray | Sequence[object]) -> torch.Tensor:
    """Number the groups of entries that agree in all keys; int64, as long as each key."""
    numbers: dict[tuple[object, ...], int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in zip(*keys, strict=True)], dtype=torch.int64)


def normalise_in_groups(values: torch.Tensor, group: torch.Tensor, *, by_std: bool) -> torch.Tensor:
    """Each value against its group's mean, in units of the group's spread if asked for.

    Sums are in float64, so that equal float32 rewards have a spread of exactly 0 for any group size that fits a batch.

    Args:
        values: Shape (N,).
        group: Group number of each value, int64 (N,).
        by_std: Divide by the group's standard deviation (unbiased) + 1e-6, as verl's GRPO does. The result is then at
            most (n - 1) / sqrt(n) in size for a group of n.

    Returns:
        Shape (N,), the dtype of `values`; 0 for a value that is alone in its group.
    """
    exact = values.double()
    num_groups = int(group.max()) + 1 if len(group) else 0
    sizes = torch.bincount(group, minlength=num_groups).double()
    means = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, exact) / sizes
    centred = torch.where(sizes[group] > 1, exact - means[group], 0.0)
    if by_std:
        squares = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, centred**2)
        spread = torch.sqrt(squares / (sizes - 1).clamp(min=1))
        centred = centred / (spread[group] + _EPSILON)
    return centred.to(values.dtype)


def is_alone(uids: np.ndarray) -> np.ndarray:
    """Whether an entry has no other with its uid; bool, shape (N,)."""
    _, group, sizes = np.unique(uids, return_inverse=True, return_counts=True)
    return np.asarray(sizes[group] == 1)


def lacks_spread(
    scores: np.ndarray, uids: np.ndarray, is_trained: np.ndarray, *, tolerance: float = 1e-6
) -> np.ndarray:
    """Whether a row's group gives nothing to compare: fewer than two trained rows, or all scores equal.

    Args:
        scores: Score of each row, shape (B,).
        uids: Group of each row, shape (B,).
        is_trained: False for masked rows, shape (B,); their scores do not count.
        tolerance: Largest difference of scores that still is equal.

    Returns:
        bool, shape (B,); the same for all rows of a group.
    """
    _, group = np.unique(uids, return_inverse=True)
    num_groups = int(group.max()) + 1
    highest, lowest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(highest, group[is_trained], scores[is_trained])
    np.minimum.at(lowest, group[is_trained], scores[is_trained])
    num_trained = np.bincount(group, weights=is_trained, minlength=num_groups)
    is_flat = num_trained < 2
    is_flat |= np.where(num_trained > 0, highest - lowest, 0.0) <= tolerance
    return np.asarray(is_flat[group])
