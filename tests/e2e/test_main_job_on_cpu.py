# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The main job on real parts: the entrypoint, verl's PPO loop, FSDP2, vLLM and a live Sokoban service.

What was trained is compared, token by token, with what vLLM returned (recorded at vLLM's door) and with what the
service logged itself; neither record passes through the ledger.
"""

import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.sokoban.sokoban_env import TOOLS
from tests.e2e.runs import Run, Service, finish_run, run, sokoban_service, start_run
from tests.mock_env_server import EnvScript, MockEnvServer, Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GAE = ["algorithm.adv_estimator=gae", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
PENALTY = -0.5


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """Start and end of each stretch of ones."""
    edges = [i for i in range(len(mask) + 1) if (mask[i] if i < len(mask) else 0) != (mask[i - 1] if i else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def assert_rows_are_what_the_engine_returned(done: Run) -> None:
    """Every sampled span of every trained row is one reply of vLLM to exactly the tokens before it."""
    calls = Counter((tuple(c["prompt_ids"]), tuple(c["reply_ids"])) for c in done.engine_calls())
    for step in (1, 2):
        for row in done.rows(step):
            turns = spans(row["response_mask"])
            assert turns or row["end_reason"] == "failed", "a row without any sampled token"
            for start, stop in turns:
                context = tuple(row["prompt_ids"] + row["response_ids"][:start])
                call = (context, tuple(row["response_ids"][start:stop]))
                assert calls[call] > 0, f"step {step}: vLLM never returned this turn"
                calls[call] -= 1


def assert_rows_are_what_the_service_played(done: Run, service: Service) -> None:
    """Each trained row is one episode of the service's own log: the same calls, observations and rewards in order."""
    episodes: dict[str, list[dict[str, Any]]] = {}
    for call in service.calls():
        if call["event"] in ("initialize", "step"):
            episodes.setdefault(call["env_id"], []).append(call)
    free = list(episodes.values())
    for step in (1, 2):
        for row in done.rows(step):
            match = next((episode for episode in free if is_same_episode(row, episode)), None)
            assert match is not None, f"step {step}, seed {row['seed']}: the service played no such episode"
            free.remove(match)


def is_same_episode(row: dict[str, Any], episode: list[dict[str, Any]]) -> bool:
    """Whether a trained row tells the same story as one episode of the service's log."""
    start, *steps = episode
    sent = [turn for turn in row["turns"] if turn["reward"] != PENALTY]
    if start["seed"] != row["seed"] or len(steps) != len(sent):
        return False
    for turn, step in zip(sent, steps, strict=True):
        is_last = step["terminated"] or step["truncated"] or turn is row["turns"][-1]
        names = [call["function"]["name"] for call in step["action"]["tool_calls"]]
        is_same = (
            abs(turn["reward"] - step["reward"]) < 1e-6
            and all(f'"{name}"' in turn["reply"] for name in names)
            and (is_last or all(message["content"] in turn["observation"] for message in step["observation"]))
        )
        if not is_same:
            return False
    return abs(sum(turn["reward"] for turn in row["turns"]) - row["episode_return"]) < 1e-5


@pytest.mark.parametrize("algorithm", [GAE, GRPO], ids=["gae", "grpo"])
def test_two_steps_train_on_exactly_what_happened(tmp_path: Path, material, algorithm):
    """P92: and every row of the data is one group."""
    with sokoban_service(tmp_path) as service:
        done = run(tmp_path / "run", *material.overrides(service.url), *algorithm)
        assert service.live_sessions() == 0
        assert_rows_are_what_the_engine_returned(done)
        assert_rows_are_what_the_service_played(done, service)
    first, second = done.metrics[1], done.metrics[2]
    rows = done.rows(1) + done.rows(2)
    assert any(turn["reward"] not in (0.0, PENALTY) for row in rows for turn in row["turns"])
    assert any(advantage != 0 for row in rows for advantage in row["advantages"])
    assert first["actor/grad_norm"] > 0 and second["actor/grad_norm"] > 0
    # The second step was sampled by the weights that the first one made: engine and trainer still agree.
    assert second["training/rollout_probs_diff_max"] < 1e-3
    assert first["env/failed_episode_ratio"] == 0
    assert "val-core/sokoban-v0/acc/mean@1" in second
    if algorithm is GAE:
        assert first["critic/grad_norm"] > 0
    else:
        assert len({row["uid"] for row in done.rows(1)}) == 4
        by_group = {row["uid"]: row["seed"] for row in done.rows(1)}
        assert all(row["seed"] == by_group[row["uid"]] for row in done.rows(1))


def test_failed_episodes_teach_nothing_in_a_real_run(tmp_path: Path, material):
    """P20, P69, P81: of 8 rows one group fails whole and one loses a rollout; the update runs on the other five."""

    def pay_for_up(episode, action) -> Step:
        return Step(reward=float("up" in str(action["tool_calls"])), done=len(episode.actions) >= 3)

    rows = [{"env_name": "game", "seed": seed, "env_kwargs": "{}"} for seed in range(8)]
    train_file = tmp_path / "rows.jsonl"
    train_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with MockEnvServer() as server:
        server.script("game", EnvScript(tools_schema=TOOLS, steps=pay_for_up))
        server.fault("status", call="step", seed=1, times=None, body="Traceback: SECRET")
        server.fault("status", call="step", seed=2, times=1)
        files = [f"data.train_files={train_file}", f"data.val_files={train_file}", "data.shuffle=False"]
        limits = ["env.max_episode_restarts=0", "trainer.test_freq=-1"]
        done = run(tmp_path / "run", *material.overrides(server.url), *GRPO, *files, *limits)
        assert server.live_count == 0
    assert_rows_are_what_the_engine_returned(done)
    first, second = done.metrics[1], done.metrics[2]
    assert first["env/failed_episode_ratio"] == 3 / 8 and second["env/failed_episode_ratio"] == 0
    assert all(math.isfinite(first[key]) for key in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"))
    failed = [row for row in done.rows(1) if row["end_reason"] == "failed"]
    assert sorted(row["seed"] for row in failed) == [1, 1, 2]
    assert all(sum(row["response_mask"]) == 0 and not any(row["advantages"]) for row in failed)
    [survivor] = [row for row in done.rows(1) if row["seed"] == 2 and row not in failed]
    assert not any(survivor["advantages"])
    assert "SECRET" not in (done.folder / "engine.jsonl").read_text()


def test_resumed_run_is_the_unbroken_one(tmp_path: Path, material):
    """P96: after step 2 of 3. Each request is seeded, so the two runs sample the same ids: steps can be compared."""
    checkpoints = tmp_path / "checkpoints"
    steps = ["trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.test_freq=-1"]
    kl = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
    seeded = ["actor_rollout_ref.rollout.full_determinism=True", f"trainer.default_local_dir={checkpoints}"]
    with sokoban_service(tmp_path) as service:
        overrides = [*material.overrides(service.url), *GAE, *steps, *kl, *seeded]
        whole = run(tmp_path / "whole", *overrides)
        shutil.rmtree(checkpoints / "global_step_3")
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
        resumed = run(tmp_path / "resumed", *overrides)
        assert service.live_sessions() == 0
    assert sorted(resumed.metrics) == [3]

    def sampled(done: Run) -> dict[int, tuple[list[int], list[float]]]:
        return {row["seed"]: (row["response_ids"], row["rewards"]) for row in done.rows(3)}

    assert sampled(resumed) == sampled(whole)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm", "critic/lr"):
        assert resumed.metrics[3][name] == pytest.approx(whole.metrics[3][name], rel=1e-4), name
    coefficient = "actor/reward_kl_penalty_coeff"
    assert resumed.metrics[3][coefficient] == pytest.approx(whole.metrics[3][coefficient], rel=1e-9)
    assert whole.metrics[3][coefficient] != whole.metrics[1][coefficient]
    assert json.loads((checkpoints / "global_step_2" / "agent_env.json").read_text())["services"]


def processes_of(folder: Path) -> list[str]:
    """Live processes that a run started, known by a variable that all of them inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("ENGINE_RECORD") == str(folder / "engine.jsonl")
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:120])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_interrupted_run_leaves_no_environment_and_no_process(tmp_path: Path, material):
    """P71: the signal comes while episodes are open. SIGTERM takes the way of Ctrl-C; see `main_agent_ppo`."""
    folder = tmp_path / "run"
    with sokoban_service(tmp_path) as service:
        slow = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
        process = start_run(folder, *material.overrides(service.url), *GAE, *slow)
        try:
            deadline = time.monotonic() + 400
            while service.live_sessions() == 0:
                assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
                assert time.monotonic() < deadline, "no episode was opened in time"
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGTERM)
            done = finish_run(process, folder, limit_s=90)
        finally:
            process.kill()
        assert done.exit_code == 130
        assert service.live_sessions() == 0
    deadline = time.monotonic() + 30
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(folder) == []
