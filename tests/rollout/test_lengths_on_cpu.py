# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Lengths and ends: each limit one below, at and one above, each way an engine ends a reply, and texts of megabytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.agent_env.agent_dataset import EpisodeTokenizer, PromptTooLongError
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from recipe.agent_env.rollout.episode import EndReason, EngineError, SampledReply, play_episode
from tests.mock_env_server import EnvScript, MockEnvServer, Step
from tests.prompt_styles.families import FAMILIES
from tests.rollout.scripted_policy import ScriptedPolicy, decode, encode, make_rules, make_spec, make_tokenizer

ROOM = pytest.mark.parametrize("room", [1, 0, -1], ids=["limit - 1", "limit", "limit + 1"])
GO_ON = [{"role": "user", "content": "go on"}]


@pytest.fixture
def server():
    with MockEnvServer() as server:
        server.script("game", EnvScript(steps=[Step(observation=GO_ON, reward=1.0)]))
        yield server


async def play(server, sample, *, tokenizer=None, **rules):
    async with AsyncEnvClient(EnvClientConfig(endpoint=server.url, request_timeout_s=5.0)) as client:
        return await play_episode(
            make_spec(),
            client=client,
            tokenizer=tokenizer or make_tokenizer(),
            sample=sample,
            rules=make_rules(**rules),
        )


@ROOM
@pytest.mark.parametrize(
    ("reply", "glue"),
    [("I go up<|im_end|>", "\n<|im_start|>"), ("I go <action>up</action>", "<|im_end|>\n<|im_start|>")],
    ids=["end token", "stop string"],
)
async def test_reply_limit_is_exact(server, reply, glue, room):
    """P15, P51, P54: a reply that ends by itself at the limit is whole; one token less room and it is cut."""
    ids = encode(reply)
    policy = ScriptedPolicy([ids])
    tokenizer = make_tokenizer(stop=["</action>"])
    episode = await play(server, policy, tokenizer=tokenizer, max_turn=2, max_response_length=len(ids) + room)
    is_cut = room < 0
    sampled = ids[:-1] if is_cut else ids
    between = policy.contexts[1][len(policy.contexts[0]) + len(sampled) :]
    assert policy.returned == [sampled] * 2
    assert episode.stats.num_replies_cut == 2 * is_cut
    assert len(server.episodes[0].actions) == 2 * (not is_cut)
    assert episode.episode_return == 2 * (-0.5 if is_cut else 1.0)
    assert decode(between).startswith("<|im_end|>\n<|im_start|>" if is_cut else glue)
    assert episode.response_mask.tolist() == [1] * len(sampled) + [0] * len(between) + [1] * len(sampled)


ENGINE_ENDS = {
    "length": (["many words and no end token at all, far beyond the limit"], EndReason.MAX_TURN, 1.0),
    "end token": (["up<|im_end|>"], EndReason.MAX_TURN, 0.0),
    "end of text": (["up<|endoftext|>"], EndReason.MAX_TURN, 0.0),
    "stop string": (["up</action>"], EndReason.MAX_TURN, 0.0),
    "abort": ([EngineError("aborted")], EndReason.FAILED, 0.0),
    "nothing": ([[]], EndReason.FAILED, 0.0),
}


@pytest.mark.parametrize(("replies", "reason", "cut"), ENGINE_ENDS.values(), ids=ENGINE_ENDS.keys())
async def test_every_end_of_an_engine_is_told_apart(server, replies, reason, cut):
    """P18, P51: only the limit makes a cut reply; only an engine that gave nothing masks the row."""
    tokenizer = make_tokenizer(stop=["</action>"])
    episode = await play(server, ScriptedPolicy(replies), tokenizer=tokenizer, max_turn=1, max_response_length=8)
    assert (episode.end_reason, episode.is_masked) == (reason, reason is EndReason.FAILED)
    assert episode.stats.num_replies_cut == cut
    assert len(episode.engine_ids) == (0 if reason is EndReason.FAILED else int(episode.response_mask.sum()))


@ROOM
async def test_engine_that_gives_more_than_asked_for_is_at_fault(server, room):
    """P55: a longer row than rows may be never reaches training."""

    async def sample(context_ids, max_tokens, turn):
        return SampledReply(ids=encode("x")[:1] * (max_tokens - room))

    episode = await play(server, sample, max_turn=1, max_response_length=8)
    assert episode.end_reason is (EndReason.FAILED if room < 0 else EndReason.MAX_TURN)
    assert room >= 0 or "does not honour max_tokens" in episode.failure


@ROOM
async def test_turn_limit_is_exact(server, room):
    """P51: an environment that ends on turn 3."""
    server.script("game", EnvScript(steps=[Step(observation=GO_ON), Step(observation=GO_ON), Step(done=True)]))
    episode = await play(server, ScriptedPolicy(["up<|im_end|>"]), max_turn=3 + room)
    assert episode.end_reason is (EndReason.MAX_TURN if room < 0 else EndReason.TERMINATED)
    assert episode.num_assistant_turns == min(3, 3 + room)


