# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Writes table and plot of `docs/performance.md` from the results.

    python -m benchmarks.page

Owns what lies between the two marks in that file, and the picture beside it; the words around them are written by hand.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.run import REPO, RESULTS

PAGE = REPO / "docs" / "performance.md"
PLOT = REPO / "docs" / "performance.svg"
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table, and the machines that they come from."""
    loads = [figure["load_average"] for figure in figures]
    lines = [
        *sorted({f"Measured on {figure['machine']}, " for figure in figures}),
        f"at a load average between {min(loads):g} and {max(loads):g}.",
        "",
        "| figure | ours | baseline | ratio (lowest to highest) | goal | met |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        met = {True: "yes", False: "**no**", None: ""}[figure["met"]]
        low, high = figure["spread"]
        lines.append(
            f"| {figure['what']} | {_number(figure['ours'])} {figure['unit']} "
            f"| {_number(figure['baseline'])} {figure['unit']} "
            f"| {_number(figure['ratio'])} ({_number(low)} to {_number(high)}) | {figure['goal']} | {met} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:.0f}"


def plot(figures: list[dict[str, Any]], path: Path) -> None:
    """Each goal as a mark at 1 and each figure as its distance to it, longer than the mark when met with room."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figures = [figure for figure in figures if figure["goal"]]
    names = [figure["name"] for figure in figures]
    margins, spreads = [], []
    for figure in figures:
        sign, bound = figure["goal"].split()

        def margin(ratio: float, sign: str = sign, bound: float = float(bound)) -> float:
            return ratio / bound if sign == ">=" else bound / max(ratio, 1e-9)

        low, high = sorted(margin(ratio) for ratio in figure["spread"])
        margins.append(margin(figure["ratio"]))
        spreads.append((low, high))
    canvas, axes = plt.subplots(figsize=(9, 0.36 * len(figures) + 1.2))
    rows = range(len(figures))
    colours = ["tab:green" if figure["met"] else "tab:red" for figure in figures]
    axes.barh(list(rows), margins, color=colours, alpha=0.7)
    for row, (low, high) in zip(rows, spreads, strict=True):
        axes.plot([low, high], [row, row], color="black", linewidth=1)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(list(rows), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("distance to the goal (1 = just met, further right is better; line: lowest to highest repetition)")
    canvas.tight_layout()
    canvas.savefig(path, metadata={"Date": None})
    plt.close(canvas)


def replace_table(text: str, new_table: str) -> str:
    """Put a table between the two marks of the page.

    Raises:
        ValueError: A mark is missing.
    """
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"expected the marks {_BEGIN} and {_END} in {PAGE}")
    return f"{head}{_BEGIN}\n{new_table}\n{_END}{tail}"


def main() -> None:
    """Write both files."""
    figures = json.loads(RESULTS.read_text())
    PAGE.write_text(replace_table(PAGE.read_text(), table(figures)))
    plot(figures, PLOT)


if __name__ == "__main__":
    main()
