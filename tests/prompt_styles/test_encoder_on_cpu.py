# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Pieces to ids: equal to the tokenizer's own encoding of the whole text, and never a control token by accident."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from recipe.agent_env.prompt_styles import PromptStyleError, trusted, untrusted
from recipe.agent_env.prompt_styles.encoder import PieceEncoder
from tests.prompt_styles import tokenizers
from tests.prompt_styles.families import FAMILIES, texts
from tests.prompt_styles.tokenizers import small_tokenizer, wrap


def words(vocab, added=(), **names):
    """A tokenizer of whole words."""
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([AddedToken(content, special=True, normalized=False) for content in added])
    return wrap(backend, **names)


@pytest.mark.parametrize("family", FAMILIES[1:], ids=lambda family: family.name)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_pieces_encode_like_the_whole_text(family, data):
    """Merges over the borders of pieces come out as in one text."""
    tokenizer = family.tokenizer()
    encoder = PieceEncoder(tokenizer) if family.name == "chatml" else family.build()._encoder
    control = tokenizer.convert_ids_to_tokens(family.build().end_of_turn_ids[0])
    trusted_texts = st.lists(st.one_of(st.just(control), texts), max_size=3).map("".join)
    pieces = data.draw(st.lists(st.one_of(trusted_texts.map(trusted), texts.map(untrusted)), max_size=6))
    whole = "".join(piece.text for piece in pieces)
    assert encoder.encode(pieces, at_start=True) == tokenizer.encode(whole, add_special_tokens=False)


def test_text_at_the_start_may_differ_from_text_in_the_middle():
    tokenizer = tokenizers.metaspace_tokenizer()
    encoder = PieceEncoder(tokenizer)
    assert encoder.encode([untrusted("up")], at_start=True) == tokenizer.encode("up", add_special_tokens=False)
    after_token = tokenizer.encode("<|im_end|>up", add_special_tokens=False)[1:]
    assert encoder.encode([untrusted("up")]) == after_token == encoder.encode_text("up")
    assert after_token != tokenizer.encode("up", add_special_tokens=False)


@pytest.mark.parametrize("lstrip", [False, True])
@pytest.mark.parametrize("rstrip", [False, True])
def test_tokens_that_swallow_blanks_swallow_them(lstrip, rstrip):
    tokenizer = small_tokenizer(["<e>"])
    tokenizer.add_tokens([AddedToken("<m>", special=True, normalized=False, lstrip=lstrip, rstrip=rstrip)])
    pieces = [untrusted("a \n"), trusted("<m>"), untrusted(" \n b <m> "), trusted(" <m>"), trusted("<e>\n")]
    ids = PieceEncoder(tokenizer).encode(pieces, at_start=True)
    harmless = "a \n<m> \n b <x> " + " <m><e>\n"
    expected = tokenizer.encode(harmless, add_special_tokens=False)
    x = tokenizer.encode("x", add_special_tokens=False)
    m = tokenizer.encode("m", add_special_tokens=False)
    assert ids == [m[0] if i == x[0] else i for i in expected]


def test_longer_token_wins_over_its_beginning():
    tokenizer = small_tokenizer(["<|im|>", "<|im|>x", "<|im"])
    encoder = PieceEncoder(tokenizer)
    assert encoder.split("a<|im|>xb<|im|>c<|im") == [
        ("a", None),
        ("<|im|>x", tokenizer.convert_tokens_to_ids("<|im|>x")),
        ("b", None),
        ("<|im|>", tokenizer.convert_tokens_to_ids("<|im|>")),
        ("c", None),
        ("<|im", tokenizer.convert_tokens_to_ids("<|im")),
    ]
    assert encoder.split("") == []


def test_special_flag_is_known():
    encoder = PieceEncoder(small_tokenizer(["<s>"], ["<t>"]))
    assert encoder.is_special(encoder.control_id("<s>"))
    assert not encoder.is_special(encoder.control_id("<t>"))
    assert encoder.control_id("<u>") is None


