# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Runs the benchmark scripts one after the other and keeps what they report.

    python -m benchmarks.run [--quick] [--only NAME ...] [--out FILE]

Each script runs in a process of its own, so that memory, file limits and a crash stay its own. Knows nothing of what is
measured. Exit status 1 when a script failed; a missed goal is a figure, not a failure.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "latest.json"
SCRIPTS = (
    "rollout_makespan",
    "client_overhead",
    "service_throughput",
    "tokens_per_turn",
    "batch_assembly",
    "slow_resets",
    "rollout_growth",
    "training_run",
)
"""In the order of the table."""
_TOO_LONG_FOR_QUICK = frozenset({"training_run"})


def run_script(name: str, *, quick: bool) -> list[dict[str, Any]]:
    """Run one script.

    Returns:
        Its figures.

    Raises:
        subprocess.CalledProcessError: It failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out), *(["--quick"] if quick else [])]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, cwd=REPO, env=environ, check=True)
        figures: list[dict[str, Any]] = json.loads(out.read_text())
        return figures


def machine() -> str:
    """What a figure is measured on, in one line."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].split(":", 1)[1].strip() if models else platform.machine()
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Run the benchmarks.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, without the training run")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, help="these scripts; other figures of the file stay")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: {RESULTS.relative_to(REPO)}; quick: none)")
    args = parser.parse_args(arguments)
    out = args.out or (None if args.quick else RESULTS)
    names = args.only or [name for name in SCRIPTS if not (args.quick and name in _TOO_LONG_FOR_QUICK)]

    kept: dict[str, list[dict[str, Any]]] = {}
    if args.only and out is not None and out.exists():
        for figure in json.loads(out.read_text()):
            kept.setdefault(figure["script"], []).append(figure)
    figures: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        origin = {"script": name, "machine": machine(), "load_average": round(os.getloadavg()[0], 1)}
        try:
            kept[name] = [{**figure, **origin} for figure in run_script(name, quick=args.quick)]
        except subprocess.CalledProcessError as exc:
            print(f"{name} failed with exit status {exc.returncode}", file=sys.stderr)
            failed.append(name)
        print(f"   {time.monotonic() - started:.0f} s", flush=True)
        figures = [figure for name in SCRIPTS for figure in kept.get(name, [])]
        if out is not None:  # after each script, so that a run that is broken off keeps what it has
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(figures, indent=1) + "\n")

    missed = [figure["name"] for figure in figures if figure["met"] is False]
    num_goals = sum(figure["met"] is not None for figure in figures)
    print(f"{len(figures)} figures, {num_goals - len(missed)} of {num_goals} goals met" + _listed(missed))
    return 1 if failed else 0


def _listed(missed: list[str]) -> str:
    return f"; missed: {', '.join(missed)}" if missed else ""


if __name__ == "__main__":
    sys.exit(main())
