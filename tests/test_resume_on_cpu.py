# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Stop and resume: the trainer's own saving and loading with verl's loader and files, over workers that only listen."""

import asyncio
import functools
import json
import logging
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from recipe.agent_env import main_agent_ppo, progress_display
from recipe.agent_env.agent_dataset import AgentDataset
from recipe.agent_env.agent_ray_trainer import AgentRayPPOTrainer, RayPPOTrainer
from recipe.agent_env.config_checks import finish_config
from recipe.agent_env.rollout.agent_loop import EnvAgentLoopWorker, RunStoppedError, TooManyFailedEpisodesError
from recipe.agent_env.rollout.progress import RolloutProgress
from recipe.agent_env.run_state import RunState
from tests.test_config_on_cpu import composed

BATCH_SIZE, BATCHES_PER_EPOCH = 2, 7
SHUFFLED = {"data__shuffle": True, "data__seed": 5}


class Workers:
    """Worker groups and rollout manager in one: they listen and remember."""

    def __init__(self):
        self.calls: list[str] = []
        self.services: set[str] = set()
        self.known_services: frozenset[str] = frozenset()

    def save_checkpoint(self, path, *args, **kwargs):
        self.calls.append(f"save {os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}")

    def load_checkpoint(self, path, **kwargs):
        self.calls.append(f"load {os.path.basename(os.path.dirname(path))}/{os.path.basename(path)}")

    def sleep_replicas(self):
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def rows(tmp_path):
    """Fifteen rows: seven batches of two, and one row that every epoch leaves out."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"env_name": "g", "seed": i, "env_kwargs": {}}) + "\n" for i in range(15)))
    return str(path)


@functools.cache
def base_config():
    """Composed once: it is most of what these tests cost."""
    sizes = [f"data.train_batch_size={BATCH_SIZE}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    kl = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "critic.ppo_mini_batch_size=2"]
    return finish_config(composed("trainer.logger=console", *sizes, *kl))


def make_trainer(folder, rows, **changes) -> AgentRayPPOTrainer:
    """A trainer with verl's own loader; what `init_workers` would start is a listener.

    Args:
        folder: For checkpoints.
        rows: Data file.
        **changes: Config keys, with `__` for a dot.
    """
    trainer = object.__new__(AgentRayPPOTrainer)
    config = base_config().copy()
    for key, value in {"trainer__default_local_dir": str(folder), **changes}.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    dataset = AgentDataset(rows)
    trainer.config, trainer.use_critic, trainer.tokenizer, trainer.processor = config, True, None, None
    trainer._is_validating, trainer._saved_step, trainer.global_steps = False, 0, 0
    trainer._create_dataloader(dataset, dataset, collate_fn, create_rl_sampler(config.data, dataset))
    trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
    workers = Workers()
    trainer.actor_rollout_wg = trainer.critic_wg = trainer.async_rollout_manager = workers
    trainer.checkpoint_manager = workers
    return trainer


def steps(trainer):
    """The order of events in verl's `fit`: the step is counted up after each batch; yields the batch's (row, seed)."""
    for _ in range(trainer.global_steps // len(trainer.train_dataloader), 3):
        for batch in trainer.train_dataloader:
            trainer.global_steps += 1
            yield list(zip(batch["index"].tolist(), batch["seed"].tolist(), strict=True))


def play(trainer, num_steps: int) -> list[tuple[int, int]]:
    """The next (row, seed) pairs."""
    going = steps(trainer)
    return [pair for _ in range(num_steps) for pair in next(going)]


@pytest.mark.parametrize("num_workers", [0, 2], ids=["no-loader-worker", "two-loader-workers"])
@pytest.mark.parametrize("order", [SHUFFLED, {"data__shuffle": False}], ids=["shuffle", "file"])
@pytest.mark.parametrize("stop_after", [3, 7, 10, 14], ids=lambda step: f"after-{step}")
def test_resumed_run_plays_the_rows_of_an_unbroken_one(tmp_path, rows, stop_after, order, num_workers):
    """P96: 7 batches an epoch; stopped in the first, at its end, in the second, at its end."""
    changes = {**order, "data__dataloader_num_workers": num_workers}
    unbroken = play(make_trainer(tmp_path, rows, **changes), stop_after + 5)
    first = make_trainer(tmp_path, rows, **changes)
    assert play(first, stop_after) == unbroken[: stop_after * BATCH_SIZE]
    first._save_checkpoint()
    second = make_trainer(tmp_path, rows, **changes)
    second._load_checkpoint()
    assert second.global_steps == stop_after
    assert play(second, 5) == unbroken[stop_after * BATCH_SIZE :]


def test_verl_alone_starts_the_first_order_again_after_an_epoch(tmp_path, rows, monkeypatch):
    """Without `_load_checkpoint` here; when this fails, verl has mended it."""
    first = make_trainer(tmp_path, rows, **SHUFFLED)
    epoch = play(first, BATCHES_PER_EPOCH)
    first._save_checkpoint()
    second = make_trainer(tmp_path, rows, **SHUFFLED)
    RayPPOTrainer._load_checkpoint(second)
    assert play(second, BATCHES_PER_EPOCH) == epoch


@pytest.mark.parametrize("broken_step", [4, 8], ids=["in-epoch", "first-of-epoch"])
def test_step_that_broke_off_is_played_again(tmp_path, rows, broken_step, caplog):
    """Its batch had left the loader, but nothing was learned from it."""
    unbroken = play(make_trainer(tmp_path, rows), broken_step + 3)
    first = make_trainer(tmp_path, rows)
    play(first, broken_step)
    first._save_finished_steps()
    assert first.async_rollout_manager.calls[0] == "sleep"
    second = make_trainer(tmp_path, rows)
    second._load_checkpoint()
    assert second.global_steps == broken_step - 1
    assert play(second, 4) == unbroken[(broken_step - 1) * BATCH_SIZE :]


def test_validation_that_broke_off_comes_after_a_finished_step(tmp_path, rows, monkeypatch):
    trainer = make_trainer(tmp_path, rows)
    play(trainer, 2)

    def break_off(self, merged=False):
        raise TooManyFailedEpisodesError

    monkeypatch.setattr(RayPPOTrainer, "_validate", break_off)
    with pytest.raises(TooManyFailedEpisodesError):
        trainer._validate()
    trainer._save_finished_steps()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_step_that_is_saved_already_is_not_saved_again(tmp_path, rows, caplog):
    trainer = make_trainer(tmp_path, rows)
    play(trainer, 2)
    trainer._save_checkpoint()
    next(steps(trainer))
    calls = len(trainer.async_rollout_manager.calls)
    trainer._save_finished_steps()
    assert len(trainer.async_rollout_manager.calls) == calls
    assert "none is saved" in caplog.text


def test_counters_actor_critic_and_kl_controller_come_back(tmp_path, rows):
    first = make_trainer(tmp_path, rows)
    play(first, 3)
    start = first.kl_ctrl_in_reward.value
    first.kl_ctrl_in_reward.update(current_kl=9.0, n_steps=500)
    first._save_checkpoint()
    second = make_trainer(tmp_path, rows)
    second._load_checkpoint()
    assert second.global_steps == 3
    assert second.async_rollout_manager.calls == ["load global_step_3/actor", "load global_step_3/critic"]
    assert second.kl_ctrl_in_reward.value == first.kl_ctrl_in_reward.value != start


def test_fixed_kl_coefficient_is_the_configs(tmp_path, rows):
    first = make_trainer(tmp_path, rows, algorithm__kl_ctrl__type="fixed", algorithm__kl_ctrl__kl_coef=0.1)
    play(first, 1)
    first._save_checkpoint()
    second = make_trainer(tmp_path, rows, algorithm__kl_ctrl__type="fixed", algorithm__kl_ctrl__kl_coef=0.2)
    second._load_checkpoint()
    assert second.kl_ctrl_in_reward.value == 0.2


def test_checkpoint_remembers_the_services(tmp_path, rows):
    """P95: also when a checkpoint is named instead of found."""
    first = make_trainer(tmp_path, rows)
    play(first, 1)
    first.async_rollout_manager.services = {"sokoban 2.0", "chess 1.0"}
    first._save_checkpoint()
    named = {"trainer__resume_from_path": f"{tmp_path}/global_step_1", "trainer__resume_mode": "resume_path"}
    second = make_trainer(tmp_path / "elsewhere", rows, **named)
    second._load_checkpoint()
    assert second.async_rollout_manager.known_services == {"chess 1.0", "sokoban 2.0"}


def test_checkpoint_of_plain_verl_is_taken_with_a_warning(tmp_path, rows, caplog):
    first = make_trainer(tmp_path, rows)
    play(first, 1)
    first._save_checkpoint()
    (tmp_path / "global_step_1" / "agent_env.json").unlink()
    second = make_trainer(tmp_path, rows)
    with caplog.at_level(logging.WARNING):
        second._load_checkpoint()
    assert second.global_steps == 1 and "KL controller starts anew" in caplog.text
    assert RunState.read(tmp_path / "global_step_1") is None


@pytest.mark.parametrize(("save_freq", "saved"), [(5, True), (-1, False)])
def test_stopped_run_saves_where_it_keeps_checkpoints(tmp_path, rows, monkeypatch, save_freq, saved):
    trainer = make_trainer(tmp_path, rows, trainer__save_freq=save_freq)

    def fit(self):
        play(self, 3)
        raise RunStoppedError("the run was told to stop")

    monkeypatch.setattr(RayPPOTrainer, "fit", fit)
    with pytest.raises(RunStoppedError, match="told to stop"):
        trainer.fit()
    assert (tmp_path / "global_step_2" / "data.pt").exists() is saved
    assert trainer.async_rollout_manager.calls[-1] == "close"


async def test_stopped_worker_breaks_off_and_plays_no_more(monkeypatch):
    started, broken_off = asyncio.Event(), asyncio.Event()

    async def play_for_ever(self, batch):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            broken_off.set()

    monkeypatch.setattr(AgentLoopWorker, "generate_sequences", play_for_ever)
    worker = object.__new__(EnvAgentLoopWorker)
    closed: list[bool] = []

    async def aclose():
        closed.append(broken_off.is_set())

    worker.config = OmegaConf.create({"env": {"batch_timeout_s": None}})
    worker._progress = RolloutProgress()
    worker._client, worker._playing, worker._is_stopped = SimpleNamespace(aclose=aclose), set(), False
    playing = asyncio.ensure_future(worker.generate_sequences([]))
    await started.wait()
    await worker.stop()
    with pytest.raises(RunStoppedError, match="broken off"):
        await playing
    with pytest.raises(RunStoppedError):
        await worker.generate_sequences([])
    assert broken_off.is_set() and closed


class FakeActor:
    """A Ray actor class and actor that notes what is called."""

    def __init__(self):
        self.asked = threading.Event()
        self.stop = SimpleNamespace(remote=self.asked.set)

    def options(self, **options):
        return self

    def remote(self):
        return self


@pytest.fixture
def sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_asks_the_workers_to_stop_and_waits_once(sigterm, monkeypatch):
    """P71. Ray puts its own handler in the place of ours when it starts, which is before the task runner is made."""
    actor = FakeActor()
    monkeypatch.setattr(progress_display, "agent_workers", lambda: [actor])
    assert main_agent_ppo._StoppedBySigterm(actor).options(name="x").remote() is actor
    os.kill(os.getpid(), signal.SIGTERM)
    assert actor.asked.wait(timeout=30)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_before_any_worker_ends_the_run_at_once(monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(progress_display, "agent_workers", lambda: [])
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    main_agent_ppo._stop_agent_workers()
    assert sent == [signal.SIGINT]
