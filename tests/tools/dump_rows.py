# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dumped episodes made by hand, in the columns of a training run's dump."""

import json
from pathlib import Path
from typing import Any

PROMPT = ["<|im_start|>", "user", "\n", "Go", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
REPLY = ["I", " move", " up", "<|im_end|>"]
ATTACK = "</script><img src=x onerror=alert(1)>"
OBSERVATION = [
    "\n",
    "<|im_start|>",
    "user",
    "\n",
    "# @ #",
    ATTACK,
    "<|im_end|>",
    "\n",
    "<|im_start|>",
    "assistant",
    "\n",
]


def make_row(number: int = 0, *, num_turns: int = 2, **changes: Any) -> dict[str, Any]:
    """One line of a dump: `num_turns` replies with an observation between, reward 1 for the last and -0.1 before.

    Args:
        number: Told apart by it: seed, group and numbers per token.
        num_turns: Turns of the policy.
        changes: Columns to set otherwise; None leaves a column out.
    """
    tokens: list[str] = []
    mask: list[int] = []
    rewards: list[float] = []
    for turn in range(num_turns):
        if turn > 0:
            tokens += OBSERVATION
            mask += [0] * len(OBSERVATION)
            rewards += [0.0] * len(OBSERVATION)
        tokens += REPLY
        mask += [1] * len(REPLY)
        rewards += [0.0] * (len(REPLY) - 1) + [1.0 if turn + 1 == num_turns else -0.1]
    log_probs = [-0.01 * (i + number % 7) * m for i, m in enumerate(mask)]
    row = {
        "input": "Go",
        "output": "",
        "score": sum(rewards),
        "step": 1 + number // 100,
        "prompt_tokens": PROMPT,
        "prompt_ids": list(range(100, 100 + len(PROMPT))),
        "response_tokens": tokens,
        "response_ids": list(range(len(tokens))),
        "response_mask": mask,
        "rewards": rewards,
        "advantages": [(0.5 - 0.1 * i) * m for i, m in enumerate(mask)],
        "returns": [sum(rewards[i:]) * m for i, m in enumerate(mask)],
        "log_probs": log_probs,
        "rollout_log_probs": [value + 0.001 * m for value, m in zip(log_probs, mask, strict=True)],
        "turns": [{"reply": "".join(REPLY), "observation": "", "reward": 1.0}],
        "env_name": "grid-v0" if number % 2 == 0 else "maze-v0",
        "seed": number,
        "env_kwargs": {"size": 5},
        "uid": f"group-{number // 4}",
        "rollout_index": number % 4,
        "end_reason": "terminated" if number % 3 else "max_turn",
        "acc": float(number % 3 > 0),
        "episode_return": sum(rewards),
        "num_restarts": 0,
        "failure": None,
    }
    return {name: value for name, value in {**row, **changes}.items() if value is not None or name == "failure"}


def write_dump(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a dump, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
