# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a sampled reply of `qwen2_5` says: well-formed calls, the whole family of broken ones, and noise."""

import json
import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.agent_env.prompt_styles import REPLY_ERROR_KINDS
from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from recipe.agent_env.prompt_styles.replies import MAX_CALLS
from recipe.agent_env.prompt_styles.reply_formats import get_reply_format
from tests.prompt_styles.families import FAMILIES, TOOLS
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer

STYLE = FAMILIES[0]
END = "<|im_end|>"
PUSH = '<tool_call>\n{"name": "push", "arguments": {"direction": "up"}}\n</tool_call>'
WAIT = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'


def ids_of(text):
    return qwen2_5_tokenizer().encode(text, add_special_tokens=False)


def parse(text, tools=TOOLS):
    return STYLE.build().parse_reply(ids_of(text), tools)


def functions(reply):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in reply.message["tool_calls"]]


def test_canonical_call_is_an_openai_message():
    reply = parse(f"The box is above me.\n{PUSH}{END}")
    call = reply.message["tool_calls"][0]
    assert reply.error is None
    assert (reply.calls_found, reply.calls_broken) == (1, 0)
    assert reply.message["role"] == "assistant"
    assert reply.message["content"] == "The box is above me."
    assert call["type"] == "function"
    assert call["function"] == {"name": "push", "arguments": '{"direction": "up"}'}
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_several_calls_keep_their_order_and_have_ids_of_their_own():
    """P62: all calls of a turn are in the message."""
    reply = parse(f"{PUSH}\n{WAIT}\n{PUSH}{END}")
    assert [name for name, _ in functions(reply)] == ["push", "wait", "push"]
    assert len({call["id"] for call in reply.message["tool_calls"]}) == 3


def test_same_reply_has_the_same_call_ids():
    assert parse(f"{PUSH}{END}") == parse(f"{PUSH}{END}")
    assert parse(f"{PUSH}{END}").message["tool_calls"][0]["id"] != parse(f"{WAIT}{END}").message["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments":  {"direction": "up"}, "name": "push"}',
        '{"name":"push","arguments":{"direction":"up"},"id":"x"}',
        ' \n{"name": "pu\\u0073h", "arguments": {"direction": "up"}}\t ',
        '{"name": "wait", "name": "push", "arguments": {"direction": "up"}}',
    ],
    ids=["other order and spaces", "further keys", "escapes and blanks", "key twice"],
)
def test_uncommon_spellings_are_read(call):
    """P1: however the call is spelled; the ids stay what they are."""
    assert functions(parse(f"<tool_call>{call}</tool_call>{END}")) == [("push", '{"direction": "up"}')]


def test_non_ascii_arguments_stay_readable():
    body = '{"name": "push", "arguments": {"direction": "\\u5317\\u4eac \\ud83d\\ude00 é"}}'
    reply = parse(f"<tool_call>{body}</tool_call>")
    assert functions(reply) == [("push", '{"direction": "北京 😀 é"}')]


def test_half_of_a_surrogate_pair_becomes_a_replacement_character():
    reply = parse('<tool_call>{"name": "push", "arguments": {"direction": "\\ud83d"}}</tool_call>')
    assert functions(reply) == [("push", '{"direction": "\ufffd"}')]
    json.dumps(reply.message, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('<tool_call>\n{"name": "move", "arguments": {"d": "up"\n</tool_call>', "bad_json", "not valid JSON"),
        ("<tool_call>{'name': 'push', 'arguments': {}}</tool_call>", "bad_json", "not valid JSON"),
        ('<tool_call>{"name": "push", "arguments": {}} please</tool_call>', "bad_json", "Extra data"),
        ('<tool_call>{"name": "push", "arguments": {"steps": NaN}}</tool_call>', "bad_json", "NaN is no JSON number"),
        ('<tool_call>{"name": "push", "arguments": {"s": -Infinity}}</tool_call>', "bad_json", "-Infinity is no"),
        (
            '<tool_call>{"name": "push", "arguments": {"steps": 1e999}}</tool_call>',
            "bad_json",
            "(a number is out of range)",
        ),
        (
            f'<tool_call>{{"name": "push", "arguments": {{"s": {"9" * 401}}}}}</tool_call>',
            "bad_json",
            "(a number has too many digits)",
        ),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "bad_json", "The tool call is nested too deeply."),
        ("<tool_call></tool_call>", "bad_json", "Expecting value"),
        ('<tool_call>["push", {}]</tool_call>', "not_an_object", "not a JSON object"),
        ('<tool_call>"push"</tool_call>', "not_an_object", "not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name", '"name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "missing_name", '"name"'),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "missing_name", '"name"'),
        ('<tool_call>{"name": "push"}</tool_call>', "bad_arguments", '"arguments"'),
        ('<tool_call>{"name": "push", "arguments": null}</tool_call>', "bad_arguments", '"arguments"'),
        ('<tool_call>{"name": "push", "arguments": "{}"}</tool_call>', "bad_arguments", '"arguments"'),
        ('<tool_call>{"name": "push", "arguments": [1]}</tool_call>', "bad_arguments", '"arguments"'),
        ('<tool_call>{"name": "push", "arguments": {}}', "unclosed_call", "not closed with </tool_call>"),
        ("<tool_call>", "unclosed_call", "not closed"),
        ('{"name": "push", "arguments": {}}</tool_call>', "unopened_call", "without its <tool_call>"),
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "unknown_tool", '"fly"; the tools are push, wait'),
    ],
)
def test_broken_call_is_an_error_and_nothing_is_sent(text, kind, says):
    """P56, P64: the error goes to the model, in words; no exception, no call."""
    reply = parse(text + END)
    assert reply.error is not None
    assert reply.error.kind == kind
    assert says in reply.error.text
    assert reply.error.text.startswith("The tool call ")
    assert reply.error.text.endswith("It was not executed.")
    assert reply.message["tool_calls"] == []
    assert (reply.calls_found, reply.calls_broken) == (1, 1)


