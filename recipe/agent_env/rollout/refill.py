# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dynamic sampling: groups whose rollouts all scored the same teach nothing, so other rows are played in their place.

Owns which groups are given up, which rows come instead, and what is counted. Plays nothing itself. The training loader
is never drawn from: its order, and with it a resumed run, stays what it is without the filter.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from verl import DataProto

from recipe.agent_env.agent_dataset import AgentDataset
from recipe.agent_env.algorithms.groups import lacks_spread
from recipe.agent_env.metrics import fill_success
from recipe.agent_env.rollout.episode import Episode

METRIC_PREFIX = "group_filter/"
"""Meta info of a batch under such names becomes `env/group_filter/*`."""


class SpareRows:
    """Rows of the training data in a random order of their own, each at most once.

    Args:
        dataset: Training rows.
        seed: Of the order, with the step: the same after a resume.
        step: Training step.
        taken: Row numbers that the batch already holds.
    """

    def __init__(self, dataset: AgentDataset, *, seed: int, step: int, taken: set[int]):
        self._dataset = dataset
        order = np.random.default_rng([seed, step]).permutation(len(dataset)).tolist()
        self._rows = [row for row in order if row not in taken]

    def put_into(self, prompts: DataProto, groups: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Replace the rows of these groups, in place; whatever else a position holds (its uid) stays.

        Args:
            prompts: The batch.
            groups: Positions of each group.

        Returns:
            The groups that were replaced; fewer when the rows run out.
        """
        num_rows = min(len(groups), len(self._rows))
        taken, self._rows = self._rows[:num_rows], self._rows[num_rows:]
        for row, positions in zip(taken, groups, strict=False):
            for name, value in self._dataset[row].items():
                if name in prompts.non_tensor_batch:
                    for position in positions:
                        prompts.non_tensor_batch[name][position] = value
        return list(groups[:num_rows])


def flat_groups(episodes: Sequence[Episode], uids: np.ndarray, metric: str) -> list[np.ndarray]:
    """Positions of each group that gives nothing to compare, in order.

    Args:
        episodes: In row order.
        uids: Group of each row.
        metric: `reward` compares returns, `acc` whether the episode was solved (not known counts as not).
    """
    scores = np.array([e.episode_return if metric == "reward" else e.success or 0.0 for e in episodes])
    is_flat = lacks_spread(scores, uids, np.array([not e.is_masked for e in episodes]))
    return [np.flatnonzero(uids == uid) for uid in dict.fromkeys(uids[is_flat])]


def withhold(episodes: list[Episode], groups: Sequence[np.ndarray]) -> None:
    """Keep these groups out of training: their rows fill the batch with mask 0."""
    for position in (int(position) for group in groups for position in group):
        episodes[position] = dataclasses.replace(episodes[position], is_withheld=True)


def filter_metrics(
    played: Sequence[Episode],
    env_names: Sequence[str],
    *,
    num_rounds: int,
    group_size: int,
    num_flat: int,
    num_left: int,
) -> dict[str, float]:
    """What the filter did to one batch.

    Args:
        played: All episodes, also those that were given up.
        env_names: Environment of each of them.
        num_rounds: Rounds of play.
        group_size: Rollouts of one row.
        num_flat: Groups without spread among all that were played.
        num_left: Those of them that stayed in the batch, masked.

    Returns:
        `group_filter/num_rounds`, `/flat_group_ratio` (of the groups played), `/num_masked_groups`, and over all
        episodes that were played, since the batch holds a selection: `/episode_return/mean`, `/success_rate` where it
        is known.
    """
    is_counted = np.array([e.num_assistant_turns > 0 for e in played])
    metrics = {
        "num_rounds": float(num_rounds),
        "flat_group_ratio": num_flat * group_size / len(played),
        "num_masked_groups": float(num_left),
    }
    if is_counted.any():
        returns = np.array([e.episode_return for e in played])
        metrics["episode_return/mean"] = float(returns[is_counted].mean())
    solved = [value for value in fill_success(env_names, [e.success for e in played], is_counted) if value is not None]
    if solved:
        metrics["success_rate"] = float(np.mean(solved))
    return {f"{METRIC_PREFIX}{name}": value for name, value in metrics.items()}
