# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How far a rollout is, and what it came to, in one line each.

Owns: what an agent worker counts while it plays, and the words of the progress line and of the summary. Refuses to
know: Ray, and who asks; showing the line is `progress_display.py`'s.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from recipe.agent_env.rollout.episode import Episode


@dataclass(kw_only=True, slots=True)
class RolloutProgress:
    """What one agent worker counts during one rollout; plain integers, so that counting costs nothing."""

    num_rows: int = 0
    """Episodes of this rollout."""
    num_in_flight: int = 0
    """Started and not ended; those that wait for a place at the service are among them."""
    num_finished: int = 0
    """Ended, other than as failed."""
    num_failed: int = 0
    """Ended as failed, after all restarts."""
    num_turns: int = 0
    """Replies sampled, those of attempts that were played again included."""
    num_tokens: int = 0
    """Tokens sampled."""

    def begin(self, num_rows: int) -> None:
        """Start counting a rollout anew."""
        for field in fields(self):
            setattr(self, field.name, 0)
        self.num_rows = num_rows

    @contextmanager
    def episode(self) -> Iterator[list[Episode]]:
        """Count one episode in and out; the list takes the episode. None in it: an exception ended it."""
        played: list[Episode] = []
        self.num_in_flight += 1
        try:
            yield played
        finally:
            self.num_in_flight -= 1
            has_failed = not played or played[0].failure is not None
            self.num_failed += has_failed
            self.num_finished += not has_failed

    def count_reply(self, num_tokens: int) -> None:
        """Count one sampled reply."""
        self.num_turns += 1
        self.num_tokens += num_tokens

    def snapshot(self) -> dict[str, int]:
        """The counts as plain values, for `add_up`."""
        return asdict(self)


def add_up(snapshots: Iterable[dict[str, int]]) -> RolloutProgress:
    """The sum over all workers."""
    total = RolloutProgress()
    for snapshot in snapshots:
        for name, value in snapshot.items():
            setattr(total, name, getattr(total, name) + value)
    return total


def progress_line(now: RolloutProgress, turns_per_s: float, tokens_per_s: float) -> str:
    """One line about a rollout that is going on."""
    num_ended = now.num_finished + now.num_failed
    return (
        f"rollout: {num_ended} of {now.num_rows} episodes ended, {now.num_in_flight} in flight, "
        f"{now.num_failed} failed | {turns_per_s:,.1f} turns/s, {tokens_per_s:,.0f} tokens/s"
    )


def summary_line(episodes: Sequence[Episode], seconds: float, meta_info: dict[str, Any]) -> str:
    """One line about a rollout that has ended.

    Args:
        episodes: All of them.
        seconds: How long the rollout took.
        meta_info: The batch's; `global_steps` and `validate` are read.

    Returns:
        Return, success and turns are means over the episodes that were played.
    """
    played = [episode for episode in episodes if not episode.is_masked or episode.is_withheld]
    what = "validation" if meta_info.get("validate") else "rollout"
    parts = [f"{len(episodes)} episodes in {seconds:.1f} s"]
    if played:
        known = [episode.success for episode in played if episode.success is not None]
        parts.append(f"return {np.mean([episode.episode_return for episode in played]):.3g}")
        if known:
            parts.append(f"solved {np.mean(known):.1%}")
        parts.append(f"{np.mean([episode.num_assistant_turns for episode in played]):.1f} turns")
    num_tokens = sum(len(episode.engine_ids) for episode in episodes)
    if seconds > 0:
        parts.append(f"{num_tokens / seconds:,.0f} tokens/s")
    ends = Counter(episode.end_reason.value for episode in episodes)
    ended = ", ".join(f"{count} {reason}" for reason, count in ends.most_common())
    return f"step {meta_info.get('global_steps', '?')} {what}: {', '.join(parts)}; ended as {ended}"