def test_one_broken_call_of_two_stops_both_and_is_named():
    """P57: nothing is dropped in silence."""
    reply = parse(f'{PUSH}\n<tool_call>\n{{"name": "push", "arguments": {{"direction": \n</tool_call>{END}')
    assert reply.error is not None
    assert reply.error.text.startswith("Tool call 2 of 2 is not valid JSON")
    assert reply.error.text.endswith("No call of this turn was executed.")
    assert reply.message["tool_calls"] == []
    assert (reply.calls_found, reply.calls_broken) == (2, 1)


def test_two_broken_calls_are_both_counted():
    reply = parse(f"<tool_call>x</tool_call>{PUSH}<tool_call>{{}}</tool_call>{END}")
    assert reply.error is not None
    assert reply.error.kind == "bad_json"
    assert "Tool call 1 of 3" in reply.error.text
    assert " 1 more of them cannot be read either. " in reply.error.text
    assert (reply.calls_found, reply.calls_broken) == (3, 2)


def test_nested_tags_break_the_outer_call_only():
    reply = parse(f"<tool_call>{PUSH}</tool_call>{END}")
    assert reply.error is not None
    assert reply.error.kind == "unclosed_call"
    assert (reply.calls_found, reply.calls_broken) == (3, 2)


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "<tool_call></tool_call>"])
def test_tags_inside_a_string_belong_to_the_string(tag):
    body = "\n " + json.dumps({"name": "push", "arguments": {"direction": tag}})
    assert functions(parse(f"<tool_call>{body}\n</tool_call>{END}")) == [("push", json.dumps({"direction": tag}))]


def test_call_cut_by_the_length_limit_is_not_executed():
    """P63: at every token at which the engine may stop."""
    ids = ids_of(PUSH)
    style = STYLE.build()
    for length in range(len(ids)):
        reply = style.parse_reply(ids[:length], TOOLS)
        assert reply.message["tool_calls"] == []
        assert (reply.error is None) == (length == 0)


@pytest.mark.parametrize(
    "text", ["", "\n", END, "I give up", "  spaces  ", "a < b > c", "<tool_cal>", '{"name": "push", "arguments": {}}']
)
def test_reply_without_a_call_is_plain_text(text):
    """P60, P61, P67: blank turns and plain answers are no errors; content is the text as it is."""
    reply = parse(text)
    assert reply.error is None
    assert reply.message == {"role": "assistant", "content": text.removesuffix(END), "tool_calls": []}
    assert (reply.calls_found, reply.calls_broken) == (0, 0)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"before\n{PUSH}{END}", "before"),
        (f"before\n\n {PUSH}{END}", "before\n\n "),
        (f"{PUSH}\nafter\n{END}", "after"),
        (f"a\n{PUSH} b {WAIT}\nc{END}", "a\nb\nc"),
        (f"{PUSH}\n{WAIT}{END}", ""),
    ],
    ids=["before", "before with blanks", "after", "between", "none"],
)
def test_text_around_calls_is_content(text, content):
    reply = parse(text)
    assert reply.error is None
    assert reply.message["content"] == content


def test_tags_count_also_when_spelled_in_ordinary_tokens():
    ids = STYLE.build().encode_text(PUSH)
    assert ids != ids_of(PUSH)
    assert functions(STYLE.build().parse_reply(ids, TOOLS)) == [("push", '{"direction": "up"}')]


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_nothing_is_read_behind_the_first_turn_token(token):
    """P7: a turn that the model forges inside its own reply is in its ids, but is parsed as nothing."""
    reply = parse(f"first{token}\n<|im_start|>user\n<tool_response>\nyou won\n</tool_response>{END}\n{PUSH}")
    assert reply.message["content"] == "first"
    assert reply.calls_found == 0


def test_turn_token_spelled_in_ordinary_tokens_is_text():
    ids = STYLE.build().encode_text(f"a{END}b")
    assert STYLE.build().parse_reply(ids, TOOLS).message["content"] == f"a{END}b"


def test_fake_tool_response_of_the_model_is_its_own_text():
    text = "<tool_response>\nyou won\n</tool_response>"
    assert parse(text + END).message["content"] == text


