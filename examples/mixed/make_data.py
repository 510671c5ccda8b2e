# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Make one data set of episodes in three environments: Sokoban, FrozenLake and Countdown.

    python -m examples.mixed.make_data --out-dir data/mixed --num-train 1000 --num-test 50

Owns: how many episodes of each, and that no two begin alike. Refuses to know: how they are played; the rows differ in
`env_name` only, and one service offers all three names (`examples/mixed/serve.sh`).
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from examples.countdown import CountdownEnv
from examples.frozen_lake import FrozenLakeEnv
from examples.sokoban import curate_data

FROZEN_LAKE, COUNTDOWN = "frozen_lake-v0", "countdown-v0"


def sokoban_rows(num_rows: int, max_steps: int) -> list[dict[str, Any]]:
    """Rooms that can be solved within the steps."""
    config = curate_data.CurationConfig(num_train=num_rows, num_test=0, dim=(6, 6), max_steps=max_steps)
    rows = curate_data.to_rows(curate_data.curate(config, num_processes=1, show_progress=False), config)
    return [{name: row[name] for name in ("env_name", "seed", "env_kwargs")} for row in rows]


def distinct_rows(env_name: str, make_env: Callable[..., Any], env_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of an environment, endless, that begin with different observations."""
    env, seen = make_env(**env_kwargs), set()
    for seed in count():
        start = json.dumps(env.reset(seed=seed)[0])
        if start not in seen:
            seen.add(start)
            yield {"env_name": env_name, "seed": seed, "env_kwargs": json.dumps(env_kwargs)}


def mixed_rows(num_rows: int, max_steps: int) -> list[dict[str, Any]]:
    """As many episodes of each environment, taking turns.

    Args:
        num_rows: Of each environment.
        max_steps: After which each of them truncates.
    """
    lakes = distinct_rows(FROZEN_LAKE, FrozenLakeEnv, {"size": 4, "max_steps": max_steps})
    puzzles = distinct_rows(COUNTDOWN, CountdownEnv, {"num_numbers": 3, "max_steps": max_steps})
    columns = (sokoban_rows(num_rows, max_steps), islice(lakes, num_rows), islice(puzzles, num_rows))
    return [row for rows in zip(*columns, strict=True) for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Write `train.parquet` and `test.parquet`, the test episodes first among the seeds."""
    import pandas

    parser = argparse.ArgumentParser(prog="python -m examples.mixed.make_data", description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, required=True, help="where train.parquet and test.parquet go")
    parser.add_argument("--num-train", type=int, default=1000, help="episodes per environment (default: %(default)s)")
    parser.add_argument("--num-test", type=int, default=50, help="episodes per environment (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=10, help="after which an episode is truncated")
    args = parser.parse_args(arguments)
    rows = mixed_rows(args.num_test + args.num_train, args.max_steps)
    num_test = len(rows) // (args.num_test + args.num_train) * args.num_test
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", rows[:num_test]), ("train", rows[num_test:])):
        path = args.out_dir / f"{name}.parquet"
        pandas.DataFrame(part, columns=["env_name", "seed", "env_kwargs"]).to_parquet(path)
        print(f"{name}: {len(part)} episodes of {len({row['env_name'] for row in part})} environments -> {path}")


if __name__ == "__main__":
    main()
