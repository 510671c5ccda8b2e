# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Curated data: distinct, disjoint, within limits, reproducible, and playable on the service."""

import itertools
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tqdm import tqdm

from examples.sokoban import curate_data, rules, solver
from examples.sokoban.curate_data import (
    Candidate,
    CurationConfig,
    CurationError,
    collect,
    curate,
    hash_rows,
    main,
    to_rows,
)
from examples.sokoban.sokoban_env import ENV_NAME, SokobanEnv, draw
from tests.env_service.service import call, serve, serve_process


def curate_files(folder: Path, *arguments: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run the command and read what it wrote."""
    assert main(["--out-dir", str(folder), "--quiet", *arguments]) == 0
    return pd.read_parquet(folder / "train.parquet"), pd.read_parquet(folder / "test.parquet")


def map_of(row: Any) -> str:
    """The room that a row leads to."""
    env = SokobanEnv(**json.loads(row.env_kwargs))
    env.reset(seed=int(row.seed))
    return draw(env.room)


def test_rows_are_distinct_disjoint_and_as_difficult_as_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--num-train", "60", "--num-test", "20", "--min-solution", "3", "--max-solution", "6"]
    train, test = curate_files(tmp_path, *arguments, "--processes", "2")
    assert (len(train), len(test)) == (60, 20)
    assert list(train.columns) == ["env_name", "seed", "env_kwargs", "solution_length", "num_pushes"]
    rows = [*train.itertuples(), *test.itertuples()]
    assert len({map_of(row) for row in rows}) == 80
    for row in rows:
        assert row.env_name == ENV_NAME and isinstance(json.loads(row.env_kwargs), dict)
        plan = solver.solve(rules.generate(row.seed))
        assert plan is not None and 3 <= len(plan) == row.solution_length <= 6
        assert sum(action.startswith("push") for action in plan) == row.num_pushes
    output = capsys.readouterr().out
    assert "train: 60 rooms" in output and "solved by" in output and "# # # # # # #" in output


def test_same_arguments_give_the_same_rows_whatever_the_processes():
    config = CurationConfig(num_train=30, num_test=10, seed=3)
    alone, together = (to_rows(curate(config, count, show_progress=False), config) for count in (1, 3))
    assert hash_rows(alone) == hash_rows(together)


def test_test_rooms_do_not_depend_on_the_train_rooms():
    few, many = (
        curate(CurationConfig(num_train=num_train, num_test=10), 1, show_progress=False) for num_train in (5, 50)
    )
    assert few[:10] == many[:10]


def test_data_sets_of_different_seeds_share_no_seed():
    first, second = (
        {room.seed for room in curate(CurationConfig(num_train=20, num_test=0, seed=seed), 1, show_progress=False)}
        for seed in (0, 1)
    )
    assert not first & second


def test_rows_can_carry_their_room(tmp_path: Path):
    train, _ = curate_files(tmp_path, "--num-train", "5", "--num-test", "1", "--with-room-setup", "--processes", "1")
    for row in train.itertuples():
        kwargs = json.loads(row.env_kwargs)
        assert rules.deserialise(kwargs["room_setup"]) == rules.generate(row.seed)
        assert all(rules.parse_cell(key) for key in kwargs["room_setup"]["box_mapping"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dim", "4", "7"], "5 to 32 rows"),
        (["--dim", "5", "5", "--boxes", "3"], "num_boxes"),
        (["--min-solution", "9", "--max-solution", "8"], "min_solution"),
        (["--max-solution", "30"], "max_steps"),
        (["--num-train", "0", "--num-test", "0"], "nothing to do"),
        (["--num-train", "-1"], "num_train"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
):
    assert main(["--out-dir", str(tmp_path), "--quiet", *arguments]) == 2
    assert reason in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_rooms_that_are_too_rare_are_refused_with_the_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(curate_data, "PATIENCE", 1000)
    arguments = ["--dim", "5", "5", "--min-solution", "20", "--processes", "1"]
    assert main(["--out-dir", str(tmp_path), "--quiet", *arguments]) == 2
    error = capsys.readouterr().err
    assert "10100 rooms were asked for; 1000 seeds" in error and "only 0 of them distinct" in error


def test_search_ends_when_nearly_every_room_is_known():
    known = [Candidate(seed=seed, key=str(seed), solution_length=1, num_pushes=1) for seed in range(250)]
    config = CurationConfig(num_train=251, num_test=0)
    with tqdm(disable=True) as progress, pytest.raises(CurationError, match="only 250 of them distinct"):
        collect(config, itertools.repeat(known), progress)


def test_curated_rows_play_on_the_service(tmp_path: Path):
    _, test = curate_files(tmp_path, "--num-train", "1", "--num-test", "5", "--boxes", "2", "--processes", "1")
    with serve({ENV_NAME: SokobanEnv}) as service:
        for row in test.itertuples():
            kwargs = json.loads(row.env_kwargs)
            env_id = service.open(row.env_name, seed=row.seed, **kwargs)
            room = rules.generate(row.seed, *kwargs["dim_room"], kwargs["num_boxes"])
            answers = [service.step(env_id, call(name)).json() for name in solver.solve(room) or []]
            assert len(answers) == row.solution_length
            assert answers[-1]["done"] is True and answers[-1]["info"]["success"] is True
            assert sum(answer["reward"] for answer in answers) == pytest.approx(12 - 0.1 * len(answers))


def test_serve_script_serves_sokoban():
    with serve_process(command=["examples/sokoban/serve.sh"]) as process:
        assert "sokoban-v0" in process.first_line
        answer = process.service.initialize("sokoban-v0", seed=3).json()
        assert answer["observation"][0]["content"] == draw(rules.generate(3))
