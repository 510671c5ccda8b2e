# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Dumped episodes as records, whatever columns a dump has.

Owns the names of the dump's columns and what stands in for a missing one. Refuses to know how a page looks.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipe.agent_env.rollout.token_texts import TokenTexts

MASKED_REASONS = frozenset({"failed", "prompt_too_long"})
"""End reasons of rows that carry no learning signal."""

_VALUE_COLUMNS = ("advantages", "returns", "log_probs", "rollout_log_probs")


class DumpError(ValueError):
    """A dump cannot be read; the text names the file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One reply of the policy and what followed it."""

    reply: str
    """What the policy wrote."""
    observation: str
    """What came after it; empty at the end."""
    reward: float
    """What the turn earned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpedEpisode:
    """One line of a dump. P prompt tokens, R response tokens; both 0 where the dump holds texts only."""

    env_name: str
    """Environment."""
    seed: int | None
    """Seed of its start."""
    step: int
    """Training step; 0 outside training."""
    end_reason: str
    """How it ended."""
    episode_return: float
    """Sum of its rewards."""
    success: float | None
    """1.0 solved, 0.0 not, None where the environment does not say."""
    uid: str
    """Group of rollouts that share a row."""
    rollout_index: int
    """Which repetition of its row."""
    num_restarts: int
    """Attempts that failed before."""
    failure: str
    """Text of the last error; empty without one."""
    env_kwargs: Any
    """Options of the environment."""
    prompt_text: str
    """The first prompt; empty when `prompt_tokens` has it."""
    turns: list[Turn]
    """What was said; empty when `response_tokens` has it."""
    renderings: list[str] = field(default_factory=list)
    """The start and the state after each turn, as the environment shows it; empty where none was recorded."""
    prompt_tokens: list[str] = field(default_factory=list)
    """Text of each prompt token, length P."""
    response_tokens: list[str] = field(default_factory=list)
    """Text of each response token, length R."""
    prompt_ids: list[int] = field(default_factory=list)
    """Ids, length P."""
    response_ids: list[int] = field(default_factory=list)
    """Ids, length R."""
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Shape (R,); True where the policy sampled."""
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Shape (R,)."""
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """`advantages`, `returns`, `log_probs`, `rollout_log_probs`, those that the dump has; shape (R,) each."""

    @property
    def is_masked(self) -> bool:
        """Whether the row carries no learning signal."""
        return self.end_reason in MASKED_REASONS

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        if not len(self.mask):
            return len(self.turns)
        return int(np.count_nonzero(np.diff(self.mask.astype(np.int8), prepend=0) == 1))


def find_dump_files(paths: Sequence[str | Path]) -> list[Path]:
    """The `.jsonl` files among files and folders, those of a folder in the order of their steps.

    Raises:
        DumpError: A path does not exist, or there is no file at all.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(path.glob("*.jsonl"), key=_step_order)
        elif path.exists():
            files.append(path)
        else:
            raise DumpError(f"{path}: no such file or folder; set trainer.rollout_data_dir=DIR in the run to get dumps")
    if not files:
        raise DumpError(
            f"no .jsonl file in {', '.join(map(str, paths))}; set trainer.rollout_data_dir=DIR in the run to get dumps"
        )
    return files


def _step_order(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.stem)
    return (int(number.group()) if number else 0, path.name)


def read_dumps(files: Iterable[Path], tokenizer: Any = None) -> Iterator[DumpedEpisode]:
    """All episodes of the files, in order.

    Args:
        files: JSONL files, one episode a line.
        tokenizer: Gives the text of each token where the dump has only ids.

    Raises:
        DumpError: A line is no episode. An unfinished last line (the run was ended in the middle of it) is left out.
    """
    texts = TokenTexts(tokenizer) if tokenizer is not None else None
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as exc:
                    if not line.endswith(b"\n"):
                        break
                    raise DumpError(f"{file}, line {number}: no JSON ({exc})") from exc
                yield _episode(row, texts, f"{file}, line {number}")


def _episode(row: Any, texts: TokenTexts | None, where: str) -> DumpedEpisode:
    """One line as a record."""
    if not isinstance(row, dict) or not ("turns" in row or "response_mask" in row):
        raise DumpError(
            f"{where}: expected a dumped episode with 'turns' or 'response_mask', "
            f"found {sorted(row)[:12] if isinstance(row, dict) else type(row).__name__}"
        )
    try:
        return _read_episode(row, texts)
    except (KeyError, TypeError, ValueError) as exc:
        raise DumpError(f"{where}: {type(exc).__name__}: {exc}") from exc


def _read_episode(row: dict[str, Any], texts: TokenTexts | None) -> DumpedEpisode:
    tokens = _token_columns(row, texts)
    turns = [
        Turn(
            reply=str(turn.get("reply") or ""),
            observation=str(turn.get("observation") or ""),
            reward=float(turn.get("reward") or 0.0),
        )
        for turn in row.get("turns") or []
    ]
    success, seed = row.get("acc"), row.get("seed")
    total = row.get("episode_return", row.get("score"))
    return DumpedEpisode(
        env_name=str(row.get("env_name") or "?"),
        seed=None if seed is None else int(seed),
        step=int(row.get("step") or 0),
        end_reason=str(row.get("end_reason") or "?"),
        episode_return=float(total) if total is not None else sum(turn.reward for turn in turns),
        success=None if success is None or math.isnan(float(success)) else float(success),
        uid=str(row.get("uid") or ""),
        rollout_index=int(row.get("rollout_index") or 0),
        num_restarts=int(row.get("num_restarts") or 0),
        failure=str(row.get("failure") or ""),
        env_kwargs=row.get("env_kwargs") or {},
        prompt_text="" if tokens else str(row.get("input") or ""),
        turns=[] if tokens else turns,
        renderings=[str(picture or "") for picture in row.get("renderings") or []],
        **tokens,
    )


def _token_columns(row: dict[str, Any], texts: TokenTexts | None) -> dict[str, Any]:
    """What the dump knows per token; empty where it holds texts only.

    Raises:
        ValueError: Columns that must have equal lengths have not.
    """
    if not row.get("response_mask"):
        return {}
    ids = {name: list(row.get(f"{name}_ids") or []) for name in ("prompt", "response")}
    tokens = {name: row.get(f"{name}_tokens") for name in ids}
    for name in ids:
        if tokens[name] is None and texts is not None:
            tokens[name] = texts(ids[name])
    if tokens["prompt"] is None or tokens["response"] is None:
        return {}
    mask = np.asarray(row["response_mask"], dtype=np.float64) > 0.5
    columns = {"response_tokens": tokens["response"], "rewards": row.get("rewards") or [0.0] * len(mask)}
    if ids["response"]:
        columns["response_ids"] = ids["response"]
    values = {name: row[name] for name in _VALUE_COLUMNS if row.get(name) is not None}
    for name, column in {**columns, **values}.items():
        if len(column) != len(mask):
            raise ValueError(f"{name} has {len(column)} entries, response_mask has {len(mask)}")
    return {
        "prompt_tokens": list(tokens["prompt"]),
        "response_tokens": list(tokens["response"]),
        "prompt_ids": ids["prompt"],
        "response_ids": ids["response"],
        "mask": mask,
        "rewards": np.asarray(columns["rewards"], dtype=np.float64),
        "values": {name: np.asarray(column, dtype=np.float64) for name, column in values.items()},
    }