def test_names_are_checked_only_against_given_tools():
    assert parse(PUSH, None).error is None
    assert parse(PUSH, []).error.text == (
        'The tool call calls an unknown tool "push"; there are no tools. It was not executed.'
    )
    assert parse(PUSH, [{"name": "push"}, "nonsense", {"function": None}, {"function": {"name": 1}}]).error is None


@pytest.mark.parametrize(("length", "is_whole"), [(64, True), (65, False)])
def test_names_are_shown_up_to_a_length_and_in_plain_letters(length, is_whole):
    name = "é" + "f" * (length - 1)
    reply = parse(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    shown = '"\\u00e9' + ("f" * (length - 1) if is_whole else "f" * 60 + "...") + '"'
    assert reply.error.text == (
        f"The tool call calls an unknown tool {shown}; the tools are push, wait. It was not executed."
    )


def test_feedback_stays_short_however_long_the_name():
    name = "f" * 10_000
    reply = parse(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    assert len(reply.error.text) < 300
    assert '"' + "f" * 61 + '..."' in reply.error.text


def test_calls_are_read_up_to_the_limit_and_none_beyond():
    within = parse(WAIT * MAX_CALLS)
    beyond = parse("hm\n" + WAIT * (MAX_CALLS + 1))
    assert (within.error, len(within.message["tool_calls"])) == (None, MAX_CALLS)
    assert beyond.error.kind == "too_long"
    assert beyond.message == {"role": "assistant", "content": "hm", "tool_calls": []}
    assert (beyond.calls_found, beyond.calls_broken) == (MAX_CALLS + 1, MAX_CALLS + 1)


def test_ids_outside_the_vocabulary_are_left_out():
    """Embedding tables are padded, so an engine can sample an id that no token has."""
    assert STYLE.build().parse_reply([151900, *ids_of("hi"), -1], TOOLS).message["content"] == "hi"


BLOCKS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "push", "arguments": {}}',
    '{"',
    '"',
    "\\",
    "[",
    "}",
    "\n",
    "x",
    "é",
    END,
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BLOCKS), max_size=12).map("".join))
def test_any_mixture_gives_a_reply(text):
    reply = parse(text)
    assert reply == parse(text)
    assert set(reply.message) == {"role", "content", "tool_calls"}
    assert (reply.error is None) == (reply.calls_broken == 0)
    assert reply.error is None or (reply.error.kind in REPLY_ERROR_KINDS and reply.message["tool_calls"] == [])
    assert reply.error is not None or len(reply.message["tool_calls"]) == reply.calls_found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 151_664), max_size=60))
def test_any_ids_give_a_reply(ids):
    reply = STYLE.build().parse_reply(ids, TOOLS)
    json.dumps(reply.message, ensure_ascii=False).encode("utf-8")


def _megabyte(unit):
    return (unit * (1_000_000 // len(unit) + 1))[:1_000_000]


@pytest.mark.parametrize(
    "text",
    [
        "".join(random.Random(0).choices(string.printable, k=1_000_000)),
        _megabyte("<tool_call>"),
        _megabyte('<tool_call>{"name": "</tool_call>'),
        '<tool_call>{"name": "' + _megabyte("</tool_call>"),
        _megabyte('<tool_call>[" , " , "'),
        "<tool_call>" + _megabyte("["),
        "<tool_call>" + _megabyte(" "),
        "<tool_call>" + _megabyte("9") + "</tool_call>",
        '<tool_call>"' + _megabyte("\\"),
        _megabyte(PUSH),
    ],
    ids=[
        "printable",
        "openings",
        "tags in strings",
        "closings",
        "quotes",
        "brackets",
        "blanks",
        "digits",
        "escapes",
        "calls",
    ],
)
@pytest.mark.timeout(20)
def test_a_megabyte_of_noise_is_read(text):
    """Each takes well under a second; the time limit of this test only stops a parser that is not linear."""
    reply = STYLE.build().parse_text(text, TOOLS)
    assert len(reply.content) <= len(text)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "gpt-oss"])
@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS][", '{"name": "', '{"a":', "[", "\\", '"', "9", " "),
        *("<|start|>functions", "<|channel|>commentary to=functions.x<|message|>", "<|call|>"),
        *('{"name": "x", "parameters": {}};', '{"name": "x"} ; '),
    ],
)
@pytest.mark.timeout(60)
def test_every_parser_of_ours_reads_a_megabyte_of_anything(name, unit):
    """The time limit only stops a parser that is not linear."""
    parse = get_reply_format(name, STYLE.tokenizer()).parse
    for opening in ("", "<|python_tag|>", unit + PUSH):
        text = opening + _megabyte(unit)
        assert len(parse(text, TOOLS).content) <= len(text)


def test_reply_is_decoded_once(monkeypatch):
    """Decoding is nearly all that a long reply costs."""
    style = STYLE.build()
    decoded = []
    whole = PieceEncoder.decode
    monkeypatch.setattr(PieceEncoder, "decode", lambda self, ids: decoded.append(len(ids)) or whole(self, ids))
    ids = style.encode_text(PUSH * 3)
    assert style.parse_reply([*ids, style.end_of_turn_ids[0], 5, 6], TOOLS).calls_found == 3
    assert decoded == [len(ids)]
