# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Texts of single tokens spell what was written, with letters cut over several tokens."""

import pytest

from recipe.agent_env.rollout.token_texts import TokenTexts
from tests.prompt_styles.tokenizers import chatml_tokenizer, gemma2_tokenizer, metaspace_tokenizer, qwen2_5_tokenizer

TEXTS = {
    "plain": "Push the box, then stop.\n\n  Done",
    "letters of several tokens": "太好了 — 🧩👩‍👩‍👧 naïve",
    "control tokens": "<|im_start|>user\nhi<|im_end|>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("make", [qwen2_5_tokenizer, chatml_tokenizer], ids=["qwen2_5", "chatml"])
def test_texts_spell_the_whole(make, text):
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = TokenTexts(tokenizer)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


@pytest.mark.parametrize("make", [gemma2_tokenizer, metaspace_tokenizer], ids=["gemma2", "metaspace"])
def test_blanks_between_words_are_kept(make):
    tokenizer = make()
    ids = tokenizer("the player pushes the box", add_special_tokens=False)["input_ids"]
    assert "".join(TokenTexts(tokenizer)(ids)).strip() == "the player pushes the box"


def test_cut_letter_at_the_end_shows_as_broken():
    tokenizer = qwen2_5_tokenizer()
    ids = tokenizer("🧩", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert "�" in "".join(TokenTexts(tokenizer)(ids[:1] + tokenizer("ok", add_special_tokens=False)["input_ids"]))
