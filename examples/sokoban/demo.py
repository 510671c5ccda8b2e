# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Train a tiny agent on Sokoban on the CPU, from nothing to a summary.

    python -m examples.sokoban.demo                  a few steps of PPO: does everything work here?
    python -m examples.sokoban.demo --algo grpo      the same with GRPO
    python -m examples.sokoban.demo --learn          enough steps to see it learn
    python -m examples.sokoban.demo --play FOLDER    play the held-out rooms with an exported policy

Owns the order of things (data, policy, service, the product's own entrypoint, export, summary), what is shown on the
way, and that nothing keeps running afterwards, Ctrl-C included. Hyperparameters are in `run_cpu.sh`, which it runs.
Refuses to know: how any of the parts works.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import requests

from examples.sokoban import curate_data, plots, processes
from examples.sokoban.validation import DECODINGS, MANAGER_CLASS, success_key, validation_rows
from examples.sokoban.warm_start import TOKENIZER_FOLDER, WarmStartConfig, warm_start

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = curate_data.CurationConfig(
    num_train=4000, num_test=100, dim=(7, 5), num_boxes=1, max_steps=8, min_solution=2, max_solution=6, seed=2027
)
_SERVICE_LINE = re.compile(r"serving .* at (http://\S+)")
_SERVICE_START_S = 60.0
_TRAINER_STOP_S = 60.0
_SERVICE_STOP_S = 20.0
_HEARTBEAT_S = 20.0


class DemoError(Exception):
    """A part of the demo failed; the text says which and where its log is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is trained."""

    demonstrations: int
    """Episodes that the policy imitates beforehand; fewer make a clumsier one, sooner."""

    steps: int
    """Updates of the policy."""

    episodes_per_step: int
    """Episodes played for each."""

    test_freq: int
    """Steps between validations; there is one before the first step and one after the last anyway."""


FAST = Plan(demonstrations=2400, steps=6, episodes_per_step=64, test_freq=100)
LEARN = {
    "ppo": Plan(demonstrations=4000, steps=20, episodes_per_step=128, test_freq=10),
    # A step is shorter without a critic, and says less: only groups whose episodes differ in return count.
    "grpo": Plan(demonstrations=4000, steps=50, episodes_per_step=128, test_freq=10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was asked for."""

    algorithm: str
    """`ppo` (GAE with critic) or `grpo`."""

    plan: Plan
    """How much is trained."""

    seed: int
    """Of the policy's making and of the training."""

    out_dir: Path
    """Everything is written under it."""

    noise_rewards: bool
    """Control: the environment pays noise."""

    exports: bool
    """Whether the trained policy is written as a Hugging Face folder."""

    overrides: tuple[str, ...]
    """Further Hydra keys for the entrypoint."""

    @property
    def run_dir(self) -> Path:
        """Logs and results of this run."""
        return self.out_dir / f"{self.algorithm}_seed{self.seed}{'_noise' if self.noise_rewards else ''}"


def prepare_data(folder: Path) -> str:
    """Curate the rooms, unless the folder already holds them.

    Returns:
        SHA-256 over the held-out rows.
    """
    record_path = folder / "data.json"
    wanted = json.loads(json.dumps(asdict(_ROOMS)))
    if record_path.exists():
        record = json.loads(record_path.read_text())
        if record["config"] == wanted:
            return record["test_hash"]
    # In this process: a pool would leave its resource tracker among the children that have to be gone at the end.
    rooms = curate_data.curate(_ROOMS, num_processes=1, show_progress=False)
    test_rows = curate_data.to_rows(rooms[: _ROOMS.num_test], _ROOMS)
    curate_data.write_parquet(curate_data.to_rows(rooms[_ROOMS.num_test :], _ROOMS), folder / "train.parquet")
    curate_data.write_parquet(test_rows, folder / "test.parquet")
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in validation_rows(test_rows)))
    record = {"config": wanted, "test_hash": curate_data.hash_rows(test_rows)}
    record_path.write_text(json.dumps(record, indent=2) + "\n")
    return record["test_hash"]


def start_service(log_path: Path, noise_rewards: bool) -> tuple[subprocess.Popen, str]:
    """Start the Sokoban service on a free port of this machine.

    Returns:
        process: To be stopped.
        url: Where it listens.

    Raises:
        DemoError: It did not come up.
    """
    name = "noise_env:NoiseSokobanEnv" if noise_rewards else "sokoban_env:SokobanEnv"
    command = [sys.executable, "-m", "recipe.agent_env.env_service", f"examples.sokoban.{name}"]
    process = processes.start([*command, "--name", curate_data.ENV_NAME, "--port", "0"], log_path)
    for _ in processes.wait_until(_SERVICE_START_S):
        found = _SERVICE_LINE.search(log_path.read_text())
        if found:
            return process, found[1]
        if process.poll() is not None:
            break
    raise DemoError(f"the Sokoban service did not start; its log: {log_path}")


def live_sessions(url: str) -> int:
    """Environments that are open at the service."""
    return requests.get(f"{url}/stats", timeout=10).json()["live_sessions"]


def trainer_command(options: Options, *extra: str) -> list[str]:
    """The command line that trains, without what `trainer_environment` holds."""
    return [
        "bash",
        str(_ROOT / "examples/sokoban/run_cpu.sh"),
        f"data.val_files={options.out_dir}/data/validation.jsonl",
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER_CLASS}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"hydra.run.dir={options.run_dir}/hydra",
        *extra,
        *options.overrides,
    ]


