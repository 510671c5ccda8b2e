# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shortening text to a number of tokens.

Owns where a text may be cut; refuses to know chat formats. The cost is linear in the limit, not in the text: what
cannot be kept is not even encoded.
"""

import regex

from recipe.agent_env.prompt_styles.encoder import SIDES, PieceEncoder, Side, without_surrogates
from recipe.agent_env.prompt_styles.errors import PromptStyleError

# Longest stretch searched for the border of a visible character: longer ones are cut between code points.
_GRAPHEME_CHARS = 64
_FLAG_RUN_CHARS = 4096
_GRAPHEME = regex.compile(r"\X")
_FLAG_LETTERS = regex.compile(r"[\U0001F1E6-\U0001F1FF]+$")


def truncate(encoder: PieceEncoder, text: str, max_tokens: int, side: Side, marker: str) -> str:
    """Shorten text to at most `max_tokens` tokens; see `PromptStyle.truncate_text`.

    Raises:
        PromptStyleError: `side` is not one of left, right, middle.
    """
    if side not in SIDES:
        raise PromptStyleError(f"side must be one of {', '.join(SIDES)}, got {side!r}")
    if max_tokens <= 0:
        return ""
    text = without_surrogates(text)
    window = (max_tokens + 1) * encoder.longest_token_chars
    if len(text) <= 2 * window:
        head = tail = encoder.token_spans(text)
        if len(head) <= max_tokens:
            return text
        tail_shift = 0
    else:
        head = encoder.token_spans(text[:window])
        tail_shift = len(text) - window
        tail = encoder.token_spans(text[tail_shift:])
    marker_cost = len(encoder.encode_text(marker))
    if marker_cost >= max_tokens:
        marker, marker_cost = "", 0
    keep = max_tokens - marker_cost
    while keep > 0:
        from_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
        begin = _head_end(text, head, from_head)
        end = _tail_start(text, tail, keep - from_head, tail_shift)
        shortened = text[:begin] + marker + text[end:]
        excess = len(encoder.encode_text(shortened)) - max_tokens
        if excess <= 0:
            return shortened
        keep -= excess
    return marker


def ends_of_huge(encoder: PieceEncoder, text: str, max_tokens: int) -> str:
    """Both ends of a text that is sure to have more than `max_tokens` tokens; see `PromptStyle.ends_of_huge`."""
    text = without_surrogates(text)
    if len(text) <= 2 * (max_tokens + 2):  # fits, however long a token may be
        return text
    window = encoder.max_chars(text, max_tokens + 1)
    if window is None or len(text) <= 2 * (window + 1):
        return text
    return text[: window + 1] + text[-window - 1 :]


def _head_end(text: str, spans: list[tuple[int, int]], count: int) -> int:
    """Where the text of the first `count` tokens ends, between visible characters."""
    if count <= 0 or not spans:
        return 0
    cut = spans[count][0] if count < len(spans) else spans[-1][1]
    return _grapheme_start(text, cut)


def _tail_start(text: str, spans: list[tuple[int, int]], count: int, shift: int) -> int:
    """Where the text of the last `count` tokens begins, between visible characters."""
    if count <= 0 or not spans:
        return len(text)
    first = max(0, len(spans) - count)
    cut = spans[first][0] + shift
    if first > 0 and spans[first - 1][1] + shift > cut:
        cut += 1
    return _grapheme_start(text, cut)


def _grapheme_start(text: str, cut: int) -> int:
    """The last border of visible characters at or before `cut`; `cut` itself inside an endless one."""
    begin = max(0, cut - _GRAPHEME_CHARS)
    # Flags are pairs of letters of their own, so counting must begin where their run begins.
    flags = _FLAG_LETTERS.search(text[max(0, begin - _FLAG_RUN_CHARS) : begin])
    begin -= 0 if flags is None else len(flags.group())
    for match in _GRAPHEME.finditer(text, begin, min(len(text), cut + _GRAPHEME_CHARS)):
        if match.end() > cut:
            return match.start() if len(match.group()) < _GRAPHEME_CHARS else cut
    return cut
