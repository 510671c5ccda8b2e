# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows to play, and the one place where chat becomes tokens.

Owns the data files (which episodes are played) and the cutting of over-long text. It leaves to the prompt style how a
model family writes a conversation, and knows nothing of HTTP, engines or rewards.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import Dataset

from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.prompt_styles.encoder import Side
from recipe.agent_env.prompt_styles.errors import Message
from recipe.agent_env.prompt_styles.registry import get_prompt_style

REQUIRED_COLUMNS = ("env_name", "seed", "env_kwargs")
TRUNCATION_SIDES = ("left", "right", "middle")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """Which episode to play."""

    env_name: str
    """Name under which the service knows the environment."""
    seed: int
    """Seed of the episode's start."""
    env_kwargs: dict[str, Any]
    """Options of the environment, JSON values only."""


class DataRowError(ValueError):
    """A data file holds a row that cannot be played."""


class AgentDataset(Dataset):
    """Episodes of one or many parquet or jsonl files, in file order.

    An item is a dict of `env_name` (str), `seed` (int), `env_kwargs` (dict), `data_source` (the env_name unless the
    file has its own column: verl groups validation metrics by it), `index` (row number over all files), the file's
    extra columns as they are, and `dummy_tensor` (verl's trainer counts rows by a tensor).

    Args:
        data_files: One path or a list of them; `.parquet`, `.jsonl` or `.json` (one object a line).
        tokenizer: Unused here; verl hands it to every dataset.
        processor: Unused; observations are text.
        config: The `data` section; `train_max_samples` and the like come through `max_samples`.
        max_samples: Keep the first rows only; -1 keeps all.

    Raises:
        DataRowError: A file is missing, empty or of an unknown kind, or a row is bad; names file, row and column.
    """

    def __init__(
        self,
        data_files: str | list[str] | ListConfig,
        tokenizer: Any = None,
        processor: Any = None,
        config: DictConfig | None = None,
        max_samples: int = -1,
    ):
        paths = [data_files] if isinstance(data_files, str) else list(data_files)
        if not paths:
            raise DataRowError("expected at least one data file, got an empty list")
        self._rows = [row for path in paths for row in _read_rows(os.path.expanduser(path))]
        if max_samples > 0:
            self._rows = self._rows[:max_samples]
        extra_columns = {column for row in self._rows for column in row}
        for index, row in enumerate(self._rows):
            row["index"] = index
            for column in extra_columns - row.keys():
                row[column] = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {**self._rows[item], "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}

    def spec(self, item: int) -> EpisodeSpec:
        """The episode of one row."""
        row = self._rows[item]
        return EpisodeSpec(env_name=row["env_name"], seed=row["seed"], env_kwargs=row["env_kwargs"])


def _read_rows(path: str) -> list[dict[str, Any]]:
    """All rows of one file, checked."""
    if not os.path.exists(path):
        raise DataRowError(
            f"data file {path!r} does not exist; data.train_files and data.val_files name the files to play"
        )
    if path.endswith(".parquet"):
        frame = pd.read_parquet(path)
    elif path.endswith((".jsonl", ".json")):
        frame = pd.read_json(path, lines=True, dtype=False)
    else:
        raise DataRowError(f"data file {path!r}: expected .parquet, .jsonl or .json, got {os.path.splitext(path)[1]!r}")
    missing = [column for column in REQUIRED_COLUMNS if column not in frame.columns]
    if missing:
        raise DataRowError(
            f"data file {path!r}: no column {', '.join(missing)} among {sorted(map(str, frame.columns))}; "
            f"expected {', '.join(REQUIRED_COLUMNS)}"
        )
    if frame.empty:
        raise DataRowError(f"data file {path!r}: no rows")
    rows = []
    for number, record in enumerate(frame.to_dict(orient="records")):
        where = f"data file {path!r}, row {number}"
        row = {str(column): value for column, value in record.items()}
        row["env_name"] = _checked_env_name(row["env_name"], where)
        row["seed"] = _checked_seed(row["seed"], where)
        row["env_kwargs"] = _checked_env_kwargs(row["env_kwargs"], where)
        row.setdefault("data_source", row["env_name"])
        rows.append(row)
    return rows


def _checked_env_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataRowError(f"{where}, column 'env_name': expected a non-empty string, found {value!r}")
    return value


def _checked_seed(value: Any, where: str) -> int:
    """Whole numbers only; a nullable column comes from pandas as floats, where 3.0 is fine and NaN is not."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    is_whole_float = isinstance(value, float | np.floating) and math.isfinite(value) and float(value).is_integer()
    if not (is_whole or is_whole_float):
        raise DataRowError(f"{where}, column 'seed': expected a whole number, found {value!r}")
    return int(value)


def _checked_env_kwargs(value: Any, where: str) -> dict[str, Any]:
    """A JSON string, a dict or null; the service always gets a JSON object."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except json.JSONDecodeError as exc:
            raise DataRowError(
                f"{where}, column 'env_kwargs': expected the JSON text of an object, found {value[:80]!r} ({exc})"
            ) from exc
        if value is None:
            return {}
    if not isinstance(value, dict):
        raise DataRowError(
            f"{where}, column 'env_kwargs': expected an object, a JSON text of one, or null, found {value!r}"
        )
    return _plain_json(value, f"{where}, column 'env_kwargs'")


def _plain_json(value: Any, where: str) -> Any:
    """Numpy scalars and arrays as plain JSON values.

    Raises:
        DataRowError: Something JSON cannot say (NaN, infinity, other objects), with its place.
    """
    if isinstance(value, dict):
        return {str(key): _plain_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise DataRowError(f"{where}: expected a JSON value, found {value!r}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise DataRowError(f"{where}: expected a JSON value, found {type(value).__name__}")


class PromptTooLongError(ValueError):
    """The first prompt does not fit `data.max_prompt_length`, and may not be cut any further."""


class EpisodeTokenizer:
    """Chat to tokens for one run: the first prompt and the observation deltas of an episode, with their length limits.

    Args:
        style: How the model family writes a conversation.
        max_prompt_length: Longest first prompt, in tokens.
        max_response_length: Longest reply of one turn, in tokens.
        truncation: `error`, or the side that is cut from the first observation's text: `left`, `right`, `middle`.
        max_observation_tokens: Longest text of a later observation, in tokens; None for no limit.
        observation_truncation: Side that is cut from a longer one: `left`, `right`, `middle`.
    """

    def __init__(
        self,
        style: PromptStyle,
        *,
        max_prompt_length: int,
        max_response_length: int,
        truncation: str,
        max_observation_tokens: int | None,
        observation_truncation: str = "middle",
    ):
        if truncation not in ("error", *TRUNCATION_SIDES):
            raise ValueError(f"data.truncation: expected error, left, right or middle, got {truncation!r}")
        self.style = style
        self._max_prompt_length = max_prompt_length
        self._max_row_length = max_prompt_length + max_response_length
        self._truncation: Any = truncation
        self._max_observation_tokens = max_observation_tokens
        self._observation_truncation: Any = observation_truncation

    @classmethod
    def from_config(cls, config: DictConfig, tokenizer: Any) -> "EpisodeTokenizer":
        """Build it from the whole config and the model's tokenizer."""
        style_cls = get_prompt_style(config.data.agent_prompt_style)
        options: Any = OmegaConf.to_container(config.data.agent_prompt_style_kwargs)
        return cls(
            style_cls(tokenizer, **options),
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            truncation=config.data.truncation,
            max_observation_tokens=config.env.max_observation_tokens,
            observation_truncation=config.env.observation_truncation,
        )

    def first_prompt(
        self, task_prompt: str, observation: list[Message], tools_schema: list[dict[str, Any]]
    ) -> tuple[list[int], bool]:
        """Tokens up to the first generation header.

        Args:
            task_prompt: System text; empty for none.
            observation: Messages of the start.
            tools_schema: OpenAI tool definitions; empty for none.

        Returns:
            ids: Token ids, at most `max_prompt_length`.
            was_cut: Whether the observation's text was shortened.

        Raises:
            PromptTooLongError: It does not fit and `truncation` is `error`, or what may be cut is not enough.
        """
        limit = self._max_prompt_length
        system: list[Message] = [{"role": "system", "content": task_prompt}] if task_prompt else []
        whole = system + observation
        system = [self._ends_of_huge(message, limit) for message in system]
        observation = [self._ends_of_huge(message, limit) for message in observation]
        ids = self.style.encode_prompt(system + observation, tools_schema or None)
        excess = len(ids) - limit
        if excess <= 0:
            return ids, False
        at_least = "" if system + observation == whole else "at least "
        text = f"the first prompt has {at_least}{len(ids)} tokens, more than data.max_prompt_length={limit}"
        if self._truncation == "error":
            raise PromptTooLongError(f"{text}, and data.truncation=error cuts nothing")
        num_text_tokens = sum(self._num_text_tokens(m) for m in observation if m["role"] != "system")
        # A cut can change how its two ends merge into tokens, so the target may be missed by a few: cut again by what
        # is left.
        while excess > 0 and num_text_tokens > 0:
            num_text_tokens = max(0, num_text_tokens - excess)
            shorter = self._cut_messages(observation, num_text_tokens, self._truncation)
            ids = self.style.encode_prompt(system + shorter, tools_schema or None)
            excess = len(ids) - self._max_prompt_length
        if excess > 0:
            raise PromptTooLongError(f"{text} even without the first observation's text")
        return ids, True

    def observation_delta(self, observation: list[Message], sampled_ids: list[int]) -> tuple[list[int], bool]:
        """Tokens that the environment's answer adds after a sampled turn.

        Args:
            observation: Messages of the answer; may be empty.
            sampled_ids: Token ids of the turn that it answers.

        Returns:
            ids: Glue, messages and the next generation header. The conversation so far is not tokenised again. Of a
                text with more tokens than a row can have, only so much that the ids do not fit a row either.
            was_cut: Whether the text was shortened to `max_observation_tokens`.
        """
        is_closed = self.style.is_turn_closed(sampled_ids)
        limit = self._max_observation_tokens
        row_limit = self._max_row_length
        observation = [
            self._ends_of_huge(message, row_limit if limit is None or message["role"] == "system" else limit)
            for message in observation
        ]
        cuttable = [message for message in observation if message["role"] != "system"]
        is_over = limit is not None and any(self.style.is_surely_longer(m["content"], limit) for m in cuttable)
        if limit is None or not is_over:
            ids = self.style.encode_observation(observation, turn_is_closed=is_closed)
            if limit is None or len(ids) <= limit or sum(self._num_text_tokens(m) for m in observation) <= limit:
                return ids, False
        shorter = self._cut_messages(observation, limit, self._observation_truncation)
        return self.style.encode_observation(shorter, turn_is_closed=is_closed), shorter != observation

    def _ends_of_huge(self, message: Message, max_tokens: int) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        return {**message, "content": self.style.ends_of_huge(content, max_tokens)}

    def _num_text_tokens(self, message: Message, at_most: int | None = None) -> int:
        text = message["content"]
        if at_most is not None and self.style.is_surely_longer(text, at_most - 1):
            return at_most
        num_tokens = len(self.style.encode_text(text))
        return num_tokens if at_most is None else min(num_tokens, at_most)

    def _cut_messages(self, messages: list[Message], max_tokens: int, side: Side) -> list[Message]:
        """Shorten the longest texts until all together have at most `max_tokens`; system text stays whole."""
        cuttable = [i for i, message in enumerate(messages) if message["role"] != "system"]
        lengths = {i: self._num_text_tokens(messages[i], at_most=max_tokens + 1) for i in cuttable}
        shorter = list(messages)
        remaining, num_left = max_tokens, len(cuttable)
        for i in sorted(cuttable, key=lambda i: lengths[i]):
            share = remaining // num_left
            if lengths[i] > share:
                text = self.style.truncate_text(messages[i]["content"], share, side)
                shorter[i] = {**messages[i], "content": text}
            remaining -= min(lengths[i], share)
            num_left -= 1
        return shorter
