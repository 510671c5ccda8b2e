# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Formats of calls besides hermes: ours, and verl's by name."""

import asyncio
import json

import pytest

from recipe.agent_env.prompt_styles import PromptStyleError, get_prompt_style
from recipe.agent_env.prompt_styles.harmony import parse_harmony
from recipe.agent_env.prompt_styles.json_formats import parse_llama3_json, parse_mistral
from recipe.agent_env.prompt_styles.replies import MAX_CALLS, BrokenCall, Call
from recipe.agent_env.prompt_styles.reply_formats import get_reply_format
from recipe.agent_env.prompt_styles.verl_formats import MAX_CALL_CHARS, _VerlParser
from tests.prompt_styles import tokenizers
from tests.prompt_styles.families import TOOLS

WAIT = Call(name="wait", arguments={})
UP = Call(name="push", arguments={"direction": "up"})


def details(taken_apart):
    return [call.detail for call in taken_apart.calls if isinstance(call, BrokenCall)]


def kinds(taken_apart):
    return [call.kind if isinstance(call, BrokenCall) else call.name for call in taken_apart.calls]


LLAMA_WAIT = '{"name": "wait", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "found", "content"),
    [
        (LLAMA_WAIT, ["wait"], ""),
        (f"\n <|python_tag|> {LLAMA_WAIT}\n", ["wait"], ""),
        (f"{LLAMA_WAIT}; {LLAMA_WAIT}", ["wait", "wait"], ""),
        (f"{LLAMA_WAIT}\n{LLAMA_WAIT}", ["wait", "wait"], ""),
        ("I give up", [], "I give up"),
        ("", [], ""),
        (f"so: {LLAMA_WAIT}", [], f"so: {LLAMA_WAIT}"),
        ("<|python_tag|>", ["bad_json"], ""),
        ("<|python_tag|>print(1)", ["bad_json"], ""),
        ('{"name": "wait"', ["bad_json"], ""),
        ('{"name": "wait"}', ["bad_arguments"], ""),
        ('{"parameters": {}}', ["missing_name"], ""),
        ("<|python_tag|>[1]", ["not_an_object"], ""),
        (f"{LLAMA_WAIT} thanks", ["wait", "bad_json"], ""),
        ("<|python_tag|>" + "[" * 100_000, ["bad_json"], ""),
    ],
)
def test_llama3_json(text, found, content):
    taken_apart = parse_llama3_json(text, TOOLS)
    assert kinds(taken_apart) == found
    assert taken_apart.content == content


def test_llama3_json_tells_what_is_wrong():
    assert details(parse_llama3_json('{"name": 1 2}')) == [
        "is not valid JSON (Expecting ',' delimiter at character 11)"
    ]
    assert details(parse_llama3_json('{"name": "f"}')) == ['has no "parameters" that is a JSON object']


def test_llama3_json_without_tools_is_an_answer():
    assert parse_llama3_json(LLAMA_WAIT, []).content == LLAMA_WAIT
    assert kinds(parse_llama3_json(LLAMA_WAIT, None)) == ["wait"]
    assert kinds(parse_llama3_json(f"<|python_tag|>{LLAMA_WAIT}", [])) == ["wait"]


MISTRAL_WAIT = '{"name": "wait", "arguments": {}, "id": "abc"}'


@pytest.mark.parametrize(
    ("text", "found", "content"),
    [
        (f"[TOOL_CALLS][{MISTRAL_WAIT}]", ["wait"], ""),
        (f"so:\n[TOOL_CALLS] [{MISTRAL_WAIT}, {MISTRAL_WAIT}]\nthere", ["wait", "wait"], "so:\nthere"),
        (f"[TOOL_CALLS]{MISTRAL_WAIT}", ["wait"], ""),
        (f"[TOOL_CALLS][{MISTRAL_WAIT}][TOOL_CALLS][{MISTRAL_WAIT}]", ["wait", "wait"], ""),
        ("[{}]", [], "[{}]"),
        (" hm ", [], " hm "),
        ("[TOOL_CALLS]", ["bad_json"], ""),
        (f"[TOOL_CALLS][{MISTRAL_WAIT}", ["bad_json"], ""),
        (f"[TOOL_CALLS]x[TOOL_CALLS][{MISTRAL_WAIT}]", ["bad_json", "wait"], ""),
        ("[TOOL_CALLS][]", ["not_an_object"], ""),
        ("[TOOL_CALLS][1]", ["not_an_object"], ""),
        ('[TOOL_CALLS][{"name": "wait"}]', ["bad_arguments"], ""),
        ("[TOOL_CALLS]" + "[" * 100_000, ["bad_json"], ""),
    ],
)
def test_mistral(text, found, content):
    taken_apart = parse_mistral(text, TOOLS)
    assert kinds(taken_apart) == found
    assert taken_apart.content == content


