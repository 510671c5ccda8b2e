# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m tests.chaos`: run the chaos suite, print a table, write `report.json`.

Owns the command line and what makes a run bad. Exit status: 0 all rows true and nothing left open, 1 otherwise.
"""

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.fault_proxy import PROXY_FAULTS
from tests.chaos.run import run_chaos


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000, metavar="N", help="rows to play (%(default)s)")
    parser.add_argument("--fault-rate", type=float, default=0.05, metavar="P", help="per request (%(default)s)")
    parser.add_argument("--restarts", type=int, metavar="N", help="of a service; by default one per 150 episodes")
    parser.add_argument("--seed", type=int, default=0, help="of faults and replies (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/chaos"), metavar="FOLDER", help="(%(default)s)")
    return parser


def find_problems(report: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    """What makes a run bad; a run that injected nothing of some kind proves nothing about it."""
    problems = []
    if report["rows_wrong_or_lost"]:
        problems.append(f"{report['rows_wrong_or_lost']} rows are wrong or lost: {report['wrong_rows']}")
    if report["sessions_left"]:
        problems.append(f"{report['sessions_left']} environments are still open")
    if report["finished"] + report["masked"] != report["episodes"]:
        problems.append("episodes are missing")
    unused = [kind for kind in kinds if not report["faults_injected"].get(kind)]
    if unused:
        problems.append(f"never injected: {', '.join(unused)}; play more episodes")
    return problems


def show(report: dict[str, Any], console: Console) -> None:
    """The report as two tables."""
    faults = Table("fault", "injected", title="Faults")
    for kind, count in report["faults_injected"].items():
        faults.add_row(kind, str(count), end_section=kind == "total")
    numbers = Table("what", "number", title="Episodes")
    for name, value in report.items():
        if not isinstance(value, dict):
            numbers.add_row(name, str(value))
    console.print(faults, numbers)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    args = build_parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)  # every single fault would be told
    num_restarts = max(1, args.episodes // 150) if args.restarts is None else args.restarts
    outcome = asyncio.run(
        run_chaos(
            args.out,
            num_episodes=args.episodes,
            fault_rate=args.fault_rate,
            num_restarts=num_restarts,
            seed=args.seed,
        )
    )
    (args.out / "report.json").write_text(json.dumps(outcome.report, indent=2) + "\n")
    console = Console()
    show(outcome.report, console)
    problems = find_problems(outcome.report, (*PROXY_FAULTS, "capacity", "restart"))
    for problem in problems:
        console.print(f"BAD: {problem}", markup=False, soft_wrap=True)
    console.print(f"{'bad' if problems else 'good'}; written to {args.out / 'report.json'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
