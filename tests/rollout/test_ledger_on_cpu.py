# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The token ledger: mask, rewards and log-probs against a plain re-computation, on random episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.agent_env.rollout.ledger import TokenLedger

TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=6),  # sampled
        st.lists(st.floats(-2, 2, width=32), max_size=3),  # rewards of the turn
        st.lists(st.integers(0, 99), max_size=6),  # written after it
    ),
    max_size=6,
)


@given(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=5), turns=TURNS)
def test_ledger_equals_plain_recomputation(prompt, turns):
    ledger = TokenLedger(prompt)
    ids, mask, log_probs, rewards = [], [], [], []
    for sampled, paid, written in turns:
        ledger.add_sampled(sampled, [-float(i) for i in sampled])
        for reward in paid:
            ledger.add_reward(reward)
        ledger.add_written(written)
        ids += sampled + written
        mask += [1] * len(sampled) + [0] * len(written)
        log_probs += [-float(i) for i in sampled] + [0.0] * len(written)
        rewards += [0.0] * (len(sampled) - 1) + [sum(paid)] + [0.0] * len(written)
    assert ledger.prompt().tolist() == prompt
    assert ledger.response().tolist() == ids
    assert ledger.response_mask().tolist() == mask
    assert ledger.log_probs().tolist() == log_probs
    np.testing.assert_allclose(ledger.rewards(), np.asarray(rewards, dtype=np.float32), atol=1e-6)
    assert ledger.context_ids == prompt + ids


def test_context_only_ever_grows():
    ledger = TokenLedger([1])
    seen = [list(ledger.context_ids)]
    for add in (
        lambda: ledger.add_sampled([2, 3], None),
        lambda: ledger.add_written([4]),
        lambda: ledger.add_written([]),
    ):
        add()
        seen.append(list(ledger.context_ids))
    for before, after in zip(seen, seen[1:], strict=False):
        assert after[: len(before)] == before


def test_log_probs_are_none_when_one_turn_has_none():
    ledger = TokenLedger([1])
    ledger.add_sampled([2], [-0.5])
    ledger.add_sampled([3], None)
    assert ledger.log_probs() is None


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda: TokenLedger([]), "at least one prompt token"),
        (lambda: TokenLedger([1]).add_sampled([], []), "at least one sampled token"),
        (lambda: TokenLedger([1]).add_sampled([2], []), "got 0"),
        (lambda: TokenLedger([1]).add_reward(1.0), "before the first sampled turn"),
    ],
    ids=["no-prompt", "no-token", "log-probs-short", "reward-first"],
)
def test_impossible_entries_are_refused(act, match):
    with pytest.raises(ValueError, match=match):
        act()
