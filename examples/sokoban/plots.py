# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The metric log of a run (verl's `file` tracker) and its picture.

Owns reading the log, also while it is being written, and one PNG of return and success over steps.
"""

import json
from pathlib import Path
from typing import Any

from examples.sokoban.validation import DECODINGS, success_key


def read_metrics(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Step and metrics of each complete line, in order; an unfinished last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [(record["step"], record["data"]) for record in map(json.loads, lines)]


def series(metrics: list[tuple[int, dict[str, Any]]], key: str) -> tuple[list[int], list[float]]:
    """Steps at which a metric was logged, and its values."""
    points = [(step, float(data[key])) for step, data in metrics if key in data]
    return [step for step, _ in points], [value for _, value in points]


def plot_run(metrics: list[tuple[int, dict[str, Any]]], path: Path, title: str) -> None:
    """Draw return and success over steps.

    Args:
        metrics: From `read_metrics`.
        path: Of the PNG.
        title: Above the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left.plot(*series(metrics, "env/episode_return/mean"), color="tab:blue")
    left.set(title="Return of training episodes (mean)", xlabel="step", ylabel="return")
    steps, rates = series(metrics, "env/success_rate")
    right.plot(steps, [100 * rate for rate in rates], color="tab:gray", alpha=0.5, label="training rooms, sampled")
    for decoding, colour in zip(DECODINGS, ("tab:blue", "tab:orange"), strict=True):
        steps, rates = series(metrics, success_key(decoding))
        right.plot(steps, [100 * rate for rate in rates], "o-", color=colour, label=f"held-out rooms, {decoding}")
    right.set(title="Rooms solved", xlabel="step", ylabel="%", ylim=(0, 100))
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
