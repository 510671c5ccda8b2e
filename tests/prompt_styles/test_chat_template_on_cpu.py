# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The `chat_template` style: what it finds out about a template, and what it refuses."""

import logging

import pytest

from recipe.agent_env.prompt_styles import PromptStyleError, get_prompt_style
from recipe.agent_env.prompt_styles.placeholders import Placeholders
from tests.prompt_styles import tokenizers
from tests.prompt_styles.families import FAMILIES, TOOLS

CHATML_END = "{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
CHATML_TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"


def build(tokenizer, **options):
    return get_prompt_style("chat_template")(tokenizer, **options)


def tokenizer_with(template, special=("<|im_start|>", "<|im_end|>"), plain=(), **names):
    return tokenizers.small_tokenizer(
        list(special), list(plain), chat_template=template, name_or_path="my-model", **names
    )


def family(name):
    return next(family for family in FAMILIES if family.name == name)


def token(style, text):
    return style.tokenizer.convert_tokens_to_ids(text)


def test_tokenizer_without_template_is_refused():
    with pytest.raises(PromptStyleError, match="my-model has no chat template"):
        build(tokenizer_with(None))


def test_slow_tokenizer_is_refused():
    with pytest.raises(PromptStyleError, match="expected a fast tokenizer .*got object"):
        build(object())


def test_unknown_switch_is_refused():
    with pytest.raises(PromptStyleError, match="qwen3 has no switch enable_thinkin, other; remove it"):
        build(tokenizers.qwen3_tokenizer(), enable_thinkin=False, other=1, enable_thinking=True)


def test_template_that_does_not_end_the_turn_before_some_message_is_refused():
    template = (
        "{% for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{{- '<|im_end|>\\n' if messages[-1].role != 'system' else '' }}{% endfor %}"
    )
    style = build(tokenizer_with(template))
    with pytest.raises(PromptStyleError, match="my-model does not end the turn before these messages"):
        style.encode_observation([{"role": "system", "content": "<|im_end|>"}], turn_is_closed=True)


def test_template_without_end_token_is_refused():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    with pytest.raises(PromptStyleError, match="my-model ends assistant turns with no token"):
        build(tokenizer_with(template))


def test_template_whose_turns_end_with_the_next_turn_is_refused():
    """GLM: `<|user|>` and `<|observation|>` both end a turn and start the next one."""
    special = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    with pytest.raises(PromptStyleError, match="only by starting the next one"):
        build(tokenizer_with(tokenizers.template("glm4"), special))


def test_template_that_drops_replies_is_refused():
    template = "{% for m in messages if m.role == 'user' %}" + CHATML_TURN + "{% endfor %}"
    with pytest.raises(PromptStyleError, match="ends assistant turns with no token"):
        build(tokenizer_with(template))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen3", "my-model rewrites earlier turns: it drops their thinking when a user message follows"),
        ("mistral_nemo", "moves the tools when a user message follows; moves the system message when"),
    ],
)
def test_template_that_rewrites_earlier_turns_is_named(name, says, caplog):
    """P5: the ids stay as sampled and one warning says so, or the start is refused."""
    tokenizer = tokenizer_with(
        tokenizers.template(name),
        ["<|im_start|>", "<|im_end|>", *tokenizers.MISTRAL_SPECIAL],
        bos_token="<s>",
        eos_token="</s>",
    )
    with caplog.at_level(logging.WARNING, logger="recipe.agent_env.prompt_styles"):
        build(tokenizer)
    assert [says in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].getMessage().endswith("They are kept as they were sampled.")
    with pytest.raises(PromptStyleError, match=says):
        build(tokenizer, strict_history=True)


@pytest.mark.parametrize("name", ["qwen2_5-template", "llama3_1", "chatml", "gemma2"])
def test_append_only_template_passes_the_strict_check(name, caplog):
    build(family(name).tokenizer(), strict_history=True)
    assert not caplog.records


