# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How much text one token can stand for.

Owns the reading of a tokenizer's parts for it. Refuses to know pieces, chat formats and limits.
"""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

# Characters that canonical composition may turn into one: U+1F82 is made of four. In UTF-8, which byte-level
# vocabularies count in, the worst is U+01D6: three characters become two bytes.
_COMPOSED_CHARS = 4
_COMPOSED_CHARS_PER_BYTE = 2
_COMPOSING = {"NFC", "NFKC"}
_KEEPING_NORMALIZERS = {*_COMPOSING, "NFD", "NFKD", "Prepend", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace"}


def chars_per_token(tokenizer: Tokenizer, kept: list[AddedToken]) -> tuple[int, int] | None:
    """The most characters of text that tokens of ordinary text can stand for, per token.

    Args:
        tokenizer: A tokenizer without control tokens.
        kept: Its added tokens that ordinary text may become.

    Returns:
        For text in ASCII and for any text. None where there is no bound: the tokenizer drops or joins characters
        (blanks, unknown letters).
    """
    normalizers, splitters = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    is_byte_level = "ByteLevel" in {part["type"] for part in normalizers + splitters}
    spells_bytes = is_byte_level and vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    falls_back = getattr(tokenizer.model, "byte_fallback", False) and all(f"<0x{b:02X}>" in vocab for b in range(256))
    is_whole = isinstance(tokenizer.model, models.BPE) and not tokenizer.model.end_of_word_suffix
    keeps_all = is_whole and all(map(_keeps_normalizing, normalizers)) and all(map(_keeps_splitting, splitters))
    if not (keeps_all and (spells_bytes or falls_back)) or any(token.lstrip or token.rstrip for token in kept):
        return None
    longest = max(map(len, [*vocab, *(token.content for token in kept)]))
    composes = any(part["type"] in _COMPOSING for part in normalizers)
    joined = 1 if not composes else _COMPOSED_CHARS_PER_BYTE if spells_bytes else _COMPOSED_CHARS
    return longest, longest * joined


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the settings of its single steps."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    steps = settings.get("normalizers") or settings.get("pretokenizers") or [settings]
    return list(steps)


def _keeps_normalizing(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", step["content"] + ".")) <= len(step["content"])
    return step["type"] in _KEEPING_NORMALIZERS


def _keeps_splitting(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING_PRE_TOKENIZERS
