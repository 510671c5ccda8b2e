# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The text of each single token, for people to look at.

Owns how a token that holds only a part of a letter is shown. Refuses to know episodes, prompt styles and models.
"""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_PARTS = 8
"""Tokens that one letter may spread over; four bytes are the most in UTF-8, the rest is for joined letters."""


class TokenTexts:
    """Texts of single tokens that together spell what was written, control tokens included.

    Args:
        tokenizer: A Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # Some tokenizers drop a leading blank when a token stands alone: each is read behind a plain letter.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The text of each token.

        Args:
            ids: Token ids.

        Returns:
            One text per id. Where several tokens share a letter, the last of them has it and the others are empty.
        """
        texts = [self._text_of(int(token_id)) for token_id in ids]
        position = 0
        while position < len(texts):
            num_joined = self._num_joined(ids, texts, position) if _BROKEN in texts[position] else 1
            if num_joined > 1:
                joined = self._behind_anchor([int(token_id) for token_id in ids[position : position + num_joined]])
                texts[position : position + num_joined] = [""] * (num_joined - 1) + [joined]
            position += num_joined
        return texts

    def _num_joined(self, ids: Sequence[int], texts: list[str], position: int) -> int:
        """How many tokens from `position` on spell whole letters together; 1 when no few of them do."""
        for num_joined in range(2, min(_MAX_PARTS, len(ids) - position) + 1):
            if _BROKEN not in texts[position + num_joined - 1]:
                return 1
            part = [int(token_id) for token_id in ids[position : position + num_joined]]
            if _BROKEN not in self._behind_anchor(part):
                return num_joined
        return 1

    def _text_of(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._behind_anchor([token_id])
        return text

    def _behind_anchor(self, ids: list[int]) -> str:
        text = self._decode(self._anchor + ids)
        return text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
