# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A policy that has learned to talk and nothing else: whatever it reads, it writes a random call, well formed.

It takes seconds to make, where one that plays takes minutes; enough for tests of what becomes of a reply. In the
compact spelling of a call no token comes twice, so the last token alone says what comes next: attention starts
switched off, and a long conversation cannot confuse it.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken

from examples.sokoban.sokoban_env import TOOLS, SokobanEnv
from examples.tiny_model import build_model, build_tokenizer

_NUM_STEPS = 80
_BATCH_SIZE = 32


def _move(rng: random.Random) -> str:
    name = rng.choice(TOOLS)["function"]["name"]
    return f'<tool_call>{{"name":"{name}","arguments":{{}}}}</tool_call><|im_end|>'


def make_talking_policy(
    folder: Path,
    *,
    seed: int = 0,
    say: Callable[[random.Random], str] = _move,
    frames: Sequence[str] = ("# # - @ $ .\n" * 3, SokobanEnv().task_prompt, json.dumps(TOOLS)),
    tokens: Sequence[str] = (),
) -> None:
    """Write a model folder.

    Args:
        folder: Made; transformers, verl and vLLM load it.
        seed: Of the weights and the moves.
        say: Makes one reply.
        frames: Texts that the policy reads besides its own replies; its vocabulary is made from both.
        tokens: Texts that are one token each, for replies in which more than the last token decides what comes next.
    """
    torch.set_num_threads(1)  # the matrices are tiny, and threads that wait for each other slow a busy machine down
    rng = random.Random(seed)
    texts = [*(say(rng) for _ in range(300)), "user tool_response system", *frames]
    tokenizer = build_tokenizer(texts, vocab_size=1024)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in tokens])
    model = build_model(tokenizer, hidden_size=64, num_layers=2, num_heads=2, seed=seed)
    attention = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    for weight in attention:
        torch.nn.init.zeros_(weight).requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=5e-3)
    header_ids = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for _ in range(_NUM_STEPS):
        rows = [header_ids + tokenizer(say(rng), add_special_tokens=False)["input_ids"] for _ in range(_BATCH_SIZE)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
        labels[:, : len(header_ids)] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight in attention:
        weight.requires_grad_(True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
