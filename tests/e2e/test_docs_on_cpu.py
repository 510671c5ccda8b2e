# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The last step of docs/bring_your_own_environment.md: the class of the page is trained on, by the page's own command.

What is changed: the port, the model (a tiny one), `+platform=cpu`, and how much is played.
"""

import json
import random
import re
from pathlib import Path

import pytest

from tests.e2e.talking_policy import make_talking_policy
from tests.tools.test_docs_on_cpu import BLOCKS, CLASS, Shell

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

SMALLER = {
    "data.train_batch_size=256": "data.train_batch_size=4 +platform=cpu trainer.total_training_steps=1",
    "ppo_mini_batch_size=256": "ppo_mini_batch_size=4",
    "ppo_micro_batch_size_per_gpu=16": "ppo_micro_batch_size_per_gpu=8",
    "log_prob_micro_batch_size_per_gpu=32": "log_prob_micro_batch_size_per_gpu=16",
    "data.max_response_length=128": "data.max_response_length=40",
    "trainer.test_freq=5": "trainer.test_freq=-1 trainer.val_before_train=False",
}


def guess(rng: random.Random) -> str:
    """A call of the page's tool."""
    return f'<tool_call>{{"name":"guess","arguments":{{"number":{rng.randint(1, 9)}}}}}</tool_call><|im_end|>'


def test_own_environment_is_trained_on_and_the_run_is_looked_at(tmp_path: Path):
    assert CLASS is not None
    serve, _, rows, _, _, train, look = BLOCKS
    (tmp_path / "guess_env.py").write_text(CLASS.group(1), encoding="utf-8")
    make_talking_policy(tmp_path / "model", say=guess, frames=[CLASS.group(1)])
    shell = Shell(tmp_path)
    shell.changes |= {"Qwen/Qwen2.5-1.5B-Instruct": str(tmp_path / "model"), "--port 8000": "--port 0", **SMALLER}
    assert all(old in train for old in SMALLER)
    service = shell.serve(serve)
    try:
        assert service.stdout is not None
        url = re.search(r"http://[\d.:]+", service.stdout.readline())
        assert url is not None
        shell.changes["http://localhost:8000"] = url.group()
        shell.run(rows)
        shown = shell.run(train, limit_s=1000)
    finally:
        service.terminate()
        service.wait(timeout=30)
    assert "step 1 rollout: 16 episodes in " in shown
    [record] = [json.loads(line) for line in (tmp_path / "guess" / "first.jsonl").read_text().splitlines()][:1]
    assert record["data"]["env/failed_episode_ratio"] == 0 and record["data"]["actor/grad_norm"] >= 0
    assert record["data"]["env/num_env_steps/max"] > 0, "the policy never guessed"
    shown = shell.run(look)
    assert (tmp_path / "guess" / "report" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "guess" / "page.html").stat().st_size > 10_000
