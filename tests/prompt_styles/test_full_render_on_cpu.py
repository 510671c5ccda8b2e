# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An episode's ids against the full rendering by the family's own template and tokenizer."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.prompt_styles.families import FAMILIES, TOOLS, conversations

RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def full_ids(tokenizer, messages, tools, **options):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **options)


def full_text(tokenizer, messages, tools, **options):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def canonical_turn(tokenizer, messages, tools, index, end):
    """The ids that a policy samples when it writes message `index` exactly as the template does."""
    before = full_text(tokenizer, messages[:index], tools, add_generation_prompt=True)
    after = full_text(tokenizer, messages[: index + 2], tools)
    assert after.startswith(before)
    upto_end = before + after[len(before) :].partition(end)[0] + end
    before_ids = tokenizer.encode(before, add_special_tokens=False)
    ids = tokenizer.encode(upto_end, add_special_tokens=False)
    assert ids[: len(before_ids)] == before_ids
    return ids[len(before_ids) :]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@RANDOM
@given(data=st.data())
def test_episode_ids_equal_the_full_rendering(family, data):
    """P2, P13: prompt, sampled turns and deltas, joined, are the template's ids; prompts only ever grow."""
    conversation = data.draw(conversations(family))
    messages, tools = conversation.messages, conversation.tools
    tokenizer, style = family.tokenizer(), family.build()
    end = tokenizer.convert_ids_to_tokens(style.end_of_turn_ids[0])
    turns = conversation.turns()
    ids = style.encode_prompt(messages[: turns[0]], tools)
    assert ids == full_ids(tokenizer, messages[: turns[0]], tools, add_generation_prompt=True)
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        sampled = canonical_turn(tokenizer, messages, tools, turn, end)
        assert style.is_turn_closed(sampled)
        delta = style.encode_observation(messages[turn + 1 : following], turn_is_closed=True)
        ids = ids + sampled + delta
        assert ids == full_ids(tokenizer, messages[:following], tools, add_generation_prompt=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@RANDOM
@given(data=st.data())
def test_history_in_the_prompt_equals_the_full_rendering(family, data):
    """P13: assistant history with calls and empty content is rendered as the template does."""
    conversation = data.draw(conversations(family))
    style, tokenizer = family.build(), family.tokenizer()
    expected = full_ids(tokenizer, conversation.messages, conversation.tools, add_generation_prompt=True)
    assert style.encode_prompt(conversation.messages, conversation.tools) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_prompt_without_header_is_a_prefix(family):
    style = family.build()
    messages = [{"role": "user", "content": "u"}]
    tools = TOOLS if family.takes_tools else None
    bare = style.encode_prompt(messages, tools, add_header=False)
    assert style.encode_prompt(messages, tools)[: len(bare)] == bare
    delta = style.encode_observation(messages, turn_is_closed=True, add_header=False)
    assert style.encode_observation(messages, turn_is_closed=True)[: len(delta)] == delta


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_open_turn_gets_its_end_token_first(family):
    """P4, P15: for every family."""
    style = family.build()
    observation = [{"role": "user", "content": "u"}]
    closed = style.encode_observation(observation, turn_is_closed=True)
    assert style.encode_observation(observation, turn_is_closed=False) == [style.end_of_turn_ids[0], *closed]
