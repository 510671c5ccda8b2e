# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""verl's trackers get our metrics under the names that the docs give them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking

from recipe.agent_env.metrics import env_metrics
from recipe.agent_env.rollout.batch import episode_columns
from recipe.agent_env.rollout.episode import EndReason
from tests.rollout.episodes import make_episode

README = Path(__file__).parents[1] / "recipe" / "agent_env" / "README.md"


@pytest.fixture
def metrics():
    episodes = [make_episode(rewards=[1.0, 0.0], success=1.0), make_episode(end_reason=EndReason.FAILED)]
    return env_metrics({**episode_columns(episodes), "env_name": np.array(["game"] * 2, dtype=object)})


def track(backends, metrics, **options):
    tracking = Tracking("project", "run", default_backend=backends, config={"env": {"max_turn": 4}}, **options)
    tracking.log(data=metrics, step=7)
    for logger in tracking.logger.values():
        if hasattr(logger, "finish"):
            logger.finish()


def test_console_tensorboard_and_file_get_every_scalar(tmp_path, metrics, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    track(["console", "tensorboard", "file"], metrics)
    assert "env/failed_episode_ratio:0.5" in capsys.readouterr().out
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written["step"] == 7 and written["data"] == pytest.approx(metrics)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(metrics)
    [event] = board.Scalars("env/success_rate/game")
    assert (event.step, event.value) == (7, 1.0)


def test_metrics_are_finite_scalars_under_the_families_of_the_readme(metrics):
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert all(name.startswith("env/") for name in metrics)
    text = README.read_text()
    for name in ("env/failed_episode_ratio", "env/num_assistant_turns/mean", "env/success_rate"):
        assert name in metrics and f"`{name}`" in text
