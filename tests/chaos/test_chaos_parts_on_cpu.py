# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The chaos suite itself: it finds nothing where nothing is wrong, and finds every kind of wrong row.

One small run without faults is played once; each test then spoils a copy of what it left.
"""

import asyncio
import copy
import dataclasses
import json

import numpy as np
import pytest

from recipe.agent_env.client.protocol import EnvProtocol
from recipe.agent_env.rollout.episode import EndReason
from tests.chaos.__main__ import find_problems
from tests.chaos.fault_proxy import MARKER
from tests.chaos.row_check import find_wrong_rows, read_ledger
from tests.chaos.run import run_chaos
from tests.rollout.scripted_policy import encode

NUM_EPISODES = 12


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    played = asyncio.run(run_chaos(folder, num_episodes=NUM_EPISODES, fault_rate=0.0, num_restarts=0, seed=1))
    return played, read_ledger(played.ledger)


@pytest.fixture
def parts(outcome):
    """Rows, policies and ledger that a test may spoil."""
    played, ledger = outcome
    return list(played.episodes), copy.deepcopy(played.policies), copy.deepcopy(ledger)


def test_run_without_faults_is_clean(outcome):
    played, ledger = outcome
    report = played.report
    assert find_wrong_rows(played.episodes, played.policies, ledger) == {}
    counts = [report[key] for key in ("finished", "masked", "replayed", "rows_wrong_or_lost", "sessions_left")]
    assert counts == [NUM_EPISODES, 0, 0, 0, 0]
    assert {episode.end_reason for episode in played.episodes} > {EndReason.TERMINATED}
    assert any(reply.move is None for policy in played.policies for reply in policy.attempts[-1].replies)
    json.dumps(report)


def moves_of(ledger, episode) -> list[dict]:
    """The ledger's moves of a row that has at least two."""
    for lines in ledger.values():
        moves = [line for line in lines if line["event"] == "step"]
        if moves and len(moves) == episode.stats.num_env_steps and moves[0]["reward"] in np.round(episode.rewards, 4):
            return lines
    raise AssertionError("no environment stands behind the row")


def longest(episodes) -> int:
    """A row with several moves that went well."""
    return max(range(len(episodes)), key=lambda number: episodes[number].stats.num_env_steps)


def test_action_applied_twice_is_found(parts):
    episodes, policies, ledger = parts
    row = longest(episodes)
    lines = moves_of(ledger, episodes[row])
    lines.insert(2, lines[1])
    assert "applied" in find_wrong_rows(episodes, policies, ledger)[row]


def test_action_never_applied_is_found(parts):
    episodes, policies, ledger = parts
    row = longest(episodes)
    lines = moves_of(ledger, episodes[row])
    lines.remove(next(line for line in lines if line["event"] == "step"))
    assert "applied" in find_wrong_rows(episodes, policies, ledger)[row]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("reward", 7.0, "rewards are not those"), ("observation", "Room of another", "was answered")],
)
def test_other_answer_than_the_environment_gave_is_found(parts, field, value, text):
    episodes, policies, ledger = parts
    row = longest(episodes)
    first_move = next(line for line in moves_of(ledger, episodes[row]) if line["event"] == "step")
    first_move[field] = value
    assert text in find_wrong_rows(episodes, policies, ledger)[row]


def spoil(episode, **changes):
    """The row with other fields."""
    return dataclasses.replace(episode, **changes)


def test_tokens_that_were_never_sampled_are_found(parts):
    episodes, policies, ledger = parts
    ids = episodes[0].response_ids.copy()
    ids[0] += 1
    episodes[0] = spoil(episodes[0], response_ids=ids)
    assert "not the sampled ones" in find_wrong_rows(episodes, policies, ledger)[0]


def test_reward_on_another_token_is_found(parts):
    episodes, policies, ledger = parts
    episodes[0] = spoil(episodes[0], rewards=np.roll(episodes[0].rewards, 1))
    assert "rewards are not those" in find_wrong_rows(episodes, policies, ledger)[0]


def test_wrong_end_is_found(parts):
    episodes, policies, ledger = parts
    episodes[0] = spoil(episodes[0], end_reason=EndReason.CONTEXT_FULL)
    assert "ended as context_full" in find_wrong_rows(episodes, policies, ledger)[0]


def test_two_rows_of_one_environment_are_found(parts):
    episodes, policies, ledger = parts
    episodes[1], policies[1] = episodes[0], policies[0]
    assert "behind two rows" in find_wrong_rows(episodes, policies, ledger)[1]


def test_failed_row_with_tokens_is_found(parts):
    episodes, policies, ledger = parts
    episodes[0] = spoil(episodes[0], end_reason=EndReason.FAILED, failure="made up")
    assert "failed row with tokens" in find_wrong_rows(episodes, policies, ledger)[0]


def test_page_of_the_infrastructure_in_a_prompt_is_found(parts):
    episodes, policies, ledger = parts
    policies[0].attempts[0].last_context = policies[0].attempts[0].last_context + encode(MARKER)
    assert "page of the proxy" in find_wrong_rows(episodes, policies, ledger)[0]


def test_client_that_repeats_steps_blindly_is_found(tmp_path, monkeypatch):
    """P73: the promise is broken in the product itself; answers are lost, and actions are applied twice."""
    step = EnvProtocol.step

    def repeatable_step(self, env_name, env_id, action, *, step_index):
        return dataclasses.replace(step(self, env_name, env_id, action, step_index=None), is_repeatable=True)

    monkeypatch.setattr(EnvProtocol, "step", repeatable_step)
    played = asyncio.run(
        run_chaos(tmp_path, num_episodes=24, fault_rate=0.25, num_restarts=0, seed=1, kinds=("drop_after",))
    )
    wrong = played.report["wrong_rows"].values()
    assert played.report["rows_wrong_or_lost"] > 0 and all("applied" in text for text in wrong)


def test_run_is_bad_when_anything_is_wrong_lost_left_or_unproven(outcome):
    good = {**outcome[0].report, "faults_injected": {"total": 1, "delay": 1}}
    assert find_problems(good, ("delay",)) == []
    assert "never injected: html" in find_problems(good, ("delay", "html"))[0]
    assert "rows are wrong or lost" in find_problems({**good, "rows_wrong_or_lost": 1}, ())[0]
    assert "still open" in find_problems({**good, "sessions_left": 1}, ())[0]
    assert "missing" in find_problems({**good, "finished": NUM_EPISODES - 1}, ())[0]
