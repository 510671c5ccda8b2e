# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`truncate_text`: how much is kept, which end, and where the cut falls (P49, P50)."""

import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from recipe.agent_env.prompt_styles import DEFAULT_MARKER, PromptStyleError, get_prompt_style
from recipe.agent_env.prompt_styles import encoder as encoder_module
from recipe.agent_env.prompt_styles.encoder import without_surrogates
from recipe.agent_env.prompt_styles.token_lengths import chars_per_token
from tests.prompt_styles.families import FAMILIES
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer

STYLES = pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[5], FAMILIES[6]], ids=lambda family: family.name)
SIDES = pytest.mark.parametrize("side", ["left", "right", "middle"])
FAMILY_EMOJI = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
FLAG = "\U0001f1eb\U0001f1f7"


def count(style, text):
    return len(style.encode_text(text))


@STYLES
@SIDES
@pytest.mark.parametrize("letter", ["a", "世", "😀", FAMILY_EMOJI, FLAG, "e\u0301"], ids=ascii)
@pytest.mark.parametrize("limit", [1, 2, 7, 50, 351])
def test_limit_holds_for_every_script(family, side, letter, limit):
    """P49: at most the limit, and no character is torn."""
    style = family.build()
    shortened = style.truncate_text(letter * 200, limit, side, marker="|")
    assert count(style, shortened) <= limit
    assert shortened.replace(letter, "").strip("|") == ""


@pytest.mark.parametrize("family", [FAMILIES[0]], ids=lambda family: family.name)
@pytest.mark.parametrize("letter", ["x ", "世", "😀"], ids=ascii)
@SIDES
def test_most_of_the_limit_is_used(family, letter, side):
    style = family.build()
    shortened = style.truncate_text(letter * 500, 100, side)
    assert 90 <= count(style, shortened) <= 100


@pytest.mark.parametrize(
    ("side", "keeps_head", "keeps_tail"), [("left", False, True), ("right", True, False), ("middle", True, True)]
)
@pytest.mark.parametrize("length", [200, 200_000], ids=["short", "huge"])
def test_each_side_keeps_what_its_name_says(side, keeps_head, keeps_tail, length):
    """P50: `left` cuts on the left, as verl's truncation does."""
    text = "HEAD" + " filler" * length + " TAIL"
    shortened = FAMILIES[0].build().truncate_text(text, 40, side)
    assert shortened.startswith("HEAD") == keeps_head
    assert shortened.endswith("TAIL") == keeps_tail
    assert shortened.startswith(DEFAULT_MARKER) == (not keeps_head)
    assert shortened.endswith(DEFAULT_MARKER) == (not keeps_tail)
    assert shortened.count(DEFAULT_MARKER) == 1


@STYLES
@SIDES
@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["limit - 1", "limit", "limit + 1"])
def test_text_within_the_limit_is_left_alone(family, side, offset):
    style = family.build()
    text = "push the box up\nand then left"
    needed = count(style, text)
    shortened = style.truncate_text(text, needed + offset, side)
    assert (shortened == text) == (offset >= 0)
    assert count(style, shortened) <= needed + offset


def test_middle_keeps_halves_of_the_same_size():
    style = FAMILIES[0].build()
    head, _, tail = style.truncate_text(" x" * 1000, 101, "middle", marker="|").partition("|")
    assert abs(count(style, head) - count(style, tail)) <= 1


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_left_gives_no_text(limit):
    assert FAMILIES[0].build().truncate_text("abc", limit, "right") == ""


def test_marker_that_would_fill_the_limit_is_left_out():
    style = FAMILIES[0].build()
    needed = count(style, DEFAULT_MARKER)
    assert DEFAULT_MARKER not in style.truncate_text("x " * 100, needed, "right")
    assert DEFAULT_MARKER in style.truncate_text("x " * 100, needed + 1, "right")


