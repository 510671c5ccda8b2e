# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The tiny model: behaves as a Qwen2.5 model to a tokenizer, to transformers and to a seed."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import ADDED_TOKENS, build_model, build_tokenizer, default_corpus, save_tiny_model

TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(default_corpus())


def test_added_tokens_are_the_last_ids_in_qwens_order(tokenizer):
    first = len(tokenizer) - len(ADDED_TOKENS)
    assert [tokenizer.convert_tokens_to_ids(text) for text, _ in ADDED_TOKENS] == list(range(first, len(tokenizer)))


@pytest.mark.parametrize(
    "text", ["é 北京 😀", "a\r\n\n  b ", "it's 2048", '<tool_call>\n{"name": "x"}\n</tool_call>', "\t\x00"]
)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tool_call_tags_survive_skipping_special_tokens(tokenizer):
    ids = tokenizer.encode("<tool_call>x</tool_call><|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_encode_adds_no_token_of_its_own(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_chat_template_joins_tool_answers_into_one_user_turn(tokenizer):
    call = {"type": "function", "function": {"name": "go", "arguments": {"x": "é<"}}}
    messages = [
        {"role": "user", "content": "m"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    call_text = '<tool_call>\n{"name": "go", "arguments": {"x": "é<"}}\n</tool_call>'
    assert text.endswith(
        f"<|im_start|>assistant\n{call_text}\n{call_text}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n"
        "</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n")


def test_same_seed_gives_the_same_weights_and_leaves_the_random_state(tokenizer):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    weights = [build_model(tokenizer, num_layers=1, seed=seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.rand(1), expected)


def test_small_heads_and_small_vocabularies_are_refused(tokenizer):
    with pytest.raises(ValueError, match="head size of 32"):
        build_model(tokenizer, hidden_size=64, num_heads=4)
    with pytest.raises(ValueError, match="added tokens need 278"):
        build_tokenizer(["x"], vocab_size=277)


def test_saved_folder_loads_by_auto_classes(tmp_path, tokenizer):
    folder = save_tiny_model(tmp_path / "model", num_layers=1, seed=3)
    loaded = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "<|im_start|>user\nPush the box 42 é<|im_end|>\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert model.config.vocab_size == len(loaded) and model.config.eos_token_id == loaded.eos_token_id
    assert torch.equal(model.lm_head.weight, build_model(tokenizer, num_layers=1, seed=3).lm_head.weight)


def test_command_line_writes_the_folder(tmp_path):
    command = [sys.executable, "-m", "examples.tiny_model", str(tmp_path / "m"), "--num-layers", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()
