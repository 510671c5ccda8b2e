# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The metrics of a finished or running training, read back from whatever its tracker wrote.

Owns the formats of verl's trackers `file`, `tensorboard`, `mlflow` (a local database) and `console` (a saved log).
Refuses to know which metrics matter.
"""

import contextlib
import importlib
import json
import math
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CONSOLE_LINE = re.compile(r"(?:^|\s)step:(\d+)((?: - [^\s:]+:\S+)+)")
_CONSOLE_ENTRY = re.compile(r" - ([^\s:]+):(?:np\.\w+\()?(-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?))\)?(?=\s|$)")
_SUFFIXES = {".jsonl": "file", ".log": "console", ".txt": "console", ".db": "mlflow"}
_PREFERENCE = ("file", "tensorboard", "mlflow", "console")


class MetricsError(ValueError):
    """No metrics can be read; the text says where was looked and what to do."""


@dataclass(kw_only=True, slots=True)
class RunMetrics:
    """The numbers of one run."""

    source: str
    """Where they were read."""
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric name to step to value."""

    @property
    def steps(self) -> list[int]:
        """All steps that logged something, in order."""
        return sorted({step for values in self.series.values() for step in values})

    def add(self, name: str, step: int, value: Any) -> None:
        """Note one number; a later one of the same step replaces it. What is no number is left out."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        self.series.setdefault(name, {})[step] = float(value)

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric in order, without those that are not finite."""
        values = self.series.get(name, {})
        steps = [step for step in sorted(values) if math.isfinite(values[step])]
        return steps, [values[step] for step in steps]

    def matching(self, pattern: str) -> list[str]:
        """Names that a regular expression fits as a whole, sorted."""
        return sorted(name for name in self.series if re.fullmatch(pattern, name))


def read_run(path: Path) -> RunMetrics:
    """Read a run's metrics.

    Args:
        path: A file of one of the formats, or a folder that has one somewhere inside. Where it has several, the best
            format wins (`file`, `tensorboard`, `mlflow`, `console`) and among equals the newest.

    Raises:
        MetricsError: Nothing there has metrics.
    """
    if not path.exists():
        raise MetricsError(f"{path}: no such file or folder")
    candidates = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    known = [(kind, file) for file in candidates if (kind := _kind_of(file)) is not None]
    known.sort(key=lambda entry: (_PREFERENCE.index(entry[0]), -entry[1].stat().st_mtime))
    for kind, file in known:
        metrics = RunMetrics(source=f"{file} ({kind})")
        for name, step, value in _READERS[kind](file):
            metrics.add(name, step, value)
        if metrics.series:
            return metrics
    raise MetricsError(
        f"{path}: no metrics found. Start the run with trainer.logger=[console,file] "
        "(writes PROJECT/EXPERIMENT.jsonl; VERL_FILE_LOGGER_PATH=FILE sets the place), or give a saved console log, "
        "a folder of tensorboard events or an mlflow .db file"
    )


def _kind_of(file: Path) -> str | None:
    return "tensorboard" if "tfevents" in file.name else _SUFFIXES.get(file.suffix)


def _read_file(file: Path) -> Iterator[tuple[str, int, Any]]:
    """verl's `file` tracker: a line `{"step": N, "data": {...}}` per step. Other JSON lines are dumps and the like."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or not isinstance(record.get("data"), dict) or "step" not in record:
                return
            for name, value in record["data"].items():
                yield name, int(record["step"]), value


def _read_console(file: Path) -> Iterator[tuple[str, int, Any]]:
    """verl's `console` tracker: `step:1 - name:value - ...`, values as numpy prints them."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _CONSOLE_LINE.search(line)
            if match is not None:
                for name, value in _CONSOLE_ENTRY.findall(match.group(2)):
                    yield name, int(match.group(1)), float(value)


def _read_tensorboard(file: Path) -> Iterator[tuple[str, int, Any]]:
    """Tensorboard's event files."""
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as exc:
        raise MetricsError(f"{file}: pip install tensorboard to read it") from exc
    events = module.EventAccumulator(str(file), size_guidance={module.SCALARS: 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield name, event.step, event.value


def _read_mlflow(file: Path) -> Iterator[tuple[str, int, Any]]:
    """mlflow's local database; of its runs the one that logged last."""
    with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
        try:
            newest = database.execute("SELECT run_uuid FROM metrics ORDER BY timestamp DESC LIMIT 1").fetchone()
            if newest is not None:
                yield from database.execute(
                    "SELECT key, step, value FROM metrics WHERE run_uuid = ? AND is_nan = 0", newest
                )
        except sqlite3.DatabaseError as exc:
            raise MetricsError(f"{file}: no mlflow database ({exc})") from exc


_READERS = {"file": _read_file, "console": _read_console, "tensorboard": _read_tensorboard, "mlflow": _read_mlflow}
