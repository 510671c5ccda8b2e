# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Make train and test episodes of Sokoban as parquet files.

    python -m examples.sokoban.curate_data --out-dir DIR --num-train 10000 --num-test 100 --dim 7 7 --boxes 1

Owns: which seeds become episodes: rooms that differ, can be solved within the limits, and are in one split only.
Refuses to know: how an episode is played. A row holds `env_name`, `seed`, `env_kwargs` (JSON text), and as difficulty
`solution_length` (fewest actions, walking included) and `num_pushes` of that solution.

The same arguments give the same files, whatever the number of processes; the test rooms do not depend on `--num-train`.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.sokoban import rules, solver
from examples.sokoban.sokoban_env import ENV_NAME, draw

SEEDS_PER_SET = 10**9
"""Distance between the first seeds of two data sets, so that different `--seed` share none."""

PATIENCE = 10_000
"""Seeds of which at least 1 in 500 must give a new room, else such rooms are too rare."""

_CHUNK = 250
_MAX_POSITIONS = 200_000


class CurationError(Exception):
    """The rooms that were asked for do not exist, or are too rare to be found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurationConfig:
    """What rooms to collect."""

    num_train: int
    """Rows of the train split."""

    num_test: int
    """Rows of the test split."""

    dim: tuple[int, int] = (7, 7)
    """Rows and columns, walls included."""

    num_boxes: int = 1
    """Boxes per room."""

    max_steps: int = 20
    """Written into the rows: actions after which the environment truncates."""

    min_solution: int = 1
    """Shortest solution that is kept, in actions."""

    max_solution: int | None = None
    """Longest solution that is kept, in actions. None: `max_steps`."""

    seed: int = 0
    """Chooses the data set."""

    with_room_setup: bool = False
    """Write each room into its row, for services that generate other rooms from the same seed."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: A value is out of its bounds.
        """
        rules.check_size(*self.dim, self.num_boxes)
        for name in ("num_train", "num_test", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.num_train + self.num_test == 0:
            raise ValueError("num_train and num_test: both are 0, nothing to do")
        if not 1 <= self.min_solution <= self.longest:
            raise ValueError(f"min_solution {self.min_solution}: expected 1 to max_solution, which is {self.longest}")
        if self.longest > self.max_steps:
            raise ValueError(f"max_solution {self.longest}: no such room can be solved in max_steps {self.max_steps}")

    @property
    def longest(self) -> int:
        """Longest solution that is kept."""
        return self.max_steps if self.max_solution is None else self.max_solution


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One room that fits the limits."""

    seed: int
    """Generates it."""

    key: str
    """Equal for equal rooms."""

    solution_length: int
    """Fewest actions."""

    num_pushes: int
    """Pushes among them."""


def examine(seed: int, config: CurationConfig) -> Candidate | None:
    """Generate and solve one room; None when it is outside the limits or too hard to judge."""
    try:
        room = rules.generate(seed, *config.dim, config.num_boxes)
        plan = solver.solve(room, _MAX_POSITIONS)
    except (ValueError, solver.SearchLimitError):
        return None
    if plan is None or not config.min_solution <= len(plan) <= config.longest:
        return None
    return Candidate(
        seed=seed,
        key="".join(str(value) for row in rules.to_grid(room) for value in row),
        solution_length=len(plan),
        num_pushes=sum(action.startswith("push") for action in plan),
    )


def _examine_chunk(task: tuple[int, CurationConfig]) -> list[Candidate]:
    first, config = task
    return [candidate for seed in range(first, first + _CHUNK) if (candidate := examine(seed, config)) is not None]


def collect(config: CurationConfig, chunks: Iterable[list[Candidate]], progress: "tqdm[Any]") -> list[Candidate]:
    """Take distinct rooms, in order of their seeds, until there are enough.

    Args:
        config: What is wanted.
        chunks: Candidates of `_CHUNK` seeds each, endless.
        progress: Moved by one per room.

    Raises:
        CurationError: Distinct rooms became too rare to go on.
    """
    wanted = config.num_train + config.num_test
    rooms: dict[str, Candidate] = {}
    num_fitting: list[int] = []
    num_new: list[int] = []
    for chunk in chunks:
        before = len(rooms)
        for candidate in chunk:
            if len(rooms) < wanted and candidate.key not in rooms:
                rooms[candidate.key] = candidate
        num_fitting.append(len(chunk))
        num_new.append(len(rooms) - before)
        progress.update(num_new[-1])
        if len(rooms) == wanted:
            return list(rooms.values())
        if _is_hopeless(num_fitting, num_new):
            raise CurationError(
                f"{wanted} rooms were asked for; {len(num_new) * _CHUNK} seeds of {config.dim[0]}x{config.dim[1]} with "
                f"{config.num_boxes} boxes gave {sum(num_fitting)} whose shortest solution has {config.min_solution} "
                f"to {config.longest} actions, only {len(rooms)} of them distinct, and hardly any new ones lately. "
                "Ask for fewer, for larger rooms, more boxes, or a wider range of solutions."
            )
    raise AssertionError("chunks ended")


