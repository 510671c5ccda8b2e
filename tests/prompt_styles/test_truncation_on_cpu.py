# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`truncate_text`: how much is kept, which end, and where the cut falls (P49, P50)."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.agent_env.prompt_styles import DEFAULT_MARKER, PromptStyleError
from tests.prompt_styles.families import FAMILIES

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