def test_switch_that_changes_the_header_is_a_rewrite():
    """Qwen3 without thinking puts an empty block in front of a reply, and drops it from the history."""
    with pytest.raises(PromptStyleError, match="writes another header in front of them"):
        build(tokenizers.qwen3_tokenizer(), enable_thinking=False, strict_history=True)


def test_thinking_stays_in_the_ids():
    """P5: two turns with thinking; every prompt extends the one before it."""
    style = family("qwen3").build()
    ids = style.encode_prompt([{"role": "user", "content": "u"}], None)
    for _ in range(2):
        sampled = style.tokenizer.encode("<think>\nhm\n</think>\n\nleft<|im_end|>", add_special_tokens=False)
        longer = ids + sampled + style.encode_observation([{"role": "user", "content": "o"}], turn_is_closed=True)
        assert longer[: len(ids)] == ids
        ids = longer
    assert ids.count(token(style, "<think>")) == 2


def test_thinking_switch_reaches_the_template():
    style = build(tokenizers.qwen3_tokenizer(), enable_thinking=False)
    assert style.tokenizer.decode(style.encode_prompt([{"role": "user", "content": "u"}], None)).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert style.tokenizer.decode(style.encode_observation([], turn_is_closed=True)).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<think>\nup?\n</think>\n\nleft", "left", 0),
        ('<think>a <tool_call>{"name": "wait", "arguments": {}}</tool_call></think>no', "no", 0),
        ('<think>a</think>\n\n<tool_call>{"name": "wait", "arguments": {}}</tool_call>', "", 1),
        ("<think>a</think>\n\nX marks", "X marks", 0),
        ("<think>a</think>\n  x </think>", "  x </think>", 0),
        ("<think>\nstill thinking", "", 0),
        (" <think>\nstill thinking", "", 0),
        ("no <think> at all", "no <think> at all", 0),
    ],
    ids=[
        "thought",
        "call in a thought",
        "call after it",
        "letters",
        "blanks and another end",
        "cut",
        "cut after a blank",
        "in the text",
    ],
)
def test_thinking_is_neither_content_nor_call(text, content, calls):
    style = family("qwen3").build()
    reply = style.parse_reply(style.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False), TOOLS)
    assert reply.error is None
    assert reply.message["content"] == content
    assert len(reply.message["tool_calls"]) == calls


def test_header_that_opens_thinking_makes_an_unclosed_reply_a_thought():
    template = "{% for m in messages %}" + CHATML_TURN + "{% endfor %}" + CHATML_END.replace("\\n'", "\\n<think>\\n'")
    style = build(tokenizer_with(template, plain=["<think>", "</think>"]))
    assert style.parse_reply(style.encode_text("hm"), None).message["content"] == ""
    closed = style.tokenizer.encode("hm</think>left", add_special_tokens=False)
    assert style.parse_reply(closed, None).message["content"] == "left"


def test_family_without_thinking_keeps_such_text():
    style = family("llama3_1").build()
    assert style.parse_reply(style.encode_text("<think>a</think>b"), None).message["content"] == "<think>a</think>b"