def _is_hopeless(num_fitting: list[int], num_new: list[int]) -> bool:
    """Whether new rooms have become too rare, or nearly all that fit are known (both per chunk of seeds)."""
    many, few = PATIENCE // _CHUNK, PATIENCE // _CHUNK // 4
    is_rare = len(num_new) >= many and sum(num_new[-many:]) < PATIENCE // 500
    recent = sum(num_fitting[-few:])
    is_exhausted = recent >= PATIENCE // 20 and sum(num_new[-few:]) < recent // 100
    return is_rare or is_exhausted


def curate(config: CurationConfig, num_processes: int, show_progress: bool = True) -> list[Candidate]:
    """Find the rooms.

    Args:
        config: What is wanted.
        num_processes: Processes to search with.
        show_progress: Whether to draw a progress bar on stderr.

    Returns:
        Test rooms first, then train rooms.

    Raises:
        CurationError: There are not enough.
    """
    wanted = config.num_train + config.num_test
    with tqdm(total=wanted, desc="rooms", unit="room", disable=not show_progress) as progress:
        if num_processes == 1:
            return collect(config, map(_examine_chunk, _tasks(config)), progress)
        with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
            return collect(config, _ordered(pool, config, 4 * num_processes), progress)


def _tasks(config: CurationConfig) -> Iterator[tuple[int, CurationConfig]]:
    first = config.seed * SEEDS_PER_SET
    while True:
        yield first, config
        first += _CHUNK


def _ordered(pool: Any, config: CurationConfig, num_ahead: int) -> Iterator[list[Candidate]]:
    """Results in order, with only a few chunks in flight (`imap` would take all of an endless stream at once)."""
    tasks = _tasks(config)
    pending = [pool.apply_async(_examine_chunk, (next(tasks),)) for _ in range(num_ahead)]
    while True:
        yield pending.pop(0).get()
        pending.append(pool.apply_async(_examine_chunk, (next(tasks),)))


def to_rows(candidates: list[Candidate], config: CurationConfig) -> list[dict[str, Any]]:
    """The rows of a split."""
    rows = []
    for candidate in candidates:
        kwargs: dict[str, Any] = {
            "dim_room": list(config.dim),
            "num_boxes": config.num_boxes,
            "max_steps": config.max_steps,
        }
        if config.with_room_setup:
            kwargs["room_setup"] = rules.serialise(rules.generate(candidate.seed, *config.dim, config.num_boxes))
        rows.append(
            {
                "env_name": ENV_NAME,
                "seed": candidate.seed,
                "env_kwargs": json.dumps(kwargs),
                "solution_length": candidate.solution_length,
                "num_pushes": candidate.num_pushes,
            }
        )
    return rows


def hash_rows(rows: list[dict[str, Any]]) -> str:
    """SHA-256 over what the rows say, independent of the file format."""
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows; the folder is made when it is missing."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [
            ("env_name", pyarrow.string()),
            ("seed", pyarrow.int64()),
            ("env_kwargs", pyarrow.string()),
            ("solution_length", pyarrow.int64()),
            ("num_pushes", pyarrow.int64()),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)


def _summarise(name: str, rows: list[dict[str, Any]], path: Path) -> str:
    lengths = sorted(row["solution_length"] for row in rows)
    if not lengths:
        return f"{name}: 0 rooms -> {path}"
    return (
        f"{name}: {len(rows)} rooms, shortest solution {lengths[0]} to {lengths[-1]} actions "
        f"(median {lengths[len(lengths) // 2]}), sha256 {hash_rows(rows)[:16]} -> {path}"
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m examples.sokoban.curate_data", description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, required=True, help="where train.parquet and test.parquet go")
    parser.add_argument("--num-train", type=int, default=10000)
    parser.add_argument("--num-test", type=int, default=100)
    parser.add_argument("--dim", type=int, nargs=2, default=[7, 7], metavar=("ROWS", "COLUMNS"), help="walls included")
    parser.add_argument("--boxes", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=20, help="actions after which an episode is truncated")
    parser.add_argument("--min-solution", type=int, default=1, help="fewest actions of the shortest solution")
    parser.add_argument("--max-solution", type=int, help="most actions of it (default: --max-steps)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the data set")
    parser.add_argument("--with-room-setup", action="store_true", help="write the rooms themselves into the rows")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Curate, write, and say what was written.

    Returns:
        Exit status: 0, or 2 when the rooms that were asked for do not exist.
    """
    args = build_parser().parse_args(arguments)
    try:
        config = CurationConfig(
            num_train=args.num_train,
            num_test=args.num_test,
            dim=(args.dim[0], args.dim[1]),
            num_boxes=args.boxes,
            max_steps=args.max_steps,
            min_solution=args.min_solution,
            max_solution=args.max_solution,
            seed=args.seed,
            with_room_setup=args.with_room_setup,
        )
        rooms = curate(config, max(1, args.processes), show_progress=not args.quiet)
    except (ValueError, CurationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, candidates in (("test", rooms[: config.num_test]), ("train", rooms[config.num_test :])):
        rows = to_rows(candidates, config)
        path = args.out_dir / f"{name}.parquet"
        write_parquet(rows, path)
        print(_summarise(name, rows, path))
    example = rooms[0]
    room = rules.generate(example.seed, *config.dim, config.num_boxes)
    print(f"seed {example.seed}, solved by {' '.join(solver.solve(room, _MAX_POSITIONS) or [])}:\n{draw(room)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