@SIDES
@pytest.mark.parametrize("letter", ["世", " "], ids=["unknown", "blank"])
def test_huge_text_that_is_few_tokens_is_cut_all_the_same(side, letter):
    """A run of unknown letters can be one token, and a normalizer can take blanks away."""
    family = next(family for family in FAMILIES if family.name == "metaspace")
    style = family.build()
    assert count(style, style.truncate_text(letter * 100_000, 5, side)) <= 5


def test_unknown_side_is_refused():
    with pytest.raises(PromptStyleError, match="one of left, right, middle, got 'centre'"):
        FAMILIES[0].build().truncate_text("abc", 1, "centre")


def test_cut_in_a_very_long_character_falls_between_code_points():
    """A letter with a thousand accents is longer than the search for its border."""
    style = FAMILIES[0].build()
    shortened = style.truncate_text("a" + "\u0316" * 1000, 50, "right", marker="")
    assert 0 < count(style, shortened) <= 50
    assert shortened.startswith("a")


def test_lone_surrogate_does_not_matter():
    assert FAMILIES[0].build().truncate_text("\ud800" * 50, 9, "left", marker="").strip("\ufffd") == ""


@STYLES
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab \n世😀e\u0301\u200d\U0001f469\U0001f1eb\U0001f1f7\r\t", max_size=80),
    limit=st.integers(0, 40),
    side=st.sampled_from(["left", "right", "middle"]),
    marker=st.sampled_from(["", "|", DEFAULT_MARKER]),
)
def test_any_text_fits_and_is_made_of_whole_characters(family, text, limit, side, marker):
    style = family.build()
    shortened = style.truncate_text(text, limit, side, marker)
    assert count(style, shortened) <= max(limit, 0)
    if shortened == text:
        return
    kept = shortened.replace(marker, "\0", 1).split("\0") if marker and marker in shortened else None
    if kept is not None and side != "middle":
        kept = [part for part in kept if part]
    letters = regex.findall(r"\X", text)
    for part in kept or []:
        joined = (
            "".join(letters[: len(regex.findall(r"\X", part))]),
            "".join(letters[-len(regex.findall(r"\X", part)) :]),
        )
        assert not part or part in joined


def test_cost_follows_the_limit_and_not_the_text(monkeypatch):
    """A service can answer with megabytes: what cannot be kept is not even encoded."""
    style = FAMILIES[0].build()
    encoder = style._encoder
    seen = []
    plain = encoder.token_spans
    monkeypatch.setattr(encoder, "token_spans", lambda text: seen.append(len(text)) or plain(text))
    style.truncate_text("x " * 2_000_000, 64, "middle")
    assert sum(seen) <= 2 * 65 * encoder.longest_token_chars < 20_000


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), unit=st.text(alphabet="a \n-世ⅷ\u1f82u\u0308\u0304e\u0301\u1161\u11a8가", max_size=6))
def test_no_token_stands_for_more_text_than_said(family, text, unit):
    """A composed letter is one character of a token and up to four of the text."""
    encoder = family.build()._encoder
    for whole in (text, unit * 40, unicodedata.normalize("NFD", text), "\u03b1\u0313\u0300\u0345" * 30, " " * 300):
        bound = encoder.max_chars(whole, len(encoder.encode_text(whole)))
        assert bound is None or len(without_surrogates(whole)) <= bound


