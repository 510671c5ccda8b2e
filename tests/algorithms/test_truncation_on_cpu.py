# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Truncation is not termination: episodes that were cut off, from the service to their advantages."""

import dataclasses

import numpy as np
import pytest
import torch

from recipe.agent_env.agent_dataset import EpisodeTokenizer
from recipe.agent_env.metrics import env_metrics, group_metrics, token_metrics
from recipe.agent_env.rollout.batch import assemble, episode_columns, mark_missing_baselines, object_array
from recipe.agent_env.rollout.episode import EndReason
from tests.algorithms.batches import GAMMA, compute
from tests.mock_env_server import MockEnvServer
from tests.rollout.episodes import make_episode
from tests.rollout.scripted_policy import MOVE_UP, decode, make_tokenizer
from tests.rollout.test_episode_on_cpu import always, play


@pytest.fixture
def server():
    with MockEnvServer() as server:
        yield server


def with_values(episodes, *, last_state_value: float):
    """The batch of `fit`, with values of 0 but for each row's last attended position."""
    batch = assemble(episodes, pad_token_id=0, passed_on={"uid": object_array(list(range(len(episodes))))})
    batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    batch.batch["values"] = torch.zeros_like(batch.batch["rm_scores"])
    for row, episode in enumerate(episodes):
        batch.batch["values"][row, len(episode.response_ids) - 1] = last_state_value
    return batch


def last_sampled(episode) -> int:
    return int(np.flatnonzero(episode.response_mask)[-1])


@pytest.mark.parametrize(
    ("script", "rules", "reason"),
    [
        ({}, {"max_turn": 2}, EndReason.MAX_TURN),
        ({"truncated": True}, {}, EndReason.ENV_TRUNCATED),
    ],
)
@pytest.mark.parametrize("bootstrap", [True, False])
async def test_value_of_the_last_state_counts_towards_the_return(server, bootstrap, script, rules, reason):
    """P29, both ways: an environment that never ends by itself."""
    server.script("game", always(reward=1.0, **script))
    episode, _ = await play(server, [MOVE_UP], bootstrap_on_truncation=bootstrap, **rules)
    assert (episode.end_reason, episode.is_bootstrapped, episode.success) == (reason, bootstrap, None)
    batch = with_values([episode, make_episode(rewards=[1.0])], last_state_value=3.0)
    _, returns = compute(batch, "gae", num_repeat=1)
    assert returns[0, last_sampled(episode)] == pytest.approx(1.0 + GAMMA * 3.0 if bootstrap else 1.0)
    assert batch.batch["token_level_scores"][0].sum() == episode.episode_return  # a return, not a score


async def test_last_state_is_what_the_next_turn_would_have_read(server):
    """The response of a cut episode is, but for one placeholder token, the context of the turn that was not played."""
    server.script("game", always())
    cut, _ = await play(server, [MOVE_UP], max_turn=2, bootstrap_on_truncation=True)
    longer, policy = await play(server, [MOVE_UP], max_turn=3)
    assert [*cut.prompt_ids, *cut.response_ids[:-1]] == policy.contexts[2]
    assert not cut.response_mask[last_sampled(cut) + 1 :].any()
    assert cut.response_ids[-1] == cut.response_ids[-2]
    assert decode(cut.response_ids[:-1]).endswith("<|im_start|>assistant\n")


async def test_empty_last_observation_still_has_a_state(server):
    server.script("game", always([], truncated=True))
    episode, _ = await play(server, [MOVE_UP], bootstrap_on_truncation=True)
    assert episode.is_bootstrapped
    assert decode(episode.response_ids[:-1]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("words", "fits"), [(10, True), (400, False)])
async def test_row_never_gets_longer_than_a_row_may_be(server, words, fits):
    """P55: a last observation that does not fit is left out, and the episode counts as over."""
    server.script("game", always([{"role": "user", "content": "go on " * words}]))
    tokenizer: EpisodeTokenizer = make_tokenizer(max_prompt_length=300)
    limits = {"max_prompt_length": 300, "max_response_length": 64}
    episode, _ = await play(server, [MOVE_UP], tokenizer=tokenizer, bootstrap_on_truncation=True, **limits)
    assert episode.end_reason is EndReason.CONTEXT_FULL
    assert episode.is_bootstrapped is fits
    assert len(episode.prompt_ids) + len(episode.response_ids) <= 300 + 64


