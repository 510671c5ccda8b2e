# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How a run ends when its episodes fail: with its own error, a checkpoint, and nothing left open."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.agent_env.agent_ray_trainer import AgentRayPPOTrainer
from recipe.agent_env.config_checks import register_resolvers
from recipe.agent_env.rollout.agent_loop import TooManyFailedEpisodesError
from recipe.agent_env.rollout.episode import EngineLostError


@pytest.fixture
def trainer(monkeypatch):
    """A trainer whose loop fails in its fourth step, and which notes what it saves and closes."""
    made = AgentRayPPOTrainer.__new__(AgentRayPPOTrainer)
    made.events = []
    made.global_steps = 4
    made.config = OmegaConf.create({"trainer": {"default_local_dir": "checkpoints"}})
    made._is_validating, made._saved_step = False, 0
    made.train_dataloader = SimpleNamespace(give_back_batch=lambda: None)
    made.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    made.async_rollout_manager = SimpleNamespace(close=lambda: made.events.append("closed"))
    monkeypatch.setattr(
        AgentRayPPOTrainer, "_save_checkpoint", lambda self: self.events.append(f"saved {self.global_steps}")
    )

    def fail_with(error: Exception) -> AgentRayPPOTrainer:
        def fit(self):
            raise error

        monkeypatch.setattr(RayPPOTrainer, "fit", fit)
        return made

    return fail_with


def test_outage_saves_the_last_finished_step_and_ends_the_run(trainer):
    """P68, P74: past `env.max_failed_fraction` nothing more is played; the error names the service."""
    failing = trainer(TooManyFailedEpisodesError("3 of 4 episodes failed; the last one: step at http://service"))
    with pytest.raises(TooManyFailedEpisodesError, match="http://service"):
        failing.fit()
    assert failing.events == ["saved 3", "closed"]


def test_outage_in_the_first_step_has_nothing_to_save(trainer):
    failing = trainer(TooManyFailedEpisodesError("all failed"))
    failing.global_steps = 1
    with pytest.raises(TooManyFailedEpisodesError):
        failing.fit()
    assert failing.events == ["closed"]


def test_lost_engine_ends_the_run_with_its_own_error_and_closes_environments(trainer):
    failing = trainer(EngineLostError("an inference engine is gone"))
    with pytest.raises(EngineLostError, match="an inference engine is gone"):
        failing.fit()
    assert failing.events == ["closed"]


def test_runs_on_one_ray_cluster_do_not_share_names():
    """P89: actors are named per run, since each run is in the namespace that Ray makes up where none is given."""
    register_resolvers()
    with initialize_config_module("recipe.agent_env.config", version_base=None):
        for overrides in ([], ["+platform=cpu"]):
            config = compose("agent_ppo_trainer", overrides=overrides)
            assert "namespace" not in config.ray_kwargs.ray_init
