# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A Qwen2-shaped model and tokenizer small enough to train on two CPU cores, made from nothing but a seed.

Owns: the tokenizer (byte-level BPE with Qwen2.5's added tokens and chat format), the random model, the folder that
transformers, verl and vLLM load. Refuses to know: environments, prompt styles, training. Never asks a model hub.

    python -m examples.tiny_model OUT_DIR
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# (text, is_special) in the order of Qwen2.5's ids. The last eight are ordinary vocabulary to a decoder: they survive
# `skip_special_tokens=True`, which is why tool calls can be parsed from decoded text.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (END_OF_TURN, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
)

# How Qwen2 cuts text before merging: contractions, words with one leading mark, single digits, punctuation, line ends.
# Source: `tokenizer.json` of Qwen2; the rule decides which strings can become one token, so it is kept as it is.
PRE_TOKENIZER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DEFAULT_SYSTEM_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

# Renders what Qwen2.5's own template renders, line breaks included. `-` at the tag ends leaves no space of our own.
CHAT_TEMPLATE = (
    """
{%- macro open(role) -%}{{ '<|im_start|>' ~ role ~ '\n' }}{%- endmacro -%}
{%- macro close() -%}{{ '<|im_end|>\n' }}{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content if has_system else '"""
    + DEFAULT_SYSTEM_PROMPT
    + """' -%}
{{- open('system') ~ system -}}
{%- if tools -%}
    {{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' -}}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
{%- endif -%}
{{- close() -}}
{%- set turns = messages[1:] if has_system else messages -%}
{%- for message in turns -%}
    {%- if message.role == 'tool' -%}
        {#- Tool messages in a row share one user turn. -#}
        {{- '' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user' -}}
        {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' -}}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else close() -}}
    {%- elif message.role == 'assistant' and message.tool_calls -%}
        {{- '<|im_start|>assistant' -}}
        {%- if message.content -%}{{- '\n' ~ message.content -}}{%- endif -%}
        {%- for call in message.tool_calls -%}
            {%- set function = call.function if call.function else call -%}
            {{- '\n<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' -}}
            {{- (function.arguments | tojson) ~ '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- close() -}}
    {%- else -%}
        {{- open(message.role) ~ message.content ~ close() -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- open('assistant') -}}{%- endif -%}
"""
)


def default_corpus() -> list[str]:
    """Return text in which chat frames, tool calls, JSON schemas, puzzle rooms and plain English occur.

    Only frequencies matter: what is common here becomes one token, so prompts stay short.
    """
    moves = ("up", "down", "left", "right")
    words = (
        "The player stands next to a box and has to push every box onto a target square. A box can be pushed but "
        "never pulled; a wall stops both. Think about which side you must stand on before you push. The move was "
        "made, the room is now as follows. Unknown tool. The arguments are not valid JSON. Answer with one call. "
        "You may call one or more functions to assist with the user query. What is the best next step? All done."
    )
    texts = [words, CHAT_TEMPLATE, DEFAULT_SYSTEM_PROMPT]
    for move in moves:
        schema = {"type": "object", "properties": {"direction": {"type": "string", "enum": list(moves)}}}
        function = {"name": f"push_{move}", "description": f"Push the player {move}", "parameters": schema}
        texts.append(json.dumps({"type": "function", "function": function}))
        texts.append(json.dumps({"name": "move", "arguments": {"direction": move}}))
        texts.append(json.dumps({"name": f"push_{move}", "arguments": {}}))
    for row in range(1, 8):
        texts.append("\n".join(["#######", "#" + "_" * (row % 5) + "@$" + " " * (4 - row % 5) + ".#", "#######"]))
        texts.append(f"Turn {row} of 10: reward {row / 10:.1f}, {10 - row} turns left.")
    return texts


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 2048, *, pre_tokenizer_regex: str = PRE_TOKENIZER_REGEX
) -> PreTrainedTokenizerFast:
    """Train a tokenizer that behaves as Qwen2.5's does, with a small vocabulary.

    Args:
        texts: What merges are learned from; the same texts give the same tokenizer.
        vocab_size: Upper bound of the vocabulary, the 22 added tokens included; at least 278 (256 bytes + 22).
        pre_tokenizer_regex: How text is cut before merging. A pattern that matches long stretches makes tokens of whole
            phrases, so that a small model reads short prompts.

    Returns:
        A tokenizer with Qwen2.5's added tokens behind the learned ones, `<|im_end|>` as eos and `<|endoftext|>` as pad.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes.
    """
    smallest = 256 + len(ADDED_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}; 256 bytes and {len(ADDED_TOKENS)} added tokens need {smallest}")
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pre_tokenizer_regex), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for text, is_special in ADDED_TOKENS:
        token = AddedToken(text, normalized=False, special=is_special)
        if is_special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    # Qwen2Tokenizer puts Qwen's own cutting rule in place of the saved one when it is loaded again.
    is_qwen = pre_tokenizer_regex == PRE_TOKENIZER_REGEX
    return (Qwen2Tokenizer if is_qwen else PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[text for text, is_special in ADDED_TOKENS if is_special and text != END_OF_TEXT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        errors="replace",
        split_special_tokens=False,
        model_max_length=131072,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    max_position_embeddings: int = 4096,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """Make a randomly initialised Qwen2 model in float32 that fits `tokenizer`.

    Args:
        tokenizer: Gives vocabulary size and the eos and pad ids.
        hidden_size: Width; `hidden_size / num_heads` is the head size.
        num_layers: Decoder layers.
        num_heads: Attention heads, as many key-value heads; the head size must be 32 or more (vLLM's CPU attention).
        max_position_embeddings: Longest context in tokens.
        seed: Same seed, same weights; the caller's random state is left as it was.

    Raises:
        ValueError: The heads do not divide the width, or are smaller than 32.
    """
    head_size, rest = divmod(hidden_size, num_heads)
    if rest or head_size < 32:
        raise ValueError(f"hidden_size {hidden_size} / num_heads {num_heads} must be a whole head size of 32 or more")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 4,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_position_embeddings,
        # Input and output embeddings stay apart, as in the larger Qwen2.5 models: sharing ties the first random
        # predictions to the last token read.
        tie_word_embeddings=False,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_sliding_window=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.update(
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save_tiny_model(
    folder: Path | str,
    *,
    texts: Iterable[str] | None = None,
    vocab_size: int = 2048,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    max_position_embeddings: int = 4096,
    seed: int = 0,
) -> Path:
    """Write tokenizer and model so that `AutoTokenizer`, `AutoModelForCausalLM`, verl and vLLM load the folder.

    Args:
        folder: Made when missing; files in it with the same names are replaced.
        texts: What the tokenizer learns from; `default_corpus()` when None.
        vocab_size, hidden_size, num_layers, num_heads, max_position_embeddings, seed: See `build_tokenizer` and
            `build_model`.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(default_corpus() if texts is None else texts, vocab_size)
    model = build_model(
        tokenizer,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_position_embeddings=max_position_embeddings,
        seed=seed,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def main() -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--max-position-embeddings", type=int, default=4096, help="longest context in tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    print(save_tiny_model(args.pop("out_dir"), **args))


if __name__ == "__main__":
    main()
