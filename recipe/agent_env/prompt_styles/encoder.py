# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Text of known provenance to token ids.

Owns the one rule that keeps environments from forging turns: a string of a control token becomes that token only where
the template wrote it. Refuses to know chat formats; it sees pieces of text, each trusted or not.

"Control" is every added token of the tokenizer, flagged special or not (`<tool_call>`, `<think>`), except those that
are nothing but white space.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer

from recipe.agent_env.prompt_styles.errors import PromptStyleError
from recipe.agent_env.prompt_styles.ordinary import ordinary_tokenizer
from recipe.agent_env.prompt_styles.token_lengths import chars_per_token

Side = Literal["left", "right", "middle"]
SIDES: tuple[Side, ...] = ("left", "right", "middle")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text and who wrote it."""

    text: str
    """The text itself."""

    is_trusted: bool
    """True when the template wrote it: only then do control strings become control tokens."""


def trusted(text: str) -> Piece:
    """Text of the template."""
    return Piece(text, True)


def untrusted(text: str) -> Piece:
    """Text of a task, a tool schema, an environment or a model: ordinary text, whatever it spells."""
    return Piece(without_surrogates(text), False)


def without_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD, so that the text can be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class PieceEncoder:
    """Encodes pieces with a fast tokenizer, and decodes ids."""

    def __init__(self, tokenizer: Any) -> None:
        """Read the tokenizer's control tokens and build its ordinary twin.

        Args:
            tokenizer: A Hugging Face fast tokenizer (one with `backend_tokenizer`).

        Raises:
            PromptStyleError: The tokenizer is not a fast one, or spells a control token in ordinary text.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise PromptStyleError(
                f"expected a fast tokenizer (`backend_tokenizer`), got {type(tokenizer).__name__}: without it, text "
                "of the environment cannot be kept apart from control tokens; load the model's tokenizer.json"
            )
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._controls: dict[str, tuple[int, AddedToken]] = {
            token.content: (token_id, token) for token_id, token in added.items() if not _is_blank_text(token)
        }
        self._special_ids = frozenset(token_id for token_id, token in self._controls.values() if token.special)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        blanks = [token for token in added.values() if _is_blank_text(token)]
        # A border that no text can spell: ordinary text is encoded in one call, with this in place of control tokens.
        self._border = f"\ue000{secrets.token_hex(16)}\ue000"
        self._ordinary = ordinary_tokenizer(backend, forbidden=list(self._controls), keep=blanks, border=self._border)
        self._border_id = self._ordinary.token_to_id(self._border)
        # The twin numbers its few added tokens anew.
        self._own_ids = {self._ordinary.token_to_id(t.content): backend.token_to_id(t.content) for t in blanks}
        self._blanks = blanks

    def control_id(self, content: str) -> int | None:
        """The id of a control token, or None when the tokenizer has no such token."""
        entry = self._controls.get(content)
        return None if entry is None else entry[0]

    def is_special(self, token_id: int) -> bool:
        """Whether a control token is one that the tokenizer flags as special."""
        return token_id in self._special_ids

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """Split trusted text into ordinary stretches (id None) and control tokens (with their id), in order."""
        parts: list[tuple[str, int | None]] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            if match.start() > end:
                parts.append((text[end : match.start()], None))
            parts.append((match.group(), self._controls[match.group()][0]))
            end = match.end()
        if end < len(text):
            parts.append((text[end:], None))
        return parts

    def encode(self, pieces: Iterable[Piece], *, at_start: bool = False) -> list[int]:
        """Encode pieces as one text.

        Ordinary text is joined across pieces and encoded between control tokens in one go, as the tokenizer itself
        would do with the whole text: so a merge over the border of template and content comes out the same.

        Args:
            pieces: In order.
            at_start: Whether the text opens the sequence. Some tokenizers put a blank in front of the first word.

        Returns:
            Token ids.
        """
        runs: list[list[str]] = [[]]
        controls: list[str] = []
        for piece in pieces:
            if not piece.is_trusted:
                runs[-1].append(piece.text)
                continue
            for text, control_id in self.split(piece.text):
                if control_id is None:
                    runs[-1].append(text)
                else:
                    controls.append(text)
                    runs.append([])
        return self._encode_runs(["".join(run) for run in runs], controls, at_start)

    def _encode_runs(self, runs: list[str], controls: list[str], at_start: bool) -> list[int]:
        for i, content in enumerate(controls):
            token = self._controls[content][1]
            if token.lstrip:
                runs[i] = runs[i].rstrip()
            if token.rstrip:
                runs[i + 1] = runs[i + 1].lstrip()
        ids = self._ordinary_ids(self._border.join(runs if at_start else ["", *runs]))
        if not at_start:
            ids = ids[1:]
        control_ids = iter([self._controls[content][0] for content in controls])
        return [next(control_ids) if i == self._border_id else self._own_ids.get(i, i) for i in ids]

    def _ordinary_ids(self, text: str) -> list[int]:
        return self._ordinary.encode(text, add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text as it would stand in the middle of a sequence."""
        return self.encode([untrusted(text)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, control tokens spelled out; ids outside the vocabulary are left out."""
        known = token_ids if min(token_ids, default=0) >= 0 else [i for i in token_ids if i >= 0]
        return self._backend.decode(known, skip_special_tokens=False)

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """The character span of each token of ordinary text; tokens that share a character share its span."""
        offsets = self._ordinary.encode(self._border + text, add_special_tokens=False).offsets[1:]
        shift = len(self._border)
        return [(start - shift, end - shift) for start, end in offsets]

    def max_chars(self, text: str, max_tokens: int) -> int | None:
        """Characters that `max_tokens` tokens of this text can stand for at most; None where there is no bound.

        The first call looks through the vocabulary, which takes a fraction of a second.
        """
        if self._chars_per_token is None:
            return None
        in_ascii, in_any = self._chars_per_token
        return max_tokens * (in_ascii if text.isascii() else in_any)

    @cached_property
    def _chars_per_token(self) -> tuple[int, int] | None:
        return chars_per_token(self._ordinary, self._blanks)

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters in the longest entry of the vocabulary: no token stands for more text than that."""
        return max(map(len, self._ordinary.get_vocab(with_added_tokens=False)))


def _is_blank_text(token: AddedToken) -> bool:
    """Runs of blanks that some vocabularies hold as added tokens: they say nothing and stay usable in any text."""
    return not token.special and not token.content.strip()