@pytest.mark.parametrize(
    ("name", "ends", "reading_stops"),
    [
        ("qwen3", ["<|im_end|>"], ["<|im_end|>", "<|im_start|>"]),
        ("llama3_1", ["<|eot_id|>"], ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
        ("mistral_nemo", ["</s>"], ["</s>", "[INST]"]),
        ("gemma2", ["<end_of_turn>"], ["<end_of_turn>", "<start_of_turn>", "<eos>"]),
        ("chatml", ["<|im_end|>"], ["<|im_end|>", "<|im_start|>"]),
    ],
)
def test_turn_tokens_are_found(name, ends, reading_stops):
    style = family(name).build()
    assert style.end_of_turn_ids == tuple(token(style, text) for text in ends)
    assert style.stop_token_ids == list(style.end_of_turn_ids)
    assert style.parse_stop_ids == {token(style, text) for text in reading_stops}


def test_results_of_several_calls_where_a_turn_may_have_one():
    """Llama 3.1's template refuses two calls in a turn, yet renders any number of results."""
    style = family("llama3_1").build()
    delta = style.encode_observation(
        [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], turn_is_closed=True, add_header=False
    )
    head = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    results = f'{head}"a"<|eot_id|>{head}"b"<|eot_id|>'
    assert style.tokenizer.decode(delta) == results
    with_header = style.encode_observation(
        [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], turn_is_closed=True
    )
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert style.tokenizer.decode(with_header) == results + header


def test_refusal_of_a_template_names_it_and_its_words():
    style = family("gemma2").build()
    with pytest.raises(PromptStyleError, match="gemma2 refuses messages of system, user: System role not supported"):
        style.encode_prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], None)
    with pytest.raises(PromptStyleError, match="gemma2 refuses .*must alternate"):
        style.encode_observation([{"role": "user", "content": "u"}] * 2, turn_is_closed=True)
    with pytest.raises(PromptStyleError, match="mistral-nemo refuses .*Tool call IDs"):
        family("mistral_nemo").build().encode_observation([{"role": "tool", "content": "u"}], turn_is_closed=True)


def test_ids_of_our_calls_are_taken_by_the_strictest_template():
    style = family("mistral_nemo").build()
    text = '[TOOL_CALLS][{"name": "wait", "arguments": {}}]</s>'
    call = style.parse_reply(style.tokenizer.encode(text, add_special_tokens=False), TOOLS).message["tool_calls"][0]
    observation = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    delta = style.encode_observation(observation, turn_is_closed=True)
    assert style.tokenizer.decode(delta) == f'[TOOL_RESULTS]{{"content": ok, "call_id": "{call["id"]}"}}[/TOOL_RESULTS]'


def test_template_that_wants_arguments_as_text_gets_text():
    """DeepSeek's kind: arguments are joined with strings, which fails for an object."""
    template = (
        "{% for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{- c.function.name + '\\n' + c.function.arguments }}{% endfor %}"
        "{{- '<|im_end|>\\n' }}{% endfor %}" + CHATML_END
    )
    style = build(tokenizer_with(template))
    call = {"name": "f", "arguments": {"a": "<|im_end|>é"}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = style.tokenizer.decode(style.encode_prompt(messages, None, add_header=False))
    assert text.endswith('<|im_start|>assistant\nf\n{"a": "<|im_end|>é"}<|im_end|>\n')
    tool = {"role": "tool", "content": "r"}
    delta = style.tokenizer.decode(style.encode_observation([tool], turn_is_closed=True, add_header=False))
    assert delta == "\n<|im_start|>tool\nr<|im_end|>\n"


def test_turn_with_calls_may_have_an_end_token_of_its_own():
    template = (
        "{% for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}"
        "{{- '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}{% endfor %}"
        "{{- '<|eom|>' if m.tool_calls else '<|im_end|>\\n' }}{% endfor %}" + CHATML_END
    )
    style = build(tokenizer_with(template, ["<|im_start|>", "<|im_end|>", "<|eom|>"], ["<call>", "</call>"]))
    ends = [token(style, "<|im_end|>"), token(style, "<|eom|>")]
    assert style.end_of_turn_ids == tuple(ends)
    assert style.stop_token_ids == ends
    results = style.encode_observation([{"role": "tool", "content": "r"}], turn_is_closed=False, add_header=False)
    assert style.tokenizer.decode(results) == "<|eom|><|im_start|>tool\nr<|im_end|>\n"


def test_tool_results_follow_a_plain_turn_where_calls_are_not_rendered():
    style = family("chatml").build()
    delta = style.encode_observation([{"role": "tool", "content": "r"}], turn_is_closed=True, add_header=False)
    assert style.tokenizer.decode(delta) == "\n<|im_start|>tool\nr<|im_end|>\n"


def test_harmony_turns_end_only_as_a_whole():
    """gpt-oss: a turn is several messages, so `<|end|>` must not stop the engine."""
    special = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"]
    style = build(
        tokenizer_with(tokenizers.template("harmony"), special, eos_token="<|return|>"), tool_parser="gpt-oss"
    )
    assert style.stop_token_ids == [token(style, "<|return|>"), token(style, "<|call|>")]
    assert {token(style, text) for text in ["<|end|>", "<|return|>", "<|call|>"]} == set(style.end_of_turn_ids)
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.push "
        '<|constrain|>json<|message|>{"direction": "up"}<|call|>'
    )
    sampled = style.tokenizer.encode(text, add_special_tokens=False)
    reply = style.parse_reply(sampled, TOOLS)
    assert style.is_turn_closed(sampled)
    assert reply.message["content"] == ""
    assert reply.message["tool_calls"][0]["function"] == {"name": "push", "arguments": '{"direction": "up"}'}
    delta = style.encode_observation([{"role": "tool", "content": "ok"}], turn_is_closed=True)
    assert style.tokenizer.decode(delta) == (
        '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>"ok"<|end|><|start|>assistant'
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'),
        ({"tool_parser": "hermes"}, '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'),
        ({"tool_parser": "llama3_json"}, '{"name": "wait", "parameters": {}}'),
        ({"tool_parser": "mistral"}, '[TOOL_CALLS][{"name": "wait", "arguments": {}}]'),
    ],
)
def test_parser_is_chosen_by_name(options, text):
    style = build(tokenizers.chatml_tokenizer(), **options)
    assert len(style.parse_reply(style.encode_text(text), TOOLS).message["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>{"name": "wait", "arguments": {}}</tool_call><|im_end|>'),
        ("llama3_1", '{"name": "wait", "parameters": {}}<|eot_id|>'),
        ("llama3_1", '<|python_tag|>{"name": "wait", "parameters": {}}<|eot_id|>'),
        ("mistral_nemo", '[TOOL_CALLS][{"name": "wait", "arguments": {}}]</s>'),
    ],
)
def test_parser_is_chosen_by_the_vocabulary(name, text):
    style = family(name).build()
    ids = style.tokenizer.encode(text, add_special_tokens=False)
    assert len(style.parse_reply(ids, TOOLS).message["tool_calls"]) == 1