@ROOM
@pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
async def test_first_prompt_limit_is_exact(server, truncation, room):
    """P45, P48: without leave to cut, one token too many is `prompt_too_long`; with it, the observation gives way."""
    script = EnvScript(steps=[Step(done=True)])
    script.observation = [{"role": "user", "content": "a b c d e f g " * 20}]
    server.script("game", script)
    policy = ScriptedPolicy(["up<|im_end|>"])
    await play(server, policy)
    [whole] = policy.contexts
    limit = len(whole) + room
    policy = ScriptedPolicy(["up<|im_end|>"])
    tokenizer = make_tokenizer(max_prompt_length=limit, truncation=truncation)
    episode = await play(server, policy, tokenizer=tokenizer, max_prompt_length=limit)
    if room < 0 and truncation == "error":
        assert (episode.end_reason, episode.is_masked, policy.contexts) == (EndReason.PROMPT_TOO_LONG, True, [])
        return
    assert episode.end_reason is EndReason.TERMINATED
    assert (policy.contexts == [whole]) == (room >= 0)
    assert limit - 20 < len(episode.prompt_ids) <= limit
    assert episode.stats.num_observations_cut == (room < 0)


@ROOM
async def test_observation_limit_is_exact(server, room):
    """P49, P52: counted in tokens of the text, not of the template around it."""
    content = "a b c d e f g " * 20
    limit = len(encode(content)) + room
    server.script("game", EnvScript(steps=[Step(observation=[{"role": "user", "content": content}])]))
    policy = ScriptedPolicy(["up<|im_end|>"])
    episode = await play(server, policy, tokenizer=make_tokenizer(max_observation_tokens=limit), max_turn=2)
    assert episode.stats.num_observations_cut == (room < 0)
    assert (content in decode(policy.contexts[1])) == (room >= 0)


TOKENIZERS = pytest.mark.parametrize(
    "family", [FAMILIES[0], FAMILIES[5], FAMILIES[6], FAMILIES[7]], ids=lambda family: family.name
)
UNITS = st.text(alphabet="ab \n世😀e\u0301-=", min_size=1, max_size=4)
# Long enough also for Qwen's vocabulary, whose longest token has 128 characters.
LENGTHS = st.sampled_from([0, 3, 40, 300, 2_000, 12_000])


def make_pair(family, monkeypatch, **limits) -> tuple[EpisodeTokenizer, EpisodeTokenizer]:
    """A tokenizer, and one that encodes everything whole before it cuts."""
    options = {"max_response_length": 5, "truncation": "error", "max_observation_tokens": None, **limits}
    style = family.build()
    plain = EpisodeTokenizer(style, **options)
    monkeypatch.setattr(plain, "_ends_of_huge", lambda message, max_tokens: message)
    return EpisodeTokenizer(style, **options), plain


@TOKENIZERS
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(["user", "assistant", "user"]), UNITS, LENGTHS), max_size=3),
    limit=st.one_of(st.none(), st.integers(1, 12)),
    closed=st.booleans(),
)
def test_observation_is_the_same_as_if_it_had_been_encoded_whole(family, parts, limit, closed):
    """P48, P49: cut before encoding, and no other token; without a limit, what fits a row is untouched."""
    style = family.build()
    roles = ["user" if family.alternates else role for role, _, _ in parts]
    if family.alternates:
        roles = roles[:1]
    messages = [
        {"role": role, "content": unit * (length // len(unit))}
        for role, (_, unit, length) in zip(roles, parts, strict=False)
    ]
    if family.alternates and not messages:
        messages = [{"role": "user", "content": ""}]
    sampled = [*style.encode_text("k"), *([style.end_of_turn_ids[0]] if closed else [])]
    with pytest.MonkeyPatch.context() as monkeypatch:
        fast, plain = make_pair(family, monkeypatch, max_prompt_length=20, max_observation_tokens=limit)
        found, expected = fast.observation_delta(messages, sampled), plain.observation_delta(messages, sampled)
    row = 20 + 5
    assert found[1] == expected[1]
    assert found[0] == expected[0] or limit is None and len(found[0]) > row and len(expected[0]) > row


@TOKENIZERS
@settings(max_examples=40, deadline=None)
@given(
    unit=UNITS,
    length=LENGTHS,
    room=st.integers(5, 60),
    truncation=st.sampled_from(["error", "left", "right", "middle"]),
)
def test_first_prompt_is_the_same_as_if_it_had_been_encoded_whole(family, unit, length, room, truncation):
    """P50."""
    messages = [{"role": "user", "content": "k" + unit * (length // len(unit)) + "k"}]
    with pytest.MonkeyPatch.context() as monkeypatch:
        fast, plain = make_pair(family, monkeypatch, max_prompt_length=room, truncation=truncation)
        results = []
        for tokenizer in (fast, plain):
            try:
                results.append(tokenizer.first_prompt("", messages, []))
            except PromptTooLongError:
                results.append("too long")
    assert results[0] == results[1]


@pytest.mark.parametrize("limit", [None, 64])
@pytest.mark.parametrize("role", ["user", "system"])
def test_fifty_megabytes_cost_what_can_be_kept(monkeypatch, limit, role):
    """P48: counted in characters that are given to the tokenizer."""
    given_chars = []
    for name in ("_ordinary_ids", "token_spans"):
        whole = getattr(PieceEncoder, name)
        monkeypatch.setattr(
            PieceEncoder, name, lambda self, text, whole=whole: given_chars.append(len(text)) or whole(self, text)
        )
    tokenizer = make_tokenizer(max_prompt_length=256, max_observation_tokens=limit)
    observation = [{"role": role, "content": "a word " * (50_000_000 // 7)}]
    ids, was_cut = tokenizer.observation_delta(observation, encode("up<|im_end|>"))
    assert was_cut == (limit is not None and role == "user")
    assert len(ids) < 64 + 20 if was_cut else len(ids) > 256 + 64
    assert sum(given_chars) < 500_000
    given_chars.clear()
    with pytest.raises(PromptTooLongError, match=r"at least \d+ tokens, more than data.max_prompt_length=256"):
        tokenizer.first_prompt("task", observation, [])
    assert sum(given_chars) < 500_000
