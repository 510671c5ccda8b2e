# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""AgentDataset: good rows from every format, and a message with file, row and column for bad ones."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from recipe.agent_env.agent_dataset import AgentDataset, DataRowError


def write(tmp_path, rows, name="rows.parquet"):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(**changes):
    return {"env_name": "sokoban-v0", "seed": 3, "env_kwargs": '{"dim_room": [6, 6]}', **changes}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_become_episode_specs(tmp_path, name):
    dataset = AgentDataset(write(tmp_path, [row(), row(seed=4, env_kwargs=None)], name))
    assert dataset.spec(0).env_kwargs == {"dim_room": [6, 6]}
    assert (dataset.spec(1).seed, dataset.spec(1).env_kwargs) == (4, {})
    item = dataset[1]
    assert (item["index"], item["data_source"]) == (1, "sokoban-v0")
    assert isinstance(item["dummy_tensor"], torch.Tensor)


def test_env_kwargs_may_be_a_struct_column(tmp_path):
    """P98: what parquet gives back as numpy becomes plain JSON values."""
    dataset = AgentDataset(write(tmp_path, [row(env_kwargs={"dim_room": [6, 6], "boxes": 1})]))
    kwargs = dataset.spec(0).env_kwargs
    assert kwargs == {"dim_room": [6, 6], "boxes": 1}
    json.dumps(kwargs)


def test_many_files_are_one_dataset_and_extra_columns_travel(tmp_path):
    paths = [write(tmp_path, [row(level="easy")], "a.jsonl"), write(tmp_path, [row()], "b.parquet")]
    dataset = AgentDataset(paths)
    assert [dataset[i]["level"] for i in range(2)] == ["easy", None]
    assert [dataset[i]["index"] for i in range(2)] == [0, 1]


def test_max_samples_keeps_the_first_rows(tmp_path):
    assert len(AgentDataset(write(tmp_path, [row(seed=i) for i in range(5)]), max_samples=2)) == 2


def test_nullable_seed_column_gives_whole_numbers(tmp_path):
    """A nullable integer column comes from pandas as floats."""
    dataset = AgentDataset(write(tmp_path, {"env_name": ["a"], "seed": [np.float64(7.0)], "env_kwargs": ["{}"]}))
    assert dataset.spec(0).seed == 7 and isinstance(dataset.spec(0).seed, int)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1.5}, r"row 1, column 'seed': expected a whole number, found 1\.5"),
        ({"seed": float("nan")}, "row 1, column 'seed'.*nan"),
        ({"seed": None}, "row 1, column 'seed'"),
        ({"seed": "3"}, "row 1, column 'seed'.*'3'"),
        ({"seed": True}, "row 1, column 'seed'.*True"),
        ({"env_name": ""}, "row 1, column 'env_name'"),
        ({"env_name": 5}, "row 1, column 'env_name'.*5"),
        ({"env_kwargs": "{oops"}, "row 1, column 'env_kwargs': expected the JSON text.*oops"),
        ({"env_kwargs": "[1]"}, r"row 1, column 'env_kwargs'.*\[1\]"),
        ({"env_kwargs": {"p": float("inf")}}, r"column 'env_kwargs'\['p'\].*inf"),
    ],
)
def test_bad_rows_name_file_row_and_column(tmp_path, change, match):
    path = write(tmp_path, [row(), row(**change)], "rows.jsonl")
    with pytest.raises(DataRowError, match=match) as caught:
        AgentDataset(path)
    assert path in str(caught.value)


def test_missing_things_say_what_is_expected(tmp_path):
    with pytest.raises(DataRowError, match="does not exist"):
        AgentDataset(str(tmp_path / "none.parquet"))
    with pytest.raises(DataRowError, match=r"no column seed, env_kwargs among \['env_name'\]"):
        AgentDataset(write(tmp_path, [{"env_name": "a"}]))
    with pytest.raises(DataRowError, match="expected .parquet, .jsonl or .json, got '.csv'"):
        (tmp_path / "rows.csv").write_text("")
        AgentDataset(str(tmp_path / "rows.csv"))
    with pytest.raises(DataRowError, match="at least one data file"):
        AgentDataset([])
    with pytest.raises(DataRowError, match="no rows"):
        AgentDataset(write(tmp_path, {"env_name": [], "seed": [], "env_kwargs": []}))


def test_dataset_survives_the_loader(tmp_path):
    """The collated batch is what verl's trainer takes, with object columns of one dimension."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl import DataProto
    from verl.utils.dataset.rl_dataset import collate_fn

    dataset = AgentDataset(write(tmp_path, [row(seed=i) for i in range(3)]))
    batch = DataProto.from_single_dict(next(iter(StatefulDataLoader(dataset, batch_size=3, collate_fn=collate_fn))))
    assert batch.non_tensor_batch["env_kwargs"].shape == (3,)
    assert batch.non_tensor_batch["seed"].tolist() == [0, 1, 2]
