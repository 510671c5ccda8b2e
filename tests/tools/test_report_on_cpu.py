# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The report of a run, from each tracker's own files."""

import json
import sqlite3
from pathlib import Path

import pytest

from recipe.agent_env.report import main, summary_rows, time_split
from recipe.agent_env.tools.run_metrics import MetricsError, RunMetrics, read_run

STEPS = {
    1: {"env/episode_return/mean": -1.5, "env/end_reason/max_turn": 1.0, "val-core/grid-v0/acc/mean@1": 0.25},
    2: {"env/episode_return/mean": 2.25, "env/end_reason/max_turn": 0.5, "env/end_reason/terminated": 0.5},
}
TIMES = {
    "timing_s/gen": 10.0,
    "timing_s/agent_loop/slowest/generate_sequences": 6.0,
    "timing_s/agent_loop/slowest/tool_calls": 3.0,
    "timing_s/update_actor": 5.0,
    "timing_s/old_log_prob": 2.0,
    "timing_s/step": 18.0,
}


def write_file(folder: Path) -> Path:
    path = folder / "project" / "run.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in STEPS.items()))
    return path


def write_console(folder: Path) -> Path:
    """As verl's console tracker prints it: behind Ray's prefix, numpy's types around some numbers."""
    path = folder / "train.log"
    lines = ["INFO nothing of interest: step:x"]
    for step, data in STEPS.items():
        entries = " - ".join(f"{name}:np.float64({value})" for name, value in data.items())
        lines.append(f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - {entries} - note:text - actor/lr:1e-06")
    path.write_text("\n".join(lines))
    return path


def write_tensorboard(folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tb")) as writer:
        for step, data in STEPS.items():
            for name, value in data.items():
                writer.add_scalar(name, value, step)
    return folder / "tb"


def write_mlflow(folder: Path) -> Path:
    path = folder / "mlruns.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        database.execute("INSERT INTO metrics VALUES ('old', 1.0, 0, 'older', 1, 0)")
        for step, data in STEPS.items():
            for name, value in data.items():
                database.execute("INSERT INTO metrics VALUES (?, ?, ?, 'newer', ?, 0)", (name, value, step, step))
    database.close()
    return path


WRITERS = {"file": write_file, "console": write_console, "tensorboard": write_tensorboard, "mlflow": write_mlflow}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_every_tracker_is_read(tmp_path, write):
    metrics = read_run(write(tmp_path))
    for step, data in STEPS.items():
        for name, value in data.items():
            assert metrics.series[name][step] == value
    assert metrics.steps == [1, 2]
    assert "old" not in metrics.series


def test_folder_prefers_the_file_tracker_over_a_log(tmp_path):
    write_console(tmp_path)
    path = write_file(tmp_path)
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "1.jsonl").write_text('{"turns": [], "step": 1}\n')
    assert read_run(tmp_path).source == f"{path} (file)"


def test_report_is_one_page_with_its_images(tmp_path, capsys):
    write_file(tmp_path)
    assert main([str(tmp_path), "--title", "<run>"]) == 0
    text = (tmp_path / "report" / "report.html").read_text()
    names = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert names == {"return", "success", "end_reasons"}
    assert text.count("data:image/png;base64,") == 3
    assert "http" not in text.replace("http-equiv", "")
    assert "&lt;run&gt;" in text and "<run>" not in text
    assert "2 steps, 3 plots" in capsys.readouterr().out


def test_summary_has_first_largest_and_last():
    metrics = RunMetrics(source="test")
    for step, value in enumerate((1.0, 5.0, 2.0)):
        metrics.add("env/episode_return/mean", step, value)
        metrics.add("val-core/grid/v0/acc/best@4/mean", step, value)
    assert ("return, training", 1.0, 5.0, 2.0) in summary_rows(metrics)
    assert ("success, validation (grid/v0 best@4)", 1.0, 5.0, 2.0) in summary_rows(metrics)


def test_time_of_a_rollout_is_split_between_engine_and_service():
    metrics = RunMetrics(source="test")
    for name, value in TIMES.items():
        metrics.add(name, 1, value)
    split = time_split(metrics, 1)
    assert split["generate"] == pytest.approx(20 / 3)
    assert split["environment"] == pytest.approx(10 / 3)
    assert split["other"] == pytest.approx(1.0)
    assert sum(split.values()) == pytest.approx(18.0)


def test_numbers_that_are_none_are_left_out():
    metrics = RunMetrics(source="test")
    metrics.add("a", 1, float("nan"))
    metrics.add("a", 2, 1.0)
    metrics.add("a", 3, None)
    assert metrics.points("a") == ([2], [1.0])


def test_run_of_every_metric_draws_every_panel(tmp_path):
    from recipe.agent_env.report import PANELS, draw_panels

    metrics = RunMetrics(source="test")
    names = [*STEPS[1], *TIMES, "perf/throughput", "actor/ppo_kl", "actor/entropy", "actor/grad_norm"]
    names += ["actor/pg_clipfrac", "env/num_env_steps/mean", "prompt_length/mean", "env/parse_error_ratio"]
    names += ["env/episode_return/min", "env/episode_return/max", "env/success_rate/a", "env/success_rate/b"]
    for step in range(50):
        for name in names:
            metrics.add(name, step, 0.5)
    assert set(draw_panels(metrics)) == {panel.name for panel in PANELS}


@pytest.mark.parametrize("name", ["", "nothing"], ids=["empty folder", "no folder"])
def test_run_without_metrics_says_what_to_do(tmp_path, capsys, name):
    assert main([str(tmp_path / name)]) == 2
    assert "error:" in capsys.readouterr().err


def test_broken_database_is_named(tmp_path):
    path = tmp_path / "x.db"
    path.write_text("no database at all, but long enough to be looked at as one")
    with pytest.raises(MetricsError, match="x.db"):
        read_run(path)
