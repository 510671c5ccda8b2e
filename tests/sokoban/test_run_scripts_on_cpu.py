# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The run scripts: what each would start is composed, checked by us and by verl, and turned into verl's own objects.

GPU scripts cannot run here; a key that verl or we do not know, or a value that does not fit the others, fails here.
"""

from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig

from examples import run_script
from examples.sokoban import curate_data
from examples.tiny_model import save_tiny_model
from recipe.agent_env.config_checks import ConfigError

_FOLDER = Path(run_script.__file__).parent / "sokoban"
_LARGE = _FOLDER / "run_qwen2_5-7b_8gpu.sh"
_SMALL = _FOLDER / "run_qwen2_5-1.5b_1gpu_grpo.sh"
_CPU = _FOLDER / "run_cpu.sh"
_SETTINGS: dict[str, tuple[Path, dict[str, str]]] = {
    "7b": (_LARGE, {}),
    "7b offload": (_LARGE, {"OFFLOAD": "True"}),
    "1.5b": (_SMALL, {}),
    "1.5b lora": (_SMALL, {"LORA_RANK": "32", "OFFLOAD": "False"}),
    "cpu ppo": (_CPU, {}),
    "cpu grpo": (_CPU, {"ALGO": "grpo"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for the models, which live on a hub."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _config(name: str, *arguments: str, **variables: str) -> DictConfig:
    script, own = _SETTINGS[name]
    return run_script.compose_config(run_script.read_overrides(script, list(arguments), {**own, **variables}))


@pytest.mark.parametrize("name", _SETTINGS)
def test_verl_accepts_what_the_script_starts(name: str, model: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = _config(name, MODEL=str(model), TOKENIZER=str(model))
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    for part in (config.actor_rollout_ref.model, config.actor_rollout_ref.rollout):  # validate_config makes the others
        omega_conf_to_dataclass(part)


@pytest.mark.parametrize("name", ["7b", "1.5b", "1.5b lora"])
def test_longest_row_fits_into_one_micro_batch(name: str) -> None:
    """verl asserts it in mid-run: a row is never cut in two."""
    config = _config(name)
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len == longest
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu >= longest
    assert config.critic.ppo_max_token_len_per_gpu >= longest


def test_large_script_has_the_reference_setting() -> None:
    config = _config("7b")
    assert config.algorithm.adv_estimator == "gae" and config.critic.enable
    assert (config.env.max_turn, config.data.max_prompt_length, config.data.max_response_length) == (10, 15360, 128)
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.tensor_model_parallel_size) == (8, 4)
    assert config.actor_rollout_ref.model.path == config.critic.model.path == "Qwen/Qwen2.5-7B-Instruct"


def test_small_script_has_groups_and_no_critic() -> None:
    config = _config("1.5b")
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == ("grpo", 8)
    assert not config.critic.enable and config.trainer.n_gpus_per_node == 1
    assert config.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    assert _config("1.5b lora").actor_rollout_ref.model.lora_rank == 32


@pytest.mark.parametrize("name", _SETTINGS)
def test_own_arguments_come_last_and_win(name: str) -> None:
    assert _config(name, "env.max_turn=3").env.max_turn == 3


@pytest.mark.parametrize("name", _SETTINGS)
def test_wrong_key_and_wrong_value_fail(name: str) -> None:
    with pytest.raises(HydraException):
        _config(name, "actor_rollout_ref.rollout.tensor_parallel=2")
    with pytest.raises(ConfigError, match="env.max_turn"):
        _config(name, "env.max_turn=0")


@pytest.mark.parametrize("name", ["7b", "1.5b", "cpu ppo"])
def test_missing_rooms_are_curated_and_can_be_solved_within_the_turns(name: str) -> None:
    script, variables = _SETTINGS[name]
    curation = run_script.read_calls(script, [], variables)[0]
    assert curation[:2] == ["-m", "examples.sokoban.curate_data"]
    args = curate_data.build_parser().parse_args(curation[2:])
    longest = args.max_steps if args.max_solution is None else args.max_solution
    assert longest <= args.max_steps <= _config(name).env.max_turn


def test_rooms_that_exist_are_not_curated_again(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    assert len(run_script.read_calls(_LARGE, [], {"DATA_DIR": str(tmp_path)})) == 1


def test_script_that_fails_says_why() -> None:
    with pytest.raises(ValueError, match="ALGO=dpo: expected ppo or grpo"):
        run_script.read_calls(_CPU, [], {"ALGO": "dpo"})
