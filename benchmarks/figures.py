# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a benchmark reports: one comparison per figure, and how repetitions become one number.

Owns the record, the order in which the sides run, and the arithmetic. Knows nothing of what is measured.
"""

import argparse
import dataclasses
import json
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_GOALS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    """Unique, lower case with underscores."""
    what: str
    """What was measured, against what, in one line."""
    unit: str
    """Of `ours` and `baseline`."""
    ours: float
    """Median over the repetitions."""
    baseline: float
    """Median over the repetitions, or the bound where nothing was run for it."""
    ratio: float
    """Median over the repetitions of the ratio within one repetition."""
    ratio_is: str
    """`ours / baseline` or `baseline / ours`."""
    goal: str
    """`>= 2.5`, `<= 1.1` or `< 1.3`, of the ratio; empty where the figure only shows how something grows."""
    met: bool | None
    """Whether the ratio meets the goal; None without one."""
    spread: tuple[float, float]
    """Lowest and highest ratio of the repetitions."""
    repetitions: int
    """How many there were."""
    details: dict[str, float] = field(default_factory=dict)
    """Other numbers of the same runs, unit in the name."""


def alternate(repetitions: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run the sides in turn, in reversed order every other time, so that a busy spell of the machine hits all of them.

    Args:
        repetitions: How often each side runs.
        sides: What to run, by name; each returns its measurement.

    Returns:
        The measurements of each side, in order.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        names = list(sides)
        for name in names if repetition % 2 == 0 else reversed(names):
            measured[name].append(sides[name]())
    return measured


def compare(
    name: str,
    what: str,
    *,
    unit: str,
    ours: Sequence[float],
    baseline: Sequence[float],
    inverted: bool = False,
    goal: str = "",
    details: Mapping[str, float] | None = None,
) -> Figure:
    """Make a figure of paired measurements.

    Args:
        name: See `Figure`.
        what: See `Figure`.
        unit: See `Figure`.
        ours: One value per repetition.
        baseline: As many, each measured right beside its partner.
        inverted: The ratio is baseline over ours (a speed-up of times) instead of ours over baseline.
        goal: See `Figure`.
        details: See `Figure`.
    """
    ratios = [b / o if inverted else o / b for o, b in zip(ours, baseline, strict=True)]
    ratio = statistics.median(ratios)
    return Figure(
        name=name,
        what=what,
        unit=unit,
        ours=_rounded(statistics.median(ours)),
        baseline=_rounded(statistics.median(baseline)),
        ratio=_rounded(ratio),
        ratio_is="baseline / ours" if inverted else "ours / baseline",
        goal=goal,
        met=meets(ratio, goal),
        spread=(_rounded(min(ratios)), _rounded(max(ratios))),
        repetitions=len(ratios),
        details={key: _rounded(value) for key, value in (details or {}).items()},
    )


def meets(ratio: float, goal: str) -> bool | None:
    """Whether a ratio meets a goal such as `>= 2.5`; None for an empty goal."""
    if not goal:
        return None
    sign, bound = goal.split()
    return bool(_GOALS[sign](ratio, float(bound)))


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def line(figure: Figure) -> str:
    """A figure for the terminal."""
    mark = {True: "met", False: "MISSED", None: ""}[figure.met]
    return (
        f"{figure.name:<34} ours {figure.ours:>10g}  baseline {figure.baseline:>10g} {figure.unit:<12} "
        f"ratio {figure.ratio:>8g} ({figure.spread[0]:g} to {figure.spread[1]:g})  goal {figure.goal or '-':<8} {mark}"
    )


def to_json(figures: Sequence[Figure]) -> list[dict[str, object]]:
    """Figures as plain JSON objects."""
    return [dataclasses.asdict(figure) for figure in figures]


def run_script(measure: Callable[[bool], list[Figure]], description: str | None) -> None:
    """The command line of every benchmark script: `[--quick] [--out FILE]`.

    Args:
        measure: Takes whether to use small sizes, returns the figures.
        description: For `--help`.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes; for a look, not for the docs")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args()
    figures = measure(args.quick)
    for figure in figures:
        print(line(figure), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(to_json(figures)))