def test_runs_of_blanks_that_are_added_tokens_stay_usable():
    tokenizer = small_tokenizer(["<s>"], ["\n\n\n", "    "])
    encoder = PieceEncoder(tokenizer)
    text = "a\n\n\nb    c"
    assert encoder.encode([untrusted(text)], at_start=True) == tokenizer.encode(text, add_special_tokens=False)
    assert encoder.control_id("\n\n\n") is None


def test_special_blank_token_is_a_control_token():
    """A template may end turns with a line break that is a token of its own."""
    tokenizer = small_tokenizer(["\n\n"])
    encoder = PieceEncoder(tokenizer)
    end = tokenizer.convert_tokens_to_ids("\n\n")
    assert encoder.control_id("\n\n") == end
    assert encoder.encode([trusted("a\n\n")], at_start=True)[-1] == end
    assert end not in encoder.encode_text("a\n\n")


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_tokens_in_the_vocabulary_itself_cannot_be_spelled(ignore_merges):
    """Some vocabularies list their control tokens, and look up whole words before they merge."""
    tokenizer = small_tokenizer(["<s>", "<|im_end|>"], in_vocabulary=True)
    tokenizer.backend_tokenizer.model.ignore_merges = ignore_merges
    encoder = PieceEncoder(tokenizer)
    assert encoder.decode(encoder.encode_text("<s> <|im_end|>")) == "<s> <|im_end|>"
    assert not {0, 1} & set(encoder.encode_text("<s> <|im_end|>"))


def test_word_vocabulary_gives_unknown_for_a_control_word():
    encoder = PieceEncoder(words({"[UNK]": 0, "[SEP]": 1, "up": 2}, ["[SEP]"], unk_token="[UNK]"))
    assert encoder.encode([untrusted("up [SEP] up"), trusted(" [SEP] ")]) == [2, 0, 2, 1]


def test_unknown_token_may_itself_be_an_added_token():
    encoder = PieceEncoder(words({"[UNK]": 0, "up": 1}, ["[UNK]"], unk_token="[UNK]"))
    assert encoder.encode_text("up down [UNK]") == [1, 0, 0]


def test_control_token_made_by_merges_is_refused():
    backend = Tokenizer(models.BPE(vocab={"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, merges=[("<", "s"), ("<s", ">")]))
    backend.add_special_tokens(["<s>"])
    with pytest.raises(PromptStyleError, match="spells its control token '<s>' in ordinary text"):
        PieceEncoder(wrap(backend))


def test_vocabulary_with_gaps_is_refused():
    with pytest.raises(PromptStyleError, match="vocabulary has gaps: id 2 is taken"):
        PieceEncoder(words({"[UNK]": 0, "up": 2}, unk_token="[UNK]"))


def test_tokenizer_itself_is_left_as_it_is():
    tokenizer = tokenizers.chatml_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    PieceEncoder(tokenizer).encode_text("x")
    assert tokenizer.backend_tokenizer.to_str() == before


def test_settings_for_batches_do_not_reach_the_encoding():
    tokenizer = small_tokenizer(["<s>"], in_vocabulary=True)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=30, pad_id=0)
    assert PieceEncoder(tokenizer).decode(PieceEncoder(tokenizer).encode_text("up and down")) == "up and down"


def test_tokenizer_without_control_tokens_is_encoded_plainly():
    tokenizer = small_tokenizer([])
    encoder = PieceEncoder(tokenizer)
    assert encoder.encode([trusted("<a> b")], at_start=True) == tokenizer.encode("<a> b", add_special_tokens=False)


def test_spans_cover_the_text_in_order():
    encoder = PieceEncoder(tokenizers.chatml_tokenizer())
    spans = encoder.token_spans("up 世 é")
    assert spans[0] == (0, 2)
    assert spans[-1][1] == len("up 世 é")
    assert spans == sorted(spans)
    assert spans.count((3, 4)) == 3
    assert encoder.token_spans("") == []