def test_bound_is_known_for_families_that_keep_every_character():
    known = {family.name: family.build()._encoder.max_chars("a", 1) is not None for family in FAMILIES}
    assert known.pop("metaspace") is False, "unknown letters in a row are one token there"
    assert all(known.values())


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, 4),
        ({"normalizer": normalizers.NFC()}, 8),
        ({"normalizer": normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.NFD()])}, 4),
        ({"normalizer": normalizers.Replace("aa", "b")}, None),
        ({"normalizer": normalizers.Replace(Regex(" +"), " ")}, None),
        ({"normalizer": normalizers.Strip()}, None),
        ({"pre_tokenizer": pre_tokenizers.Split(" ", "removed")}, None),
        ({"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, None),
        ({"model": models.WordLevel({"ab": 0, "[UNK]": 1}, unk_token="[UNK]")}, None),
        ({"model": models.BPE(vocab={"a": 0}, merges=[])}, None),
        ({"kept": [AddedToken("   \n  ")]}, 6),
        ({"kept": [AddedToken("  ", lstrip=True)]}, None),
        ({"kept": [AddedToken("  ", rstrip=True)]}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else repr(value),
)
def test_bound_comes_from_the_parts_of_the_tokenizer(change, bound):
    """Text that is dropped or joined by a part has no bound, so such a text is encoded whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {entry: i for i, entry in enumerate([*alphabet, "ab", "abab"])}
    backend = Tokenizer(change.get("model") or models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")]))
    splitters = [change["pre_tokenizer"]] if "pre_tokenizer" in change else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if "normalizer" in change:
        backend.normalizer = change["normalizer"]
    found = chars_per_token(backend, change.get("kept", []))
    assert (None if found is None else found[1]) == bound
    if bound == 8:
        assert found == (4, 8)


def test_bound_holds_where_letters_fall_back_to_bytes():
    """Gemma's kind: no byte-level letters, so a composed letter may be one of an entry."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    assert chars_per_token(backend, []) == (6, 6)
    backend.normalizer = normalizers.NFKC()
    assert chars_per_token(backend, []) == (6, 24)
    del vocab["<0x7F>"]
    assert chars_per_token(Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True)), []) is None


@settings(max_examples=60, deadline=None)
@given(
    unit=st.text(alphabet="ab \n世😀e\u0301\u200d-=", min_size=1, max_size=5),
    length=st.integers(0, 4000),
    limit=st.integers(0, 6),
    less=st.integers(0, 3),
    side=st.sampled_from(["left", "right", "middle"]),
)
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[5], FAMILIES[6], FAMILIES[7]], ids=lambda family: family.name)
def test_both_ends_of_a_huge_text_are_cut_as_the_whole_is(family, unit, length, limit, less, side):
    style = family.build()
    text = "<" + unit * (length // len(unit)) + ">"
    ends = style.ends_of_huge(text, limit)
    assert style.truncate_text(ends, limit - less, side) == style.truncate_text(text, limit - less, side)
    assert (count(style, ends) <= limit) == (count(style, text) <= limit)
    assert ends == text or count(style, ends) > limit
    assert not style.is_surely_longer(text, count(style, text))
    assert ends == text or style.is_surely_longer(ends, limit)


def test_ends_of_huge_text_are_exactly_what_can_matter():
    style = FAMILIES[0].build()
    window = 4 * style._encoder.longest_token_chars + 1
    text = "".join(chr(ord("a") + i % 26) for i in range(2 * window + 1))
    assert style.ends_of_huge(text[:-1], 3) == text[:-1]
    assert style.ends_of_huge(text, 3) == text[:window] + text[-window:]
    assert style.ends_of_huge("\ud83d\ude00\ud800", 3) == "😀\ufffd"


def test_length_that_says_enough_is_exact():
    """Letters outside ASCII may have been composed of several, and a surrogate pair is one."""
    style = FAMILIES[0].build()
    longest = style._encoder.longest_token_chars
    for text, bound in (("a" * 2 * longest, 2), ("é" * 4 * longest, 2), ("\ud83d\ude00" * 4 * longest, 2)):
        assert not style.is_surely_longer(text, bound)
        assert style.is_surely_longer(text + text[-2:] + text[0], bound)


def test_short_text_does_not_cost_a_look_at_the_vocabulary(monkeypatch):
    """It takes a tenth of a second, and would be paid while other episodes wait."""
    style = get_prompt_style("qwen2_5")(qwen2_5_tokenizer())
    monkeypatch.setattr(encoder_module, "chars_per_token", lambda *_: pytest.fail("the vocabulary was looked through"))
    assert style.ends_of_huge("a" * 204, 100) == "a" * 204
    assert not style.is_surely_longer("a" * 100, 100)
