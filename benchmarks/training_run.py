# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figures 6, 7 and 8: one real training run on the CPU (vLLM, FSDP, a live Sokoban service), and what it says.

Prefix reuse is the run's own metric. The share of our own Python is an upper bound: all processor time of the agent
worker's process while it plays (client, event loop and Ray's threads included) plus that of our parts on the driver,
over the wall time of the step. The start-up items are those parts that verl's own start does not have.
"""

import importlib
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import own_time
from benchmarks.figures import Figure, compare, run_script
from benchmarks.run import REPO

_NUM_STEPS = 6
_STEP_PARTS = {
    "EnvAgentLoopWorker.generate_sequences",
    "EnvAgentLoopManager.generate_sequences",
    "AgentRayPPOTrainer._log_rollout_data",
    *own_time.PATCHED,
}
_START_PARTS = {
    "config checks": "finish_config",
    "data set": "AgentDataset.__init__",
    "prompt style": "EpisodeTokenizer.from_config",
    "client": "AsyncEnvClient.__init__",
}
_VERL_MODULES = ("verl.trainer.main_ppo_v0", "verl.experimental.agent_loop.agent_loop", "verl.utils.dataset.rl_dataset")
_OUR_MODULES = ("recipe.agent_env.main_agent_ppo", "recipe.agent_env.agent_task_runner")
_PROCESSES_IN_A_ROW = 3
"""Entrypoint, task runner and agent worker: each imports our modules, one after the other."""


def _import_in_child(pipe: Any) -> None:
    started = time.process_time()
    for name in _OUR_MODULES:
        importlib.import_module(name)
    pipe.send(time.process_time() - started)


def import_s() -> float:
    """Processor time of importing our modules into a process that has verl's, in seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_import_in_child, args=(there,))
    child.start()
    seconds = float(here.recv())
    child.join()
    return seconds


def train(folder: Path) -> tuple[dict[int, dict[str, float]], list[dict[str, Any]], float]:
    """Train for a few steps.

    Returns:
        metrics: Of each step, as logged.
        events: What `own_time` wrote.
        started: When the command was given, seconds since 1970.
    """
    from examples.sokoban.curate_data import main as curate
    from tests.e2e.conftest import Material
    from tests.e2e.runs import run, sokoban_service
    from tests.e2e.talking_policy import make_talking_policy

    curate(["--out-dir", str(folder), "--num-train", "64", "--num-test", "4", "--dim", "6", "6", "--quiet"])
    make_talking_policy(folder / "model")
    material = Material(model=folder / "model", train_file=folder / "train.parquet", test_file=folder / "test.parquet")
    record = folder / "own_time.jsonl"
    plugins = "recipe.agent_env.platform_cpu,benchmarks.own_time"
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    with sokoban_service(folder) as service:
        started = time.time()
        done = run(
            folder / "run",
            *material.overrides(service.url),
            "algorithm.adv_estimator=gae",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            f"trainer.total_training_steps={_NUM_STEPS}",
            "trainer.test_freq=-1",
            f"{variables}.VERL_USE_EXTERNAL_MODULES='{plugins}'",
            f"+{variables}.OWN_TIME_RECORD={record}",
            limit_s=1200.0,
        )
        events = [json.loads(line) for line in record.read_text().splitlines()]
    return done.metrics, events, started


def measure(quick: bool) -> list[Figure]:
    """One run, whatever `quick` says."""
    for name in _VERL_MODULES:
        importlib.import_module(name)
    imports = [import_s() for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        metrics, events, started = train(Path(folder))
    steps = [metrics[step] for step in sorted(metrics) if "timing_s/step" in metrics[step]]
    return [prefix_reuse(steps), own_share(steps, events), start_up(imports, events, started)]


def prefix_reuse(steps: list[dict[str, float]]) -> Figure:
    """vLLM's prefix cache."""
    rates = [step["env/prefix_cache_hit_rate"] for step in steps]
    return compare(
        "prefix_cache_hit_rate",
        "prompt tokens of turns 2 and up that vLLM took from its prefix cache, against those it had seen",
        unit="share",
        ours=rates,
        baseline=[1.0] * len(rates),
        goal=">= 0.95",
    )


def own_share(steps: list[dict[str, float]], events: list[dict[str, Any]]) -> Figure:
    """Our own Python in a step."""
    cpu_s = [0.0] * len(steps)
    details: dict[str, float] = {}
    for name in sorted(_STEP_PARTS):
        calls = sorted((event for event in events if event["name"] == name), key=lambda event: event["started"])
        for i, event in enumerate(calls[: len(steps)]):
            cpu_s[i] += event["cpu_s"]
        if calls:
            details[f"{name}_cpu_s"] = statistics.median(event["cpu_s"] for event in calls)
    return compare(
        "own_python_share",
        "processor time of our own Python in a step of the CPU demo, against the step's wall time",
        unit="s",
        ours=cpu_s,
        baseline=[step["timing_s/step"] for step in steps],
        goal="< 0.03",
        details=details,
    )


def start_up(imports: list[float], events: list[dict[str, Any]], started: float) -> Figure:
    """What we add to verl's own start, and the whole way from command to first episode."""
    first: dict[str, dict[str, Any]] = {}
    for event in sorted(events, key=lambda event: event["started"]):
        first.setdefault(event["name"], event)
    parts = {what: first[name]["cpu_s"] for what, name in _START_PARTS.items() if name in first}
    added = [_PROCESSES_IN_A_ROW * seconds + sum(parts.values()) for seconds in imports]
    timeline = {
        "command_to_task_runner_s": first["AgentTaskRunnerBase.run"]["started"] - started,
        "build_trainer_s": first["AgentTaskRunnerBase.build_trainer"]["wall_s"],
        "init_workers_s": first["AgentRayPPOTrainer.init_workers"]["wall_s"],
        "command_to_first_episode_s": first["AsyncEnvClient.open"]["started"] - started,
    }
    return compare(
        "start_up_added",
        "processor time that we add to verl's own start (imports in three processes, checks, data, style, client), "
        "against the limit of 2 s",
        unit="s",
        ours=added,
        baseline=[2.0] * len(added),
        goal="< 1.0",
        details={
            "imports_per_process_s": statistics.median(imports),
            **{f"{what}_s": seconds for what, seconds in parts.items()},
            **timeline,
        },
    )


if __name__ == "__main__":
    assert (REPO / "tests" / "e2e").is_dir(), "needs the repository, not the installed package"
    run_script(measure, __doc__)
