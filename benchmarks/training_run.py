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
    "data set": "AgentDataset.__init__",
    "prompt style": "EpisodeTokenizer.from_config",
    "client": "AsyncEnvClient.__init__",
}
_VERL_MODULES = ("verl.trainer.main_ppo_v0", "verl.experimental.agent_loop.agent_loop", "verl.utils.dataset.rl_dataset")
_OUR_MODULES = ("recipe.agent_env.main_agent_ppo", "recipe.agent_env.agent_task_runner")
_PROCESSES_IN_A_ROW = 3
"""Entrypoint, task runner and agent worker: each imports our modules, one after the other."""


def _start_in_child(pipe: Any, overrides: list[str]) -> None:
    started = time.process_time()
    for name in _OUR_MODULES:
        importlib.import_module(name)
    import_s = time.process_time() - started

    from hydra import compose, initialize_config_module

    from recipe.agent_env.config_checks import finish_config

    with initialize_config_module("recipe.agent_env.config", version_base=None):
        config = compose("agent_ppo_trainer", overrides=["+platform=cpu", *overrides])
    started = time.process_time()
    finish_config(config)
    pipe.send((import_s, time.process_time() - started))


def start_costs(overrides: list[str]) -> tuple[float, float]:
    """What a process that has verl's modules pays for ours, in seconds of processor time.

    Returns:
        import_s: Importing our modules.
        checks_s: Finishing and checking the config of the run.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_start_in_child, args=(there, overrides))
    child.start()
    import_s, checks_s = here.recv()
    child.join()
    return import_s, checks_s


def train(folder: Path, overrides: list[str]) -> tuple[dict[int, dict[str, float]], list[dict[str, Any]], float]:
    """Train for a few steps.

    Returns:
        metrics: Of each step, as logged.
        events: What `own_time` wrote.
        started: When the command was given, seconds since 1970.
    """
    from tests.e2e.runs import run

    record = folder / "own_time.jsonl"
    plugins = "recipe.agent_env.platform_cpu,benchmarks.own_time"
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    started = time.time()
    done = run(
        folder / "run",
        *overrides,
        f"{variables}.VERL_USE_EXTERNAL_MODULES='{plugins}'",
        f"+{variables}.OWN_TIME_RECORD={record}",
        limit_s=1500.0,
    )
    return done.metrics, [json.loads(line) for line in record.read_text().splitlines()], started


def make_material(folder: Path) -> Any:
    """Rooms, and a policy that writes calls."""
    from examples.sokoban.curate_data import main as curate
    from tests.e2e.conftest import Material
    from tests.e2e.talking_policy import make_talking_policy

    curate(["--out-dir", str(folder), "--num-train", "64", "--num-test", "4", "--dim", "6", "6", "--quiet"])
    make_talking_policy(folder / "model")
    return Material(model=folder / "model", train_file=folder / "train.parquet", test_file=folder / "test.parquet")


def measure(quick: bool) -> list[Figure]:
    """One run, whatever `quick` says."""
    from tests.e2e.runs import sokoban_service

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material = make_material(folder)
        with sokoban_service(folder) as service:
            overrides = [
                *material.overrides(service.url),
                "algorithm.adv_estimator=gae",
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                f"trainer.total_training_steps={_NUM_STEPS}",
                "trainer.test_freq=-1",
            ]
            metrics, events, started = train(folder, overrides)
        for module in _VERL_MODULES:
            importlib.import_module(module)
        costs = [start_costs(overrides) for _ in range(5)]
    steps = [metrics[step] for step in sorted(metrics) if "timing_s/step" in metrics[step]]
    return [prefix_reuse(steps), own_share(steps, events), start_up(costs, events, started)]


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


def start_up(costs: list[tuple[float, float]], events: list[dict[str, Any]], started: float) -> Figure:
    """What we add to verl's own start, and the whole way from command to first episode."""
    first: dict[str, dict[str, Any]] = {}
    for event in sorted(events, key=lambda event: event["started"]):
        first.setdefault(event["name"], event)
    parts = {what: first[name]["cpu_s"] for what, name in _START_PARTS.items() if name in first}
    added = [_PROCESSES_IN_A_ROW * import_s + checks_s + sum(parts.values()) for import_s, checks_s in costs]
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
            "imports_per_process_s": statistics.median(import_s for import_s, _ in costs),
            "config checks_s": statistics.median(checks_s for _, checks_s in costs),
            **{f"{what}_s": seconds for what, seconds in parts.items()},
            **timeline,
        },
    )


if __name__ == "__main__":
    assert (REPO / "tests" / "e2e").is_dir(), "needs the repository, not the installed package"
    run_script(measure, __doc__)
