# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The `qwen2_5` style against reference renderings and Qwen's real vocabulary."""

import json
from pathlib import Path

import pytest

from recipe.agent_env.prompt_styles import PromptStyleError, get_prompt_style
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer, small_tokenizer

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "qwen2_5_golden.jsonl").read_text(encoding="utf-8").splitlines()
]
IM_START, IM_END, TOOL_CALL = 151644, 151645, 151657


@pytest.fixture(scope="module")
def tokenizer():
    return qwen2_5_tokenizer()


@pytest.fixture(scope="module")
def style(tokenizer):
    return get_prompt_style("qwen2_5")(tokenizer)


def text_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['case']}-{row['add_generation_prompt']}")
def test_prompt_equals_reference_rendering(style, tokenizer, row):
    ids = style.encode_prompt(row["messages"], row["tools"], add_header=row["add_generation_prompt"])
    assert tokenizer.decode(ids) == row["text"]
    assert ids == text_ids(tokenizer, row["text"])


@pytest.mark.parametrize("row", [row for row in GOLDEN if row["add_generation_prompt"]], ids=lambda row: row["case"])
def test_deltas_extend_the_prompt_to_the_reference_rendering(style, tokenizer, row):
    """P2: an episode made of a prompt, sampled turns and deltas has the ids of the full rendering."""
    messages = row["messages"]
    first_turn = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    ids = style.encode_prompt(messages[:first_turn], row["tools"])
    header = "<|im_start|>assistant\n"
    replies = [part.partition("<|im_end|>")[0] for part in row["text"].split(header)[1:-1]]
    rest = messages[first_turn:]
    for reply in replies:
        observation = []
        rest = rest[1:]
        while rest and rest[0]["role"] != "assistant":
            observation.append(rest.pop(0))
        sampled = [*text_ids(tokenizer, reply), IM_END]
        before = list(ids)
        ids += sampled + style.encode_observation(observation, turn_is_closed=style.is_turn_closed(sampled))
        assert ids[: len(before)] == before
    assert ids == text_ids(tokenizer, row["text"])


def test_line_break_after_a_turn_is_there_once(style, tokenizer):
    """P2: the template's line break after the end-of-turn token belongs to the observation."""
    delta = style.encode_observation([{"role": "user", "content": "u"}], turn_is_closed=True)
    assert tokenizer.decode(delta) == "\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("sampled_end", ["</action>", "half a wor"], ids=["stop string", "length"])
def test_open_turn_is_closed_by_the_observation(style, tokenizer, sampled_end):
    """P4, P15: a turn without its end token gets it from the observation, and so with mask 0."""
    sampled = text_ids(tokenizer, sampled_end)
    assert not style.is_turn_closed(sampled)
    delta = style.encode_observation([{"role": "user", "content": "u"}], turn_is_closed=False)
    assert delta[0] == IM_END
    assert delta[1:] == style.encode_observation([{"role": "user", "content": "u"}], turn_is_closed=True)


def test_turn_is_closed_only_by_its_last_token(style):
    assert style.is_turn_closed([5, IM_END])
    assert not style.is_turn_closed([IM_END, 5])
    assert not style.is_turn_closed([])


@pytest.mark.parametrize("messages", [[], None], ids=["empty", "null"])
def test_empty_observation_is_the_header_alone(style, tokenizer, messages):
    delta = style.encode_observation(messages, turn_is_closed=True)
    assert tokenizer.decode(delta) == "\n<|im_start|>assistant\n"


def test_system_message_in_an_observation_is_a_turn_of_its_own(style, tokenizer):
    delta = style.encode_observation([{"role": "system", "content": "C"}], turn_is_closed=True, add_header=False)
    assert tokenizer.decode(delta) == "\n<|im_start|>system\nC<|im_end|>\n"


def test_results_of_two_calls_appear_once_each(style, tokenizer):
    """P10."""
    delta = style.encode_observation(
        [{"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}, {"role": "user", "content": "go"}],
        turn_is_closed=True,
    )
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_wire_arguments_are_rendered_as_an_object(style, tokenizer):
    """The wire carries arguments as a JSON string; the template is given the object."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":"é"}'}}
    ids = style.encode_prompt([{"role": "assistant", "content": "x", "tool_calls": [call]}], None, add_header=False)
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>assistant\nx\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>\n'
    )
    assert ids.count(TOOL_CALL) == 1


def test_empty_tools_are_no_tools(style):
    messages = [{"role": "user", "content": "u"}]
    assert style.encode_prompt(messages, []) == style.encode_prompt(messages, None)


def test_stop_settings_for_the_engine(tokenizer):
    style = get_prompt_style("qwen2_5")(tokenizer, stop=("</action>",))
    assert style.stop_token_ids == [IM_END]
    assert style.end_of_turn_ids == (IM_END,)
    assert style.stop == ["</action>"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinking": False, "a": 1}, "no switches .a, enable_thinking."),
        ({"tool_parser": "glm"}, "as hermes, not glm"),
    ],
    ids=["template switch", "other parser"],
)
def test_options_without_meaning_are_refused(tokenizer, options, message):
    with pytest.raises(PromptStyleError, match=message):
        get_prompt_style("qwen2_5")(tokenizer, **options)


def test_tokenizer_without_an_end_of_text_token_is_fine():
    tokenizer = small_tokenizer(["<|im_start|>", "<|im_end|>"])
    style = get_prompt_style("qwen2_5")(tokenizer)
    assert style.parse_stop_ids == set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


def test_tokenizer_without_chatml_tokens_is_refused():
    with pytest.raises(PromptStyleError, match="needs the tokens <|im_start|> and <|im_end|>".replace("|", r"\|")):
        get_prompt_style("qwen2_5")(small_tokenizer(special=["<s>"]))
