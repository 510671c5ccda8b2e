# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows against the ledger: is what would be trained on what really happened?

Owns the comparison. It takes the row, the policy's own record and the environments' ledger; none of the three knows the
others. Refuses to know: how any of them came about.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipe.agent_env.rollout.episode import EndReason, Episode
from tests.chaos.fault_proxy import MARKER
from tests.chaos.policy import Attempt, ChaosPolicy
from tests.rollout.scripted_policy import decode

PENALTY = -0.5
_KEY = re.compile(r"Room ([0-9a-f]{12})-0\.")
_ANY_KEY = re.compile(r"Room ([0-9a-f]{12})-\d+")

Ledger = dict[str, list[dict[str, Any]]]
"""Lines of each environment, by its key."""


def read_ledger(path: Path) -> Ledger:
    """All lines, by environment, in order."""
    ledger: Ledger = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        ledger.setdefault(entry["key"], []).append(entry)
    return ledger


def find_wrong_rows(episodes: list[Episode], policies: list[ChaosPolicy], ledger: Ledger) -> dict[int, str]:
    """Compare every row.

    Args:
        episodes: What was played, in the order of the rows.
        policies: The sampler of each row.
        ledger: What the environments say.

    Returns:
        What is wrong, by number of the row; empty when every row tells the truth.
    """
    wrong = {}
    used: Counter[str] = Counter()
    for number, (episode, policy) in enumerate(zip(episodes, policies, strict=True)):
        try:
            for attempt in policy.attempts:
                _check_attempt(attempt, ledger)
            if episode.end_reason is EndReason.FAILED:
                _check_masked(episode)
            else:
                key = _check_played(episode, policy.attempts[-1], ledger)
                used[key] += 1
                _expect(used[key] == 1, f"environment {key} stands behind two rows")
        except _Wrong as exc:
            wrong[number] = str(exc)
    return wrong


class _Wrong(Exception):
    """Row and ledger differ."""


def _expect(is_true: bool, text: str) -> None:
    if not is_true:
        raise _Wrong(text)


def _check_masked(episode: Episode) -> None:
    """A row that failed carries nothing to learn from, and says why."""
    _expect(bool(episode.failure), "a failed row without a reason")
    num_tokens = len(episode.response_ids) + len(episode.rewards)
    _expect(episode.is_masked and num_tokens == 0, "a failed row with tokens")


def _check_attempt(attempt: Attempt, ledger: Ledger) -> None:
    """No attempt, finished or not, was applied twice, out of order, or shown a page of the infrastructure."""
    context = decode(attempt.last_context)
    _expect(MARKER not in context, "the model read a page of the proxy")
    keys = set(_ANY_KEY.findall(context))
    _expect(len(keys) == 1, f"one attempt read the observations of {len(keys)} environments")
    sent = [reply.move for reply in attempt.replies if reply.move is not None]
    applied = [entry["move"] for entry in _moves(ledger, keys.pop())]
    _expect(applied == sent[: len(applied)], f"sent {sent}, applied {applied}")
    _expect(len(applied) >= len(sent) - 1, f"sent {sent}, applied {applied}: more than the last one is missing")


def _check_played(episode: Episode, attempt: Attempt, ledger: Ledger) -> str:
    """The row's tokens, actions, observations, rewards and end; returns the environment's key."""
    prompt = decode(episode.prompt_ids)
    found = _KEY.findall(prompt)
    _expect(len(found) == 1, "the prompt does not hold one first observation")
    key = found[0]
    moves = _moves(ledger, key)
    _expect(bool(ledger[key]) and ledger[key][0]["observation"] in prompt, "the prompt has another first observation")

    spans = list(_spans(episode.response_mask))
    sampled = [episode.response_ids[span].tolist() for span in spans]
    _expect(sampled == attempt.sampled, "the trained tokens are not the sampled ones")
    sent = [reply.move for reply in attempt.replies if reply.move is not None]
    _expect([move["move"] for move in moves] == sent, f"sent {sent}, applied {[move['move'] for move in moves]}")

    rewards = np.zeros(len(episode.response_ids))
    left = iter(moves)
    for number, (span, reply) in enumerate(zip(spans, attempt.replies, strict=True)):
        move = None if reply.move is None else next(left)
        rewards[span.stop - 1] = PENALTY if move is None else move["reward"]
        if number + 1 < len(spans):
            between = decode(episode.response_ids[span.stop : spans[number + 1].start])
            text = "Error:" if move is None else move["observation"]
            _expect(text in between, f"turn {number + 1} was answered {text!r}, the row has {between!r}")
    _expect(bool(np.allclose(episode.rewards, rewards, atol=1e-6)), "the rewards are not those that were paid")
    _expect(abs(episode.episode_return - rewards.sum()) < 1e-5, "the return is not the sum of what was paid")

    end = EndReason.MAX_TURN
    if moves and attempt.replies[-1].move is not None:
        end = EndReason.ENV_TRUNCATED if moves[-1]["truncated"] else end
        end = EndReason.TERMINATED if moves[-1]["terminated"] else end
    _expect(episode.end_reason is end, f"ended as {episode.end_reason.value}, should be {end.value}")
    return key


def _moves(ledger: Ledger, key: str) -> list[dict[str, Any]]:
    return [entry for entry in ledger.get(key, []) if entry["event"] == "step"]


def _spans(mask: np.ndarray) -> Iterator[slice]:
    """Each stretch of sampled tokens. A turn's tokens are followed by at least one that was not sampled."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(start), int(stop))
