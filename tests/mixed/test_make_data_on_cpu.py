# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A data set of three environments: as many episodes of each, no two that begin alike, one service for all of them."""

import json
from pathlib import Path

import pandas
import requests

from examples import run_script
from examples.mixed import make_data
from examples.sokoban import sokoban_env
from tests.e2e.runs import mixed_service

NAMES = {sokoban_env.ENV_NAME, make_data.FROZEN_LAKE, make_data.COUNTDOWN}


def test_train_and_test_hold_as_many_of_each_and_none_twice(tmp_path: Path) -> None:
    make_data.main(["--out-dir", str(tmp_path), "--num-train", "20", "--num-test", "4"])
    train, test = (pandas.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "test"))
    assert dict(train["env_name"].value_counts()) == dict.fromkeys(NAMES, 20)
    assert dict(test["env_name"].value_counts()) == dict.fromkeys(NAMES, 4)
    assert set(train["env_name"][:3]) == NAMES  # they take turns
    assert not pandas.concat([train, test]).duplicated().any()


def test_episodes_that_begin_alike_are_left_out() -> None:
    """3x3 lakes at 60% holes are few: seeds repeat them soon."""
    rows = make_data.distinct_rows(make_data.FROZEN_LAKE, make_data.FrozenLakeEnv, {"size": 3, "hole_percent": 60})
    seeds = [next(rows)["seed"] for _ in range(10)]
    starts = [json.dumps(make_data.FrozenLakeEnv(size=3, hole_percent=60).reset(seed=seed)[0]) for seed in seeds]
    assert len(set(starts)) == 10 and seeds[-1] > 9


def test_one_service_plays_a_row_of_each(tmp_path: Path) -> None:
    with mixed_service(tmp_path) as service:
        for row in make_data.mixed_rows(1, max_steps=5):
            body = {**row, "env_kwargs": json.loads(row["env_kwargs"])}
            answer = requests.post(f"{service.url}/api/environment/initialize", json=body, timeout=30)
            assert answer.status_code == 200 and answer.json()["observation"]
        assert service.live_sessions() == 3


def test_script_trains_the_same_setting_on_the_mixed_data() -> None:
    script = Path(make_data.__file__).parent / "run_qwen2_5-1.5b_1gpu_grpo.sh"
    first, *_ = run_script.read_calls(script, [])
    assert first[:2] == ["-m", "examples.mixed.make_data"]
    config = run_script.compose_config(run_script.read_overrides(script, ["env.max_turn=3"]))
    assert (config.trainer.project_name, config.env.max_turn) == ("mixed", 3)
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == ("grpo", 8)
