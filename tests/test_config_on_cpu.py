# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The config: the reference command line is accepted as it is, and what cannot work fails before Ray starts."""

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module

from recipe.agent_env.config_checks import ConfigError, finish_config, register_resolvers

# The command line that users of this protocol have in their scripts, paths aside.
REFERENCE = """
algorithm.adv_estimator=gae env.environment_endpoint=http://localhost:8000 env.max_turn=10
data.agent_prompt_style=qwen2_5 data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=256
data.max_prompt_length=15360 data.max_response_length=128 data.truncation='error'
actor_rollout_ref.model.path=model actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.rollout.max_num_batched_tokens=16384 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=model
critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','mlflow']
trainer.project_name=project trainer.experiment_name=experiment trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=-1 trainer.test_freq=1 trainer.total_epochs=15
""".split()


FILTERED = "algorithm.filter_groups.enable=True algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"


def composed(*overrides):
    register_resolvers()
    with initialize_config_module("recipe.agent_env.config", version_base=None):
        return compose("agent_ppo_trainer", overrides=[*REFERENCE, *overrides])


@pytest.fixture(autouse=True)
def with_mlflow(monkeypatch):
    """The reference names mlflow, which is an extra; these tests are about the other keys."""
    from recipe.agent_env import config_checks

    monkeypatch.setitem(config_checks._TRACKER_MODULES, "mlflow", "json")


def test_reference_command_line_keeps_the_meaning_of_its_lengths():
    config = finish_config(composed())
    rollout = config.actor_rollout_ref.rollout
    assert (config.data.max_prompt_length, config.data.max_response_length, config.env.max_turn) == (15360, 128, 10)
    assert rollout.max_model_len == 15488
    assert (rollout.prompt_length, rollout.response_length) == (15360, 128)
    assert rollout.max_num_batched_tokens == 16384


def test_reference_command_line_passes_verls_own_validation(tmp_path):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from examples.tiny_model import save_tiny_model

    save_tiny_model(tmp_path / "model")
    path = str(tmp_path / "model")
    config = finish_config(composed(f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}"))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


def test_old_critic_name_is_mapped_and_gone(caplog):
    caplog.set_level("WARNING", logger="recipe.agent_env")
    config = finish_config(composed("critic.model.fsdp_config.param_offload=True"))
    assert config.critic.fsdp.param_offload is True
    assert config.critic.fsdp.optimizer_offload is False
    assert "fsdp_config" not in config.critic.model
    assert "critic.fsdp.param_offload" in caplog.text


def test_new_critic_name_works_alone():
    overrides = [o for o in REFERENCE if not o.startswith("critic.model.fsdp_config")]
    register_resolvers()
    with initialize_config_module("recipe.agent_env.config", version_base=None):
        config = finish_config(compose("agent_ppo_trainer", overrides=[*overrides, "critic.fsdp.param_offload=True"]))
    assert config.critic.fsdp.param_offload is True


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("critic.fsdp.param_offload=True", "critic.model.fsdp_config.param_offload=False and critic.fsdp"),
        ("trainer.logger=['console','trackio']", "trainer.logger.*'trackio'.*pip install trackio"),
        ("env.environment_endpoint=localhost:8000", "env.environment_endpoint.*http://"),
        ("env.environment_endpoint=[http://a:1,b:2]", "env.environment_endpoint.*list of them, got 'b:2'"),
        ("env.environment_endpoint=[]", "env.environment_endpoint is not set"),
        ("env.environment_endpoint=null", "env.environment_endpoint is not set"),
        ("env.max_turn=0", "env.max_turn: expected at least 1"),
        ("env.on_parse_error=ignore", "env.on_parse_error"),
        ("env.max_failed_fraction=50", "env.max_failed_fraction: expected 0 to 1"),
        ("env.request_timeout_s=0", "env.request_timeout_s"),
        ("env.batch_timeout_s=0", "env.batch_timeout_s: expected null or more than 0"),
        ("env.max_observation_tokens=0", "env.max_observation_tokens"),
        ("data.truncation=up", "data.truncation"),
        ("data.max_response_length=0", "data.max_response_length"),
        ("data.agent_prompt_style=qwen9", "data.agent_prompt_style.*qwen9.*qwen2_5"),
        ("actor_rollout_ref.rollout.max_model_len=1024", "max_model_len=1024 is less than .* 15488"),
        ("actor_rollout_ref.rollout.prompt_length=9", "rollout.prompt_length=9 differs from data.max_prompt_length"),
        ("algorithm.adv_estimator=grpo", "rollout.n to 2 or more"),
        ("trainer.use_v1=True", "trainer.use_v1"),
        (
            "trainer.val_only=True trainer.val_before_train=False",
            "trainer.val_only=True.*leave trainer.val_before_train",
        ),
        ("actor_rollout_ref.rollout.full_determinism=True actor_rollout_ref.rollout.name=sglang", "rollout.name=vllm"),
        ("algorithm.filter_groups.enable=True", "filter_groups.enable=True filters groups.*rollout.n=1"),
        (f"{FILTERED} algorithm.filter_groups.metric=score", "filter_groups.metric=score: expected reward or acc"),
        (f"{FILTERED} algorithm.filter_groups.max_num_gen_batches=0", "max_num_gen_batches=0 would refill without end"),
        ("env.observation_truncation=error", "env.observation_truncation: expected left, right or middle"),
        ("env.seed_check_rows=-1", "env.seed_check_rows: expected at least 0"),
        ("reward.reward_model.enable=True", "reward.reward_model.enable"),
        ("trainer.n_gpus_per_node=3", "not divisible by the size of one inference engine"),
        ("+data.agent_prompt_style_kwargs.stop=END", "prompt_style_kwargs.stop: expected a list of texts.*'END'"),
        ("+data.agent_prompt_style_kwargs.stop=['']", "prompt_style_kwargs.stop: expected a list of texts"),
    ],
)
def test_what_cannot_work_names_key_and_fix(override, match):
    with pytest.raises(ConfigError, match=match):
        finish_config(composed(*override.split()))


