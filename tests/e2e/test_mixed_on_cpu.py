# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One run on three environments: each is really played, each has metrics of its own, and none is taken for another."""

from collections import Counter
from pathlib import Path

import pytest

from examples.mixed import make_data
from tests.e2e.runs import Run, Service, mixed_service, run
from tests.e2e.talking_policy import make_talking_policy

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NAMES = ("countdown-v0", "frozen_lake-v0", "sokoban-v0")
CALLS = (
    *(f'{{"name":"push_{name}","arguments":{{}}}}' for name in ("up", "down", "left", "right")),
    *(f'{{"name":"move","arguments":{{"direction":"{name}"}}}}' for name in ("up", "down", "left", "right")),
    *(f'{{"name":"combine","arguments":{{"left":{n},"operator":"+","right":{n + 1}}}}}' for n in (1, 3, 5, 7)),
)
"""As many for each environment; the policy does not look which one it plays."""


def sent_calls(service: Service) -> Counter[tuple[str, str]]:
    """How often which tool was called in which environment, by the service's own log."""
    steps = [call for call in service.calls() if call["event"] == "step"]
    return Counter(
        (step["env_name"], call["function"]["name"]) for step in steps for call in step["action"]["tool_calls"]
    )


def trained_seeds(done: Run) -> Counter[tuple[str, int]]:
    """Environment and seed of each trained row."""
    return Counter((row["env_name"], row["seed"]) for step in (1, 2) for row in done.rows(step))


def test_three_environments_in_one_run(tmp_path: Path, material) -> None:
    make_talking_policy(
        tmp_path / "model", say=lambda rng: f"<tool_call>{rng.choice(CALLS)}</tool_call><|im_end|>", tokens=CALLS
    )
    make_data.main(["--out-dir", str(tmp_path), "--num-train", "6", "--num-test", "1", "--max-steps", "4"])
    with mixed_service(tmp_path) as service:
        done = run(
            tmp_path / "run",
            *material.overrides(service.url),
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"data.val_files={tmp_path / 'test.parquet'}",
            "data.shuffle=False",
            "data.train_batch_size=6",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        )
        assert service.live_sessions() == 0
        calls = sent_calls(service)
    for name in NAMES:
        # `acc`, or `reward` where validation's one greedy episode got no call through, so that the game never spoke.
        assert any(key.startswith(f"val-core/{name}/") for key in done.metrics[2])
        assert all(0 <= done.metrics[step][f"env/success_rate/{name}"] <= 1 for step in (1, 2))
        assert sum(count for (env_name, _), count in calls.items() if env_name == name) > 0
    # Each environment got its own tools only: the others are unknown to it, and unknown calls are never sent.
    assert {tool for env_name, tool in calls if env_name == "frozen_lake-v0"} == {"move"}
    assert {tool for env_name, tool in calls if env_name == "countdown-v0"} == {"combine"}
    assert not {tool for env_name, tool in calls if env_name == "sokoban-v0"} & {"move", "combine"}
    rows = trained_seeds(done)
    assert set(rows.values()) == {2} and Counter(name for name, _ in rows) == dict.fromkeys(NAMES, 4)
    assert all(done.metrics[step]["actor/grad_norm"] > 0 for step in (1, 2))