def trainer_environment(options: Options, url: str, model: Path, metrics_path: Path) -> dict[str, str]:
    """The variables of `run_cpu.sh`."""
    return {
        "PYTHON": sys.executable,
        "ALGO": options.algorithm,
        "SEED": str(options.seed),
        "STEPS": str(options.plan.steps),
        "EPISODES_PER_STEP": str(options.plan.episodes_per_step),
        "TEST_FREQ": str(options.plan.test_freq),
        "MAX_STEPS": str(_ROOMS.max_steps),
        "ENDPOINT": url,
        "DATA_DIR": str(options.out_dir / "data"),
        "MODEL": str(model),
        "RUN_DIR": str(options.run_dir),
        "VERL_FILE_LOGGER_PATH": str(metrics_path),
    }


class Progress:
    """Prints each step of a run as its metric log grows, and a sign of life while nothing happens."""

    def __init__(self, metrics_path: Path, num_steps: int):
        self._path = metrics_path
        self._num_steps = num_steps
        self._num_shown = 0
        self._started = self._last_shown = time.monotonic()

    def show(self) -> None:
        """Print what is new."""
        now = time.monotonic()
        fresh = plots.read_metrics(self._path)[self._num_shown :]
        for step, data in fresh:
            self._num_shown += 1
            self._last_shown = now
            print(f"  {self._line(step, data)}", flush=True)
        if not fresh and now - self._last_shown > _HEARTBEAT_S:
            self._last_shown = now
            what = "starting Ray and vLLM" if self._num_shown == 0 else "working"
            print(f"  ... {what}, {now - self._started:.0f} s", flush=True)

    def _line(self, step: int, data: dict[str, Any]) -> str:
        parts = []
        if "env/success_rate" in data:
            parts.append(
                f"solved {data['env/success_rate']:4.0%}, return {data['env/episode_return/mean']:6.2f}, "
                f"{data['timing_s/step']:.1f} s"
            )
        rates = [
            f"{decoding} {data[success_key(decoding)]:.0%}" for decoding in DECODINGS if success_key(decoding) in data
        ]
        if rates:
            parts.append(f"held-out rooms solved: {', '.join(rates)}")
        return f"step {step:3d}/{self._num_steps}: {'; '.join(parts)}"