STOP = "+data.agent_prompt_style_kwargs.stop=['</action>']"


@pytest.mark.parametrize("engine", [["vllm"], ["sglang", "actor_rollout_ref.rollout.skip_tokenizer_init=False"]])
def test_stop_strings_pass_where_the_engine_looks_for_them(engine):
    """P15."""
    name, *overrides = engine
    config = finish_config(composed(STOP, f"actor_rollout_ref.rollout.name={name}", *overrides))
    assert config.data.agent_prompt_style_kwargs.stop == ["</action>"]


@pytest.mark.parametrize(("engine", "fix"), [("sglang", "skip_tokenizer_init=False"), ("trtllm", "=vllm or sglang")])
def test_stop_strings_are_refused_where_the_engine_would_not_find_them(engine, fix):
    """P15: SGLang without a tokenizer refuses each request that has them; verl's TensorRT-LLM server never decodes."""
    with pytest.raises(ConfigError, match=f"agent_prompt_style_kwargs.stop=.*'</action>'.*{fix}"):
        finish_config(composed(STOP, f"actor_rollout_ref.rollout.name={engine}"))


def test_entrypoint_prints_what_will_run_from_any_folder(tmp_path):
    command = [sys.executable, "-m", "recipe.agent_env.main_agent_ppo", *REFERENCE, "--cfg", "job", "--resolve"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "max_model_len: 15488" in printed
    assert "use_v1: false" in printed


def test_bad_config_fails_before_ray_or_torch_are_imported(tmp_path):
    """The failure costs about a second: nothing heavy is imported for it."""
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('recipe.agent_env.main_agent_ppo', run_name='__main__')\n"
        "except SystemExit as exc: print('EXIT', exc.code)\n"
        "print('HEAVY', sorted({'ray', 'torch', 'verl', 'vllm'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *REFERENCE, "trainer.logger=console", "env.max_turn=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert "env.max_turn: expected at least 1" in done.stdout
    assert "HEAVY []" in done.stdout
