# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The demo's parts without Ray: data, service, the command it runs, what it shows and what it sums up."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.sokoban import demo, noise_env, plots, validation
from recipe.agent_env.agent_dataset import AgentDataset
from recipe.agent_env.env_client import EnvClient, EnvClientConfig

_ROOT = Path(__file__).resolve().parents[2]
SAMPLED, GREEDY = (validation.success_key(decoding) for decoding in validation.DECODINGS)


@pytest.fixture
def options(tmp_path: Path) -> demo.Options:
    plan = demo.Plan(demonstrations=32, steps=2, episodes_per_step=16, test_freq=1)
    run = demo.Options(
        algorithm="ppo", plan=plan, seed=3, out_dir=tmp_path, noise_rewards=False, exports=False, overrides=()
    )
    run.run_dir.mkdir()
    return run


@pytest.fixture
def metrics() -> list[tuple[int, dict]]:
    return [
        (0, {SAMPLED: 0.25, GREEDY: 0.3}),
        (1, {"env/success_rate": 0.2, "env/episode_return/mean": 1.5, "timing_s/step": 3.0}),
        (2, {"env/success_rate": 0.4, "env/episode_return/mean": 2.5, "timing_s/step": 3.0, SAMPLED: 0.5, GREEDY: 0.6}),
    ]


def write_log(path: Path, metrics: list[tuple[int, dict]]) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in metrics))


def test_data_is_made_once_and_its_splits_share_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_ROOMS", replace(demo._ROOMS, num_train=20, num_test=5))
    first = demo.prepare_data(tmp_path)
    written = (tmp_path / "test.parquet").stat().st_mtime_ns
    assert demo.prepare_data(tmp_path) == first and len(first) == 64
    assert (tmp_path / "test.parquet").stat().st_mtime_ns == written
    seeds = {
        name: {row["seed"] for row in AgentDataset(str(tmp_path / f"{name}.parquet"))} for name in ("train", "test")
    }
    assert len(seeds["train"]) == 20 and len(seeds["test"]) == 5 and not seeds["train"] & seeds["test"]


def test_validation_file_holds_each_room_for_each_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_ROOMS", replace(demo._ROOMS, num_train=20, num_test=5))
    demo.prepare_data(tmp_path)
    rows = list(AgentDataset(str(tmp_path / "validation.jsonl")))
    by_decoding = {d: [row["seed"] for row in rows if row["decoding"] == d] for d in validation.DECODINGS}
    assert len(by_decoding["greedy"]) == 5 and len(by_decoding["sampled"]) == 20
    assert all(by_decoding["sampled"].count(seed) == 4 for seed in by_decoding["greedy"])
    assert all(row["data_source"] == row["decoding"] for row in rows)