def test_template_may_quote_text_as_json_at_any_depth():
    stand_ins = Placeholders(['a "b" \\ é'])
    stand_in = stand_ins.text('a "b" \\ é')
    for quoted, expected in [
        (stand_in, 'a "b" \\ é'),
        (stand_in.replace('"', '\\"'), 'a \\"b\\" \\\\ é'),
        (stand_in.replace('"', '\\"').replace("—", "\\u2014"), 'a \\"b\\" \\\\ \\u00e9'),
        (stand_in.replace('"', '\\\\\\"'), 'a \\\\\\"b\\\\\\" \\\\\\\\ é'),
    ]:
        pieces = stand_ins.pieces(f"<{quoted}>")
        assert [(piece.text, piece.is_trusted) for piece in pieces] == [("<", True), (expected, False), (">", True)]


def test_template_that_rewrites_text_is_refused():
    stand_ins = Placeholders(["secret"])
    with pytest.raises(PromptStyleError, match="rewrites the text of messages"):
        stand_ins.pieces(stand_ins.text("secret").replace('"', "&#34;"))


def test_stand_ins_keep_order_equality_and_blanks():
    names = ["b", "A", "c", " a\n", "type"]
    stand_ins = Placeholders([{name: name for name in names}])
    shown = stand_ins.value({name: [name] for name in names})
    assert shown["type"] == ["type"]
    assert [stand_ins.text(name) for name in names[:3]] == [key for key, _ in list(shown.items())[:3]]
    assert sorted(stand_ins.text(name) for name in "cAb") == [stand_ins.text(name) for name in "Abc"]
    assert stand_ins.text(" a\n").startswith(" ") and stand_ins.text(" a\n").endswith("\n")
    assert stand_ins.text(" \n") == " \n"
    assert stand_ins.value([1, None, True, 2.5, ""]) == [1, None, True, 2.5, ""]