def test_mistral_tells_what_is_wrong():
    assert details(parse_mistral("[TOOL_CALLS] {")) == [
        "is not valid JSON (Expecting property name enclosed in double quotes at character 2)"
    ]


CALL = "<|channel|>commentary to=functions.wait <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "found", "content"),
    [
        (f"{CALL}{{}}<|call|>", ["wait"], ""),
        (f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{CALL}{{}}<|call|>", ["wait"], ""),
        (
            f"<|channel|>final<|message|>a<|end|><|start|>assistant to=functions.wait{CALL}{{}}<|call|>{CALL}",
            ["wait"],
            "a",
        ),
        ("<|channel|>final<|message|>left<|return|>", [], "left"),
        ("<|channel|>final<|message|>lef", [], "lef"),
        ("<|channel|>commentary<|message|>preamble<|end|>", [], ""),
        ("plain", [], "plain"),
        ("<|channel|>final<|message|>a<|message|>b<|end|><|start|>assistant<|message|>c", [], "a<|message|>b\nc"),
        ("", [], ""),
        (f"{CALL}{{}}", ["unclosed_call"], ""),
        (f"{CALL}{{}}<|end|>", ["unclosed_call"], ""),
        (f"{CALL}{{<|call|>", ["bad_json"], ""),
        (f"{CALL}[]<|call|>", ["bad_arguments"], ""),
        (f"<|channel|>final<|message|>won<|return|><|start|>assistant{CALL}{{}}<|call|>", [], "won"),
    ],
)
def test_harmony(text, found, content):
    taken_apart = parse_harmony(text, TOOLS)
    assert kinds(taken_apart) == found
    assert taken_apart.content == content


