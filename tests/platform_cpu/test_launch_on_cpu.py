# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The overlay and what the entrypoint does with it, up to the point where Ray would start."""

import os
from importlib import metadata
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from recipe.agent_env.config_checks import register_resolvers
from recipe.agent_env.platform_cpu import launch

CONFIG_FOLDER = Path(launch.__file__).resolve().parents[1] / "config"


def compose(*overrides: str):
    """Compose verl's own config, with our config folder on the search path."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        search = f"hydra.searchpath=[file://{CONFIG_FOLDER}]"
        return hydra.compose("ppo_trainer", overrides=[search, *overrides])


@pytest.fixture(scope="module")
def cpu_config():
    return compose("+platform=cpu", "actor_rollout_ref.model.path=m", "critic.model.path=m")


@pytest.fixture
def environ(monkeypatch):
    """A copy of the process's environment that the test may change."""
    copy = dict(os.environ)
    monkeypatch.setattr(os, "environ", copy)
    return copy


def test_overlay_reaches_actor_reference_critic_and_engine(cpu_config):
    ref = cpu_config.actor_rollout_ref
    for engine in (ref.actor.fsdp_config, ref.ref.fsdp_config, cpu_config.critic.fsdp):
        assert engine.strategy == "fsdp2"
        assert engine.mixed_precision == {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert ref.actor.strategy == ref.ref.strategy == cpu_config.critic.strategy == "fsdp2"
    assert ref.model.override_config.attn_implementation == "sdpa"
    assert cpu_config.critic.model.override_config.attn_implementation == "sdpa"
    assert ref.rollout.dtype == "float32" and not ref.rollout.enable_sleep_mode


def test_command_line_wins_over_the_overlay():
    config = compose("+platform=cpu", "actor_rollout_ref.rollout.custom.weight_sync_timeout_s=7", "trainer.nnodes=2")
    assert config.actor_rollout_ref.rollout.custom.weight_sync_timeout_s == 7 and config.trainer.nnodes == 2


def test_overlay_composes_with_the_recipes_own_config():
    register_resolvers()
    with hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
        config = hydra.compose("agent_ppo_trainer", overrides=["+platform=cpu"])
    assert launch.is_cpu_run(config) and config.ray_kwargs.ray_init.num_gpus == 1


def test_a_gpu_run_is_left_alone(environ):
    config = compose()
    before = dict(environ)
    launch.prepare_process(config)
    launch.start_ray(config)
    mapping = {"role": object}
    launch.replace_workers(mapping, config)
    assert environ == before and mapping == {"role": object}


def test_prepare_process_sets_the_environment(cpu_config, environ):
    launch.prepare_process(cpu_config)
    assert environ["VERL_PLATFORM"] == "cpu" and environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert all(isinstance(value, str) for value in environ.values())


def test_device_cpu_without_the_overlay_is_refused(environ):
    with pytest.raises(ValueError, match=r"trainer.device=cpu, but .*add \+platform=cpu"):
        launch.prepare_process(compose("trainer.device=cpu"))


@pytest.mark.parametrize("version, text", [("0.30.0", "is 0.30.0"), (None, "is missing")], ids=["cuda build", "none"])
def test_a_vllm_that_is_not_the_cpu_build_is_refused(cpu_config, environ, monkeypatch, version, text):
    def find(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", find)
    with pytest.raises(RuntimeError, match=f"{text}.*vllm_metadata"):
        launch.prepare_process(cpu_config)


def test_workers_take_the_places_of_verls(cpu_config):
    from verl.trainer.ppo.utils import Role

    mapping = dict.fromkeys([Role.ActorRolloutRef, Role.Critic])
    launch.replace_workers(mapping, cpu_config)
    names = {role: worker.__ray_metadata__.class_name for role, worker in mapping.items()}
    assert names == {Role.ActorRolloutRef: "CPUActorRolloutRefWorker", Role.Critic: "CPUTrainingWorker"}


def test_every_key_of_the_overlay_has_a_comment_above():
    lines = (CONFIG_FOLDER / "platform" / "cpu.yaml").read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if ":" in line and not line.strip().startswith("#")]
    sections = {"actor_rollout_ref", "critic", "reward", "trainer", "ray_kwargs"}
    nested = {"model", "actor", "ref", "rollout", "critic", "fsdp_config", "fsdp", "agent", "engine_kwargs", "vllm"}
    bare = [lines[i].strip(" :") for i in keys if not lines[i - 1].strip().startswith("#")]
    assert set(bare) <= sections | nested | {"ray_init", "runtime_env"}
    assert OmegaConf.load(CONFIG_FOLDER / "platform" / "cpu.yaml")
