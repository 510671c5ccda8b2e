# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Episodes as compact text inside a page: what the browser unpacks, and when.

Owns the layout below. Refuses to know where episodes come from and how they look.

A page holds base64 of raw deflate: one `index` (JSON; what the list, the filters and the colours need) and chunks of
`EPISODES_PER_CHUNK` episodes, which the browser unpacks when one of them is opened. Base64 has no letter that could end
a script element, so no text of an episode is ever read as HTML.

A chunk is a little-endian uint32 (length of its header), the header (JSON, one object per episode, padded with blanks
to a multiple of four) and the arrays. An episode's object names for each array its place as `[offset, length]`:

- `prompt`, `response`: uint32, places in the index's `vocabulary`;
- `mask`: uint8 per response token;
- each value column: int16 per sampled token, times its `scale` / 32767; -32768 is NaN or infinite;
- rewards, which are rare, are pairs `[position, reward]` in the header.
"""

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipe.agent_env.trajectory_page.dumps import DumpedEpisode

EPISODES_PER_CHUNK = 32
VALUE_COLUMNS = ("advantages", "returns", "log_probs", "log_prob_diffs")
"""Per sampled token: advantage, return, trainer's log-prob, trainer's minus engine's log-prob."""

_NOT_FINITE = -32768
_SAMPLES_PER_EPISODE = 64
_COLOUR_PERCENTILE = 99.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPage:
    """What a page holds."""

    index: str
    """Base64 of deflated JSON."""
    chunks: list[str]
    """Base64 of deflated chunks."""
    num_episodes: int
    """How many there are."""