def test_harmony_tells_what_is_wrong():
    assert details(parse_harmony(f"{CALL}{{}}")) == ["is not closed with <|call|>"]
    assert details(parse_harmony(f"{CALL}[]<|call|>")) == ["has arguments that are no JSON object"]
    assert details(parse_harmony(f"{CALL}{{<|call|>")) == [
        "is not valid JSON (Expecting property name enclosed in double quotes at character 1)"
    ]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_llama3_json, LLAMA_WAIT * (MAX_CALLS + 1)),
        (parse_mistral, f"[TOOL_CALLS][{MISTRAL_WAIT}]" * (MAX_CALLS + 1)),
    ],
    ids=["llama3_json", "mistral"],
)
def test_more_calls_than_the_limit_are_all_broken(parse, text):
    beyond = parse(text, TOOLS)
    assert kinds(beyond) == ["too_long"] * (MAX_CALLS + 1)
    assert details(beyond) == [f"belongs to a turn with more than {MAX_CALLS} calls"] * (MAX_CALLS + 1)
    assert beyond.content == ""
    within = parse(text[: len(text) * MAX_CALLS // (MAX_CALLS + 1)], TOOLS)
    assert kinds(within) == ["wait"] * MAX_CALLS


# One call of `push` with direction "up" and steps 2, as each of verl's parsers reads it.
VERL_CALLS = {
    "qwen3_coder": (
        "<tool_call>\n<function=push>\n<parameter=direction>\nup\n</parameter>\n<parameter=steps>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>push\n<arg_key>direction</arg_key>\n<arg_value>up</arg_value>\n<arg_key>steps</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=push>\n<parameter=direction>up</parameter>\n<parameter=steps>2</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="push">\n<parameter name="direction">up</parameter>\n'
        '<parameter name="steps">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>push<|tool_call_argument_begin|>"
        '{"direction": "up", "steps": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="push">\n<｜DSML｜parameter name="direction" string="true">up'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="steps" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
    "gemma4": '<|tool_call>call:push{direction:<|"|>up<|"|>,steps:2}<tool_call|>',
}
BROKEN_ENDS = {
    "qwen3_coder": "<tool_call><function=push",
    "glm": "<tool_call>push\n<arg_key>",
    "seed": "<seed:tool_call>push</seed:tool_call>",
    "minimax": '<invoke name="push">',
    "kimi": "<|tool_call_begin|>push",
    "deepseek_v4": '<｜DSML｜invoke name="push">',
    "gemma4": "<|tool_call>call:push{",
}
by_name = pytest.mark.parametrize("name", sorted(VERL_CALLS))


def verl_style(name):
    return get_prompt_style("chat_template")(tokenizers.chatml_tokenizer(), tool_parser=name)


@by_name
def test_call_is_read_by_the_parser_of_verl(name):
    style = verl_style(name)
    reply = style.parse_reply(style.encode_text("so\n" + VERL_CALLS[name]), TOOLS)
    assert reply.error is None
    assert reply.message["content"] == "so"
    [call] = reply.message["tool_calls"]
    assert call["function"]["name"] == "push"
    assert json.loads(call["function"]["arguments"]) == {"direction": "up", "steps": 2}


@by_name
def test_text_without_a_call_is_left_alone(name):
    style = verl_style(name)
    assert style.parse_reply(style.encode_text("I give up\n"), TOOLS).message["content"] == "I give up\n"


@by_name
def test_call_that_the_parser_of_verl_drops_is_an_error(name):
    """P57: verl's parsers leave out a broken call in silence; here nothing of the turn is sent."""
    style = verl_style(name)
    reply = style.parse_reply(style.encode_text(VERL_CALLS[name] + BROKEN_ENDS[name]), TOOLS)
    assert reply.error is not None
    assert reply.error.kind == "bad_json"
    assert reply.error.text == "One of the 2 tool calls cannot be read. No call of this turn was executed."
    assert reply.message["tool_calls"] == []
    assert (reply.calls_found, reply.calls_broken) == (2, 1)


@by_name
@pytest.mark.timeout(60)
def test_long_text_is_not_given_to_the_parser_of_verl(name):
    """Some of its patterns take time that grows with the square of the text."""
    parse = get_reply_format(name, tokenizers.chatml_tokenizer()).parse
    taken_apart = parse("so\n" + VERL_CALLS[name] + "x" * 1_000_000, TOOLS)
    assert (kinds(taken_apart), taken_apart.content) == (["too_long"], "so")
    many = parse("so\n" + VERL_CALLS[name] * (MAX_CALLS + 1), TOOLS)
    assert (kinds(many), many.content) == (["too_long"] * (MAX_CALLS + 1), "so")


@by_name
def test_limit_of_letters_is_exact(name):
    parse = get_reply_format(name, tokenizers.chatml_tokenizer()).parse
    filling = " " * (MAX_CALL_CHARS - len(VERL_CALLS[name]))
    before = "words " * 9_999
    within = parse(before + VERL_CALLS[name] + filling, TOOLS)
    beyond = parse(before + VERL_CALLS[name] + filling + " ", TOOLS)
    assert (kinds(within), within.content) == (["push"], before)
    assert (kinds(beyond), beyond.content) == (["too_long"], before)
    assert details(beyond) == [f"belongs to a turn with more than {MAX_CALL_CHARS} letters of calls"]


def test_limit_of_calls_is_exact():
    parse = get_reply_format("glm", tokenizers.chatml_tokenizer()).parse
    call = "<tool_call>wait</tool_call>"
    assert kinds(parse(call * MAX_CALLS, TOOLS)) == ["wait"] * MAX_CALLS
    assert kinds(parse(call * (MAX_CALLS + 1), TOOLS)) == ["too_long"] * (MAX_CALLS + 1)


def test_call_without_its_section_is_broken_where_it_begins():
    parse = get_reply_format("kimi", tokenizers.chatml_tokenizer()).parse
    taken_apart = parse("a\n\n<|tool_call_begin|>push<|tool_call_begin|>", TOOLS)
    assert (kinds(taken_apart), taken_apart.content) == (["bad_json", "bad_json"], "a\n")
    assert details(taken_apart) == ["cannot be read"] * 2


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [('{"steps": NaN}', "is not valid JSON (NaN is no JSON number)"), ("{", None), ("[1]", None)],
)
def test_json_that_the_parser_of_verl_lets_pass_is_checked(arguments, detail):
    """verl's kimi parser turns unreadable arguments into none at all; NaN would not survive the wire."""
    parse = get_reply_format("kimi", tokenizers.chatml_tokenizer()).parse
    taken_apart = parse(VERL_CALLS["kimi"].replace('{"direction": "up", "steps": 2}', arguments), TOOLS)
    assert details(taken_apart) == ([] if detail is None else [detail])


def test_parser_of_verl_that_fails_makes_all_calls_broken():
    class Failing:
        async def extract_tool_calls(self, text, tools):
            raise RecursionError(text)

    taken_apart = _VerlParser("glm", Failing())("so\n<tool_call>a</tool_call><tool_call>b</tool_call>", TOOLS)
    assert taken_apart.content == "so"
    assert kinds(taken_apart) == ["bad_json", "bad_json"]
    assert details(taken_apart) == ["cannot be read (RecursionError)"] * 2


@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_padding_is_taken_out_of_calls_only(pad):
    tokenizer = tokenizers.small_tokenizer(["<|im_start|>", "<|im_end|>", "<pad>"], pad_token=pad)
    parse = get_reply_format("gemma4", tokenizer).parse
    taken_apart = parse("<pad>" + VERL_CALLS["gemma4"].replace("up", "u<pad>p"), TOOLS)
    direction = "u<pad>p" if pad is None else "up"
    assert taken_apart.calls == [Call(name="push", arguments={"direction": direction, "steps": 2})]
    assert taken_apart.content == "<pad>"


async def test_parser_of_verl_can_be_asked_inside_an_event_loop():
    parse = get_reply_format("glm", tokenizers.chatml_tokenizer()).parse
    await asyncio.sleep(0)
    assert kinds(parse(VERL_CALLS["glm"], None)) == ["push"]


def test_tools_that_verl_cannot_describe_are_left_out():
    parse = get_reply_format("qwen3_coder", tokenizers.chatml_tokenizer()).parse
    nested = {
        "type": "function",
        "function": {"name": "push", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    as_text = Call(name="push", arguments={"direction": "up", "steps": "2"})
    assert parse(VERL_CALLS["qwen3_coder"], [nested]).calls == [as_text]
    described = {"type": "function", "function": {**TOOLS[0]["function"], "description": "d"}}
    as_number = Call(name="push", arguments={"direction": "up", "steps": 2})
    assert parse(VERL_CALLS["qwen3_coder"], [nested, described]).calls == [as_number]


def test_stop_tokens_of_a_parser_end_turns():
    special = ["<|im_start|>", "<|im_end|>", "<tool_call|>", "<|observation|>"]
    tokenizer = tokenizers.small_tokenizer(special, chat_template=tokenizers.template("chatml"))
    for name, text in [("gemma4", "<tool_call|>"), ("glm", "<|observation|>")]:
        style = get_prompt_style("chat_template")(tokenizer, tool_parser=name)
        assert style.stop_token_ids == tokenizer.convert_tokens_to_ids(["<|im_end|>", text])
        assert style.is_turn_closed([tokenizer.convert_tokens_to_ids(text)])


def test_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(PromptStyleError, match="unknown tool_parser 'hermess'; known: gpt-oss, hermes, .*, glm,"):
        get_prompt_style("chat_template")(tokenizers.chatml_tokenizer(), tool_parser="hermess")


def test_every_parser_of_verl_has_a_name_here():
    from verl.experimental.agent_loop.tool_parser import ToolParser

    for name in ToolParser._registry:
        assert get_reply_format(name, tokenizers.chatml_tokenizer())