def run_trainer(options: Options, url: str, model: Path, *extra: str, name: str = "train") -> list[tuple[int, dict]]:
    """Run the product's entrypoint to its end.

    Args:
        options: What was asked for.
        url: Of the service.
        model: Folder of the policy to start from.
        extra: Further Hydra keys.
        name: Of the log files.

    Returns:
        The metric log.

    Raises:
        DemoError: It failed.
    """
    metrics_path, log_path = options.run_dir / f"{name}.jsonl", options.run_dir / f"{name}.log"
    metrics_path.unlink(missing_ok=True)
    variables = trainer_environment(options, url, model, metrics_path)
    process = processes.start(trainer_command(options, *extra), log_path, env={**os.environ, **variables})
    progress = Progress(metrics_path, options.plan.steps)
    try:
        while process.poll() is None:
            progress.show()
            time.sleep(0.5)
        progress.show()
    finally:
        with processes.signals_held():
            if process.poll() is None:
                print("stopping the training ...", flush=True)
            processes.stop(process, _TRAINER_STOP_S)
    if process.returncode != 0:
        raise DemoError(f"the training ended with exit status {process.returncode}; its log: {log_path}")
    return plots.read_metrics(metrics_path)


def export(options: Options, model: Path) -> Path:
    """Write the trained policy as a Hugging Face folder, by verl's own model merger.

    Args:
        options: What was asked for.
        model: Folder of the policy that was started from; its tokenizer is passed on, and lies apart there too.

    Raises:
        DemoError: It failed.
    """
    checkpoint = options.run_dir / "checkpoints" / f"global_step_{options.plan.steps}" / "actor"
    folder = options.run_dir / "policy"
    log_path = options.run_dir / "export.log"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    process = processes.start(
        [*command, "--local_dir", str(checkpoint), "--target_dir", str(folder)],
        log_path,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
    )
    if process.wait() != 0:
        raise DemoError(f"the export failed; its log: {log_path}")
    for path in (*folder.glob("tokenizer*.json"), *folder.glob("chat_template*")):
        path.unlink()
    shutil.copytree(model / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
    return folder


def summarise(options: Options, metrics: list[tuple[int, dict]], model_record: dict[str, Any]) -> dict[str, Any]:
    """What `summary.json` says of the training; rates are shares of the held-out rooms."""
    summary: dict[str, Any] = {}
    for decoding, name in zip(DECODINGS, ("success", "greedy"), strict=True):
        _, rates = plots.series(metrics, success_key(decoding))
        summary |= {
            f"{name}_before": rates[0],
            f"{name}_after": rates[-1],
            "gain_points" if name == "success" else "greedy_gain_points": round(100 * (rates[-1] - rates[0]), 1),
        }
    return {
        **summary,
        "algorithm": options.algorithm,
        "seed": options.seed,
        "steps": max(step for step, _ in metrics),
        "episodes": options.plan.episodes_per_step * max(step for step, _ in metrics),
        "noise_rewards": options.noise_rewards,
        "policy_parameters": model_record["num_parameters"],
        "policy_was_cached": model_record["was_cached"],
        "policy_seconds": 0.0 if model_record["was_cached"] else model_record["seconds"],
        "versions": {name: metadata.version(name) for name in ("verl", "vllm", "torch", "transformers", "ray")},
        "command": " ".join(["python", "-m", "examples.sokoban.demo", *sys.argv[1:]]),
    }


def play(options: Options, folder: Path) -> None:
    """Play the held-out rooms with a policy and print its success."""
    prepare_data(options.out_dir / "data")
    service, url = start_service(options.run_dir / "service.log", noise_rewards=False)
    try:
        metrics = run_trainer(options, url, folder.resolve(), "trainer.val_only=True", name="play")
    finally:
        stop_service(service, url)
    rates = {decoding: metrics[0][1][success_key(decoding)] for decoding in DECODINGS}
    (options.run_dir / "play.json").write_text(json.dumps({"policy": str(folder), **rates}, indent=2) + "\n")


def stop_service(service: subprocess.Popen, url: str) -> None:
    """Stop the service and say how many environments were still open."""
    with processes.signals_held():
        try:
            num_live = live_sessions(url)
            print(f"environments still open at the service: {num_live}", flush=True)
        except requests.RequestException as error:
            print(f"the service did not answer before it was stopped: {error}", flush=True)
        processes.stop(service, _SERVICE_STOP_S)


def train(options: Options, memory: processes.MemoryWatch) -> None:
    """The whole demo."""
    started = time.monotonic()
    print(f"[1/4] rooms: {_ROOMS.num_train} to train on, {_ROOMS.num_test} held out", flush=True)
    test_hash = prepare_data(options.out_dir / "data")
    print("[2/4] policy: a tiny model that imitates a clumsy solver", flush=True)
    model = options.out_dir / f"warm_start_seed{options.seed}"
    shown = WarmStartConfig(seed=options.seed, num_episodes=options.plan.demonstrations)
    model_record = warm_start(model, options.out_dir / "data/train.parquet", shown)
    print(f"  {model_record['num_parameters'] / 1e6:.1f} M parameters", "(cached)" * model_record["was_cached"])
    print(
        f"[3/4] {options.algorithm.upper()}: {options.plan.steps} steps; log: {options.run_dir}/train.log", flush=True
    )
    service, url = start_service(options.run_dir / "service.log", options.noise_rewards)
    extra = [f"trainer.save_freq={options.plan.steps}"] if options.exports else []
    try:
        metrics = run_trainer(options, url, model, *extra)
    finally:
        stop_service(service, url)
    print("[4/4] summary", flush=True)
    summary = summarise(options, metrics, model_record)
    if options.exports:
        summary["policy"] = str(export(options, model))
    plot_path = options.run_dir / "curve.png"
    title = f"{options.algorithm.upper()}, seed {options.seed}{', rewards are noise' if options.noise_rewards else ''}"
    plots.plot_run(metrics, plot_path, title)
    summary |= {
        "data_hash": test_hash,
        "peak_memory_gb": round(memory.peak_gb, 2),
        "minutes": round((time.monotonic() - started) / 60, 2),
    }
    text = json.dumps(summary, indent=2) + "\n"
    for path in (options.run_dir / "summary.json", options.out_dir / "summary.json"):
        path.write_text(text)
    print(
        f"  held-out rooms solved: sampled {summary['success_before']:.0%} -> {summary['success_after']:.0%}, "
        f"greedy {summary['greedy_before']:.0%} -> {summary['greedy_after']:.0%}\n"
        f"  {summary['minutes']:.1f} minutes, peak memory {summary['peak_memory_gb']:.1f} GB\n"
        f"  summary: {options.out_dir / 'summary.json'}\n  plot: {plot_path}\n  logs: {options.run_dir}",
        flush=True,
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.sokoban.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--algo", choices=list(LEARN), default="ppo", help="ppo is GAE with a critic")
    parser.add_argument("--learn", action="store_true", help="train long enough to see it learn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out-dir", type=Path, help="default: outputs/demo, with --learn outputs/demo_learn")
    parser.add_argument("--steps", type=int, help="training steps, instead of the mode's own number")
    parser.add_argument("--noise-rewards", action="store_true", help="control: the environment pays noise")
    parser.add_argument("--play", type=Path, metavar="FOLDER", help="only play the held-out rooms with this policy")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further Hydra keys for the entrypoint")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the demo.

    Returns:
        Exit status: 0, 1 when a part failed, 130 when it was interrupted.
    """
    args = build_parser().parse_args(arguments)
    plan = LEARN[args.algo] if args.learn else FAST
    if args.steps is not None:
        plan = replace(plan, steps=args.steps)
    out_dir = args.out_dir or _ROOT / "outputs" / ("demo_learn" if args.learn else "demo")
    options = Options(
        algorithm=args.algo,
        plan=plan,
        seed=args.seed,
        out_dir=out_dir.resolve(),
        noise_rewards=args.noise_rewards,
        exports=args.learn,
        overrides=tuple(args.overrides),
    )
    options.run_dir.mkdir(parents=True, exist_ok=True)
    processes.adopt_orphans()
    status = 0
    try:
        with processes.sigterm_interrupts(), processes.MemoryWatch() as memory:
            if args.play is not None:
                play(options, args.play)
            else:
                train(options, memory)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    finally:
        with processes.signals_held():
            for command in processes.end_descendants(grace_s=20.0):
                print(f"had to be killed: {command}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