@dataclass(kw_only=True, slots=True)
class _Index:
    """The list's columns, one entry per episode, and what all episodes share."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    names: dict[str, dict[str, int]] = field(
        default_factory=lambda: {"env": {}, "reason": {}, "uid": {}, "vocabulary": {}}
    )
    samples: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def code(self, kind: str, name: str) -> int:
        """The place of a name among all names of its kind."""
        known = self.names[kind]
        return known.setdefault(name, len(known))

    def add_row(self, **row: Any) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)

    def add_samples(self, name: str, values: np.ndarray) -> None:
        """Keep some values, from which the colour scale is taken."""
        finite = np.abs(values[np.isfinite(values)])
        if len(finite):
            stride = max(1, len(finite) // _SAMPLES_PER_EPISODE)
            self.samples.setdefault(name, []).append(finite[::stride].astype(np.float32))

    def limits(self) -> dict[str, float]:
        """The value of each column at which its colour is full: large, but not the largest."""
        limits = {}
        for name, parts in self.samples.items():
            values = np.concatenate(parts)
            limits[name] = float(np.percentile(values, _COLOUR_PERCENTILE)) or float(values.max())
        return limits


def encode(episodes: Iterable[DumpedEpisode], *, title: str) -> EncodedPage:
    """Pack episodes for a page.

    Args:
        episodes: In the order of the list; taken one at a time, never held all together.
        title: Heading of the page.

    Returns:
        Index and chunks.
    """
    index = _Index()
    chunks: list[str] = []
    headers: list[dict[str, Any]] = []
    body = bytearray()
    num_episodes = 0
    for episode in episodes:
        headers.append(_add_episode(index, episode, body))
        num_episodes += 1
        if len(headers) == EPISODES_PER_CHUNK:
            chunks.append(_chunk(headers, bytes(body)))
            headers, body = [], bytearray()
    if headers:
        chunks.append(_chunk(headers, bytes(body)))
    shared = {
        "title": title,
        "episodesPerChunk": EPISODES_PER_CHUNK,
        "valueColumns": VALUE_COLUMNS,
        "limits": index.limits(),
        "columns": index.columns,
        **{kind: list(names) for kind, names in index.names.items()},
    }
    return EncodedPage(index=_pack(_json(shared)), chunks=chunks, num_episodes=num_episodes)


def _add_episode(index: _Index, episode: DumpedEpisode, body: bytearray) -> dict[str, Any]:
    """Enter one episode into index and chunk; returns its header."""
    mask = episode.mask
    values = _value_columns(episode)
    diffs = values.get("log_prob_diffs")
    index.add_row(
        env=index.code("env", episode.env_name),
        seed=episode.seed,
        step=episode.step,
        reason=index.code("reason", episode.end_reason),
        ret=_number(episode.episode_return),
        success=episode.success,
        turns=episode.num_turns,
        promptTokens=len(episode.prompt_tokens),
        tokens=len(mask),
        sampled=int(mask.sum()),
        uid=index.code("uid", episode.uid),
        rollout=episode.rollout_index,
        restarts=episode.num_restarts,
        masked=int(episode.is_masked),
        maxDiff=_number(float(np.abs(diffs).max())) if diffs is not None and len(diffs) else None,
    )
    header: dict[str, Any] = {"failure": episode.failure, "kwargs": episode.env_kwargs}
    if any(episode.renderings):
        header["renderings"] = episode.renderings
    if not episode.response_tokens:
        header["promptText"] = episode.prompt_text
        header["turns"] = [[turn.reply, turn.observation, _number(turn.reward)] for turn in episode.turns]
        for turn in episode.turns:
            index.add_samples("rewards", np.asarray([turn.reward]))
        return header
    vocabulary = index.names["vocabulary"]
    for part in ("prompt", "response"):
        texts, ids = getattr(episode, f"{part}_tokens"), getattr(episode, f"{part}_ids")
        # One text may have several ids (parts of a letter show as nothing), so both make up an entry.
        entries = [f"{i} {text}" for i, text in zip(ids or [-1] * len(texts), texts, strict=True)]
        places = np.asarray([vocabulary.setdefault(entry, len(vocabulary)) for entry in entries], dtype="<u4")
        header[part] = _place(body, places)
    header["mask"] = _place(body, mask.astype("u1"))
    header["scales"] = {}
    for name, column in values.items():
        scale, packed = _quantise(column)
        header["scales"][name] = scale
        header[name] = _place(body, packed)
        index.add_samples(name, column)
    positions = np.flatnonzero(episode.rewards != 0)
    header["rewards"] = [[int(i), _number(float(episode.rewards[i]))] for i in positions]
    index.add_samples("rewards", episode.rewards[positions])
    return header


def _value_columns(episode: DumpedEpisode) -> dict[str, np.ndarray]:
    """The value columns on sampled tokens; the difference is taken here, before rounding."""
    sampled = {name: column[episode.mask] for name, column in episode.values.items()}
    if "log_probs" in sampled and "rollout_log_probs" in sampled:
        sampled["log_prob_diffs"] = sampled["log_probs"] - sampled["rollout_log_probs"]
    elif "rollout_log_probs" in sampled:
        sampled["log_probs"] = sampled["rollout_log_probs"]
    return {name: sampled[name] for name in VALUE_COLUMNS if name in sampled}


def _quantise(column: np.ndarray) -> tuple[float, np.ndarray]:
    """Values as int16 in units of their largest magnitude / 32767."""
    is_finite = np.isfinite(column)
    scale = float(np.abs(column[is_finite]).max()) if is_finite.any() else 0.0
    finite = np.where(is_finite, column, 0.0)
    packed = np.round(finite / scale * 32767) if scale > 0 else np.zeros_like(finite)
    return scale, np.where(is_finite, packed, _NOT_FINITE).astype("<i2")


def _place(body: bytearray, array: np.ndarray) -> list[int]:
    """Append an array on a multiple of four bytes; returns its offset and its number of entries."""
    body.extend(bytes(-len(body) % 4))
    offset = len(body)
    body.extend(array.tobytes())
    return [offset, len(array)]


def _chunk(headers: list[dict[str, Any]], body: bytes) -> str:
    header = _json(headers)
    header += b" " * (-len(header) % 4)
    return _pack(len(header).to_bytes(4, "little") + header + body)


def _pack(content: bytes) -> str:
    deflate = zlib.compressobj(level=6, wbits=-15)
    return base64.b64encode(deflate.compress(content) + deflate.flush()).decode("ascii")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _number(value: float) -> float | None:
    """A number that JSON can say; None for NaN and infinity."""
    return round(value, 6) if np.isfinite(value) else None