@pytest.mark.parametrize("noise_rewards", [False, True], ids=["game", "noise"])
def test_service_starts_counts_its_sessions_and_stops(
    tmp_path: Path, noise_rewards: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    service, url = demo.start_service(tmp_path / "log", noise_rewards)
    try:
        session = EnvClient(EnvClientConfig(endpoint=url)).open(env_name="sokoban-v0", seed=0, env_kwargs={})
        assert demo.live_sessions(url) == 1
        session.close()
    finally:
        demo.stop_service(service, url)
    assert service.poll() in (0, -signal.SIGTERM)
    assert "still open at the service: 0" in capsys.readouterr().out


def test_service_that_cannot_start_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.curate_data, "ENV_NAME", "")
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(demo.DemoError, match="did not start.*log"):
        demo.start_service(tmp_path / "log", noise_rewards=False)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_command_composes_with_what_was_asked_for(options: demo.Options, algorithm: str) -> None:
    """The script's keys exist, and the last word is the demo's; `--cfg job` prints what would run."""
    options = replace(options, algorithm=algorithm, overrides=("env.max_turn=5",))
    model = options.out_dir / "model"
    for path in (model / "config.json", options.out_dir / "data/train.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    variables = demo.trainer_environment(options, "http://127.0.0.1:9", model, options.run_dir / "train.jsonl")
    result = subprocess.run(
        [*demo.trainer_command(options), "--cfg", "job"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    for line in (
        f"adv_estimator: {'gae' if algorithm == 'ppo' else 'grpo'}",
        "environment_endpoint: http://127.0.0.1:9",
        "max_turn: 5",
        f"agent_loop_manager_class: {validation.MANAGER_CLASS}",
        f"tokenizer_path: {model}/tokenizer",
        "total_training_steps: 2",
        f"train_batch_size: {16 if algorithm == 'ppo' else 2}",
    ):
        assert line in result.stdout


def test_progress_shows_each_step_once(
    tmp_path: Path, metrics: list[tuple[int, dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = demo.Progress(tmp_path / "log", 2)
    progress.show()
    for count in (1, 3):
        write_log(tmp_path / "log", metrics[:count])
        progress.show()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["step   0/2", "step   1/2", "step   2/2"]
    assert "sampled 25%, greedy 30%" in lines[0] and "solved  20%, return   1.50" in lines[1]


def test_log_that_is_being_written_is_read_up_to_its_last_whole_line(
    tmp_path: Path, metrics: list[tuple[int, dict]]
) -> None:
    write_log(tmp_path / "log", metrics)
    with (tmp_path / "log").open("a") as log:
        log.write('{"step": 3, "da')
    assert [step for step, _ in plots.read_metrics(tmp_path / "log")] == [0, 1, 2]
    assert plots.read_metrics(tmp_path / "nothing") == []


def test_summary_compares_the_first_validation_with_the_last(
    options: demo.Options, metrics: list[tuple[int, dict]]
) -> None:
    record = {"num_parameters": 1_000_000, "was_cached": False, "seconds": 60.0}
    summary = demo.summarise(options, metrics, record)
    assert (summary["success_before"], summary["success_after"], summary["gain_points"]) == (0.25, 0.5, 25.0)
    assert (summary["greedy_before"], summary["greedy_after"], summary["greedy_gain_points"]) == (0.3, 0.6, 30.0)
    assert (summary["steps"], summary["seed"], summary["algorithm"]) == (2, 3, "ppo")


def test_plot_is_a_png(tmp_path: Path, metrics: list[tuple[int, dict]]) -> None:
    plots.plot_run(metrics, tmp_path / "curve.png", "PPO")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [([], 6), (["--learn"], 20), (["--learn", "--algo", "grpo"], 50), (["--learn", "--steps", "3"], 3)],
)
def test_mode_and_algorithm_say_how_much_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], steps: int
) -> None:
    seen: list[demo.Options] = []
    monkeypatch.setattr(demo, "train", lambda options, memory: seen.append(options))
    monkeypatch.setattr(demo.processes, "end_descendants", lambda grace_s: [])
    assert demo.main([*arguments, "--out-dir", str(tmp_path)]) == 0
    assert (seen[0].plan.steps, seen[0].exports) == (steps, "--learn" in arguments)


def test_noise_pays_independently_of_the_action_and_leaves_the_game_as_it_is() -> None:
    rewards = []
    for _ in range(200):
        env = noise_env.NoiseSokobanEnv(max_steps=1)
        env.reset(0)
        observation, reward, _, truncated, info = env.step({"role": "assistant", "content": "", "tool_calls": []})
        assert truncated and info["success"] is False and observation
        rewards.append(reward)
    assert abs(sum(rewards) / len(rewards)) < noise_env.NOISE_SCALE / 2 and len(set(rewards)) > 190


def test_failed_training_ends_the_demo_with_its_log(options: demo.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "trainer_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(demo.DemoError, match="exit status 3; its log: .*train.log"):
        demo.run_trainer(options, "http://127.0.0.1:9", options.out_dir / "model")
