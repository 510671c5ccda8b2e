# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Styles by name, and the style that the documentation writes."""

import re
from pathlib import Path

import pytest

from recipe.agent_env.prompt_styles import PromptStyle, PromptStyleError, get_prompt_style, register_prompt_style
from recipe.agent_env.prompt_styles.chat_template import ChatTemplateStyle
from recipe.agent_env.prompt_styles.qwen2_5 import Qwen25Style
from tests.prompt_styles.tokenizers import small_tokenizer

DOCS = Path(__file__).parents[2] / "docs" / "prompt_styles.md"


@pytest.mark.parametrize(("name", "style"), [("qwen2_5", Qwen25Style), ("chat_template", ChatTemplateStyle)])
def test_built_in_style_is_found(name, style):
    assert get_prompt_style(name) is style


def test_unknown_style_is_refused_with_the_known_ones():
    with pytest.raises(PromptStyleError, match="unknown prompt style 'qwen2.5'; known: chat_template, .*qwen2_5"):
        get_prompt_style("qwen2.5")


def test_name_can_be_taken_once():
    class Mine(PromptStyle):
        pass

    assert register_prompt_style("test_mine")(Mine) is Mine
    assert register_prompt_style("test_mine")(Mine) is Mine
    assert get_prompt_style("test_mine") is Mine
    with pytest.raises(PromptStyleError, match="'test_mine' is taken by .*test_registry_on_cpu.*Mine"):
        register_prompt_style("test_mine")(Qwen25Style)


def test_style_of_the_documentation_works():
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 30
    exec(compile(code, str(DOCS), "exec"), {})
    tokenizer = small_tokenizer(["<end>"])
    style = get_prompt_style("plain_dialogue")(tokenizer)
    prompt = style.encode_prompt([{"role": "user", "content": "map <end>"}], [{"function": {"name": "up"}}])
    assert tokenizer.decode(prompt) == 'Tools: [{"function": {"name": "up"}}]<end>\nuser: map <end><end>\nassistant:'
    assert prompt.count(style.end_of_turn_ids[0]) == 2
    delta = style.encode_observation([{"role": "tool", "content": "ok"}], turn_is_closed=False)
    assert tokenizer.decode(delta) == "<end>\ntool: ok<end>\nassistant:"
    reply = style.parse_reply(style.encode_text('<tool_call>{"name": "up", "arguments": {}}</tool_call>'), None)
    assert len(reply.message["tool_calls"]) == 1