@pytest.mark.parametrize("rules", [{}, {"on_parse_error": "terminate"}])
async def test_episode_that_ended_by_itself_is_not_bootstrapped(server, rules):
    server.script("game", always(done=True))
    reply = "<tool_call>\n{broken\n</tool_call><|im_end|>" if rules else MOVE_UP
    episode, _ = await play(server, [reply], bootstrap_on_truncation=True, **rules)
    assert episode.end_reason in (EndReason.TERMINATED, EndReason.PARSE_ERROR)
    assert not episode.is_bootstrapped
    assert episode.response_mask.all()


# To mask or to penalise


@pytest.mark.parametrize(("overlong_reward", "expected"), [(0.0, [1.0, 1.0]), (-0.75, [1.0, 0.25])])
async def test_overlong_end_is_penalised_on_its_last_turn(server, overlong_reward, expected):
    server.script("game", always(reward=1.0))
    episode, _ = await play(server, [MOVE_UP], max_turn=2, overlong_reward=overlong_reward)
    assert episode.rewards[episode.rewards != 0].tolist() == expected
    assert episode.episode_return == sum(expected)


@pytest.mark.parametrize("is_masked", [True, False])
async def test_unparsable_end_is_masked_or_penalised(server, is_masked):
    """P34."""
    server.script("game", always())
    ends = frozenset({EndReason.PARSE_ERROR}) if is_masked else frozenset()
    reply = "<tool_call>\n{broken\n</tool_call><|im_end|>"
    episode, _ = await play(server, [reply], on_parse_error="terminate", masked_end_reasons=ends)
    assert (episode.end_reason, episode.episode_return) == (EndReason.PARSE_ERROR, -0.5)
    batch = assemble([episode, make_episode(rewards=[1.0])], pad_token_id=0, passed_on={})
    assert batch.batch["response_mask"][0].any() != is_masked
    assert batch.batch["rm_scores"][0].sum() == (0.0 if is_masked else -0.5)


def test_masked_end_leaves_its_group():
    """P34: the group of two decides, whatever the masked episode was paid."""
    withheld = dataclasses.replace(make_episode(rewards=[9.0], end_reason=EndReason.PARSE_ERROR), is_withheld=True)
    batch = with_values([make_episode(rewards=[1.0]), make_episode(rewards=[0.0]), withheld], last_state_value=0.0)
    batch.non_tensor_batch["uid"] = object_array("aaa")
    advantages, _ = compute(batch, "rloo", num_repeat=3)
    assert advantages[:, 0].tolist() == [1.0, -1.0, 0.0]


def test_masked_end_is_still_counted_as_played():
    withheld = dataclasses.replace(make_episode(rewards=[0.0], end_reason=EndReason.MAX_TURN), is_withheld=True)
    episodes = [make_episode(rewards=[1.0], success=1.0), withheld]
    metrics = env_metrics({**episode_columns(episodes), "env_name": object_array("ee")})
    assert metrics["env/masked_episode_ratio"] == metrics["env/success_rate"] == metrics["env/truncated_ratio"] == 0.5


def test_greedy_episode_that_failed_is_no_baseline():
    batch = assemble(
        [make_episode(rewards=[1.0]), make_episode(end_reason=EndReason.FAILED)], pad_token_id=0, passed_on={}
    )
    mark_missing_baselines(batch, is_greedy=np.array([False, True]))
    assert torch.isnan(batch.batch["rm_scores"].sum(dim=-1)).tolist() == [False, True]


# Metrics that show a collapse


def test_policy_that_repeats_one_character_shows():
    """P35: `!!!!` forty times over."""
    mask = np.ones((1, 40), dtype=int)
    mask[0, 20:25] = 0
    assert token_metrics(np.full((1, 40), 0), mask)["env/repeated_token_ratio"] == 1.0
    assert token_metrics(np.arange(40).reshape(1, 40), mask)["env/repeated_token_ratio"] == 0.0
    assert token_metrics(np.zeros((1, 1)), np.ones((1, 1))) == {}


@pytest.mark.parametrize(
    ("scores", "flat"),
    [([0.5] * 4, 1.0), ([-0.3] * 4, 1.0), ([0.5, 0.5, 0.5, 0.51], 0.0), ([1.0, 1.0, 1.0, 0.0], 1.0)],
    ids=["equal", "equal negative", "spread", "only a masked row differs"],
)
def test_groups_without_spread_are_found(scores, flat):
    """P22."""
    is_masked = np.array([False, False, False, flat == 1.0 and scores[3] != scores[0]])
    uids = np.array(["a"] * 4, dtype=object)
    assert group_metrics(np.array(scores), uids, is_masked) == {"env/group_without_spread_ratio": flat}


def test_rows_without_groups_have_no_group_metric():
    assert group_metrics(np.ones(2), np.array(["a", "b"], dtype=object), np.zeros(2, dtype=bool)) == {}
