# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Config before anything is started: derived values, old names, and settings that cannot work together.

Owns the resolvers of `config/agent_ppo_trainer.yaml` and every check whose failure should cost seconds instead of a
cluster start. A check names the key, what was found and what to do.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.agent_env.algorithms.catalog import ESTIMATORS, estimator_traits
from recipe.agent_env.prompt_styles.registry import get_prompt_style

logger = logging.getLogger(__name__)

_TRACKER_MODULES = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "clearml": "clearml",
    "trackio": "trackio",
}
"""Trackers of verl's `trainer.logger` that need a package."""


_MASKABLE_END_REASONS = ("env_truncated", "max_turn", "context_full", "parse_error", "reply_cut")
"""Words of `EndReason` that `env.masked_end_reasons` may hold; `rollout.episode` is too heavy to import here."""


GROUP_FILTER_METRICS = ("reward", "acc")
"""What `algorithm.filter_groups.metric` may be: the episode's return, or whether it was solved."""


class ConfigError(ValueError):
    """The config cannot work; the text names the key and the fix."""


def register_resolvers() -> None:
    """Resolvers of the yaml; safe to call again."""
    OmegaConf.register_new_resolver("agent_env.add", lambda a, b: a + b, replace=True)
    OmegaConf.register_new_resolver(
        "agent_env.first_set", lambda *values: next((v for v in values if v is not None), None), replace=True
    )
    OmegaConf.register_new_resolver(
        "agent_env.needs_critic", lambda name: estimator_traits(str(name)).needs_critic or None, replace=True
    )
    OmegaConf.register_new_resolver("agent_env.verl_config_dir", _verl_config_dir, replace=True)


def _verl_config_dir() -> str:
    """Folder of verl's yaml files, found without importing verl."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed: pip install the version in recipe/agent_env/REQUIRED_VERL.txt")
    return os.path.join(next(iter(spec.submodule_search_locations)), "trainer", "config")


def finish_config(config: DictConfig) -> DictConfig:
    """The config that will really run: every value resolved, old names mapped and gone.

    Raises:
        ConfigError: An old name contradicts the new one, or see `check_config`.
    """
    config = config.copy()
    _drop_old_critic_names(config)
    OmegaConf.resolve(config)
    check_config(config)
    return config


def _drop_old_critic_names(config: DictConfig) -> None:
    """`critic.model.fsdp_config` is `critic.fsdp` since verl 0.9; the yaml maps the values, the old key goes."""
    old = config.critic.model.fsdp_config
    for name, value in old.items():
        if value is None:
            continue
        logger.warning(
            "critic.model.fsdp_config.%s=%s: verl 0.9 calls it critic.fsdp.%s; taken as that", name, value, name
        )
        if config.critic.fsdp[name] != value:
            raise ConfigError(
                f"critic.model.fsdp_config.{name}={value} and critic.fsdp.{name}={config.critic.fsdp[name]} contradict "
                f"each other: keep critic.fsdp.{name}, the name since verl 0.9"
            )
        config.critic.fsdp[name] = value
    for name in config.critic.fsdp:
        if OmegaConf.is_interpolation(config.critic.fsdp, name):
            config.critic.fsdp[name] = config.critic.fsdp[name]
    with open_dict(config.critic.model):
        del config.critic.model.fsdp_config


def check_config(config: DictConfig) -> None:
    """Contradictions and missing packages, before Ray starts.

    Raises:
        ConfigError: Names the key, the value and the fix.
    """
    _check_trackers(config)
    _check_required(config)
    check_stop_strings(config, config.data.agent_prompt_style_kwargs.get("stop") or [])
    _check_lengths(config)
    _check_env(config)
    _check_trainer(config)
    _check_estimator(config)
    _check_group_filter(config)
    _check_mini_batches(config)
    _check_rollout_correction(config)


def _fail_unless(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(text)


def _check_trackers(config: DictConfig) -> None:
    logger_names = config.trainer.logger
    for name in [logger_names] if isinstance(logger_names, str) else logger_names:
        module = _TRACKER_MODULES.get(name)
        _fail_unless(
            module is None or importlib.util.find_spec(module) is not None,
            f"trainer.logger names {name!r}, but the package {module!r} is not installed (verl does not bring it): "
            f"pip install {module}, or leave it out of trainer.logger",
        )


def _check_required(config: DictConfig) -> None:
    for key in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files", "env.environment_endpoint"):
        _fail_unless(bool(OmegaConf.select(config, key)), f"{key} is not set")
    endpoints = config.env.environment_endpoint
    for endpoint in [endpoints] if isinstance(endpoints, str) else endpoints:
        _fail_unless(
            isinstance(endpoint, str) and endpoint.startswith(("http://", "https://")),
            f"env.environment_endpoint: expected an http:// or https:// URL, or a list of them, got {endpoint!r}",
        )
    try:
        get_prompt_style(config.data.agent_prompt_style)
    except (KeyError, ValueError) as exc:
        raise ConfigError(f"data.agent_prompt_style: {exc}") from exc


def check_stop_strings(config: DictConfig, stop: Sequence[str]) -> None:
    """Whether the inference engine looks for stop strings at all.

    Args:
        config: The whole config.
        stop: Strings that shall end a turn, of `data.agent_prompt_style_kwargs` or of a style of one's own.

    Raises:
        ConfigError: The engine would ignore them or refuse every request.

    Source: `generate` and `launch_server` of the three servers in verl 0.9.1, verl/workers/rollout.
    """
    key = "data.agent_prompt_style_kwargs.stop"
    _fail_unless(
        not isinstance(stop, str) and all(isinstance(text, str) and text for text in stop),
        f"{key}: expected a list of texts, none of them empty, got {stop!r}",
    )
    if not stop:
        return
    rollout = config.actor_rollout_ref.rollout
    _fail_unless(
        rollout.name in ("vllm", "sglang"),
        f"{key}={list(stop)}: verl's {rollout.name} server does not look for stop strings; use "
        "actor_rollout_ref.rollout.name=vllm or sglang, or leave stop out and let the end-of-turn token end a turn",
    )
    _fail_unless(
        rollout.name != "sglang" or not rollout.skip_tokenizer_init,
        f"{key}={list(stop)}: SGLang finds them only with a tokenizer; set "
        "actor_rollout_ref.rollout.skip_tokenizer_init=False",
    )


def _check_lengths(config: DictConfig) -> None:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    for key in ("max_prompt_length", "max_response_length"):
        _fail_unless(data[key] >= 1, f"data.{key}: expected at least 1, got {data[key]}")
    context = data.max_prompt_length + data.max_response_length
    _fail_unless(
        rollout.max_model_len is not None and rollout.max_model_len >= context,
        f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
        f"data.max_response_length = {context}: leave it out (it is derived), or shorten the lengths",
    )
    for key, length in (("prompt_length", data.max_prompt_length), ("response_length", data.max_response_length)):
        _fail_unless(
            rollout[key] == length,
            f"actor_rollout_ref.rollout.{key}={rollout[key]} differs from data.max_{key}={length}: set only that key",
        )
    limit = config.env.max_observation_tokens
    _fail_unless(limit is None or limit >= 1, f"env.max_observation_tokens: expected null or at least 1, got {limit}")
    _fail_unless(
        data.truncation in ("error", "left", "right", "middle"),
        f"data.truncation: expected error, left, right or middle, got {data.truncation!r}",
    )


def _check_env(config: DictConfig) -> None:
    env = config.env
    for key in ("max_turn", "max_concurrent_episodes"):
        _fail_unless(env[key] >= 1, f"env.{key}: expected at least 1, got {env[key]}")
    _fail_unless(
        env.max_episode_restarts >= 0, f"env.max_episode_restarts: expected at least 0, got {env.max_episode_restarts}"
    )
    for key in ("request_timeout_s", "connect_timeout_s", "episode_timeout_s", "keepalive_s"):
        _fail_unless(env[key] > 0, f"env.{key}: expected more than 0 seconds, got {env[key]}")
    _fail_unless(
        env.batch_timeout_s is None or env.batch_timeout_s > 0,
        f"env.batch_timeout_s: expected null or more than 0 seconds, got {env.batch_timeout_s}",
    )
    _fail_unless(
        0 <= env.max_failed_fraction <= 1, f"env.max_failed_fraction: expected 0 to 1, got {env.max_failed_fraction}"
    )
    _fail_unless(
        env.on_parse_error in ("feedback", "terminate"),
        f"env.on_parse_error: expected feedback or terminate, got {env.on_parse_error!r}",
    )
    unknown = sorted(set(env.masked_end_reasons) - set(_MASKABLE_END_REASONS))
    _fail_unless(
        not unknown, f"env.masked_end_reasons: expected any of {', '.join(_MASKABLE_END_REASONS)}, got {unknown}"
    )
    for key, least in (("seed_check_rows", 0), ("seed_check_time_s", 1)):
        _fail_unless(env[key] >= least, f"env.{key}: expected at least {least}, got {env[key]}")
    _fail_unless(
        env.observation_truncation in ("left", "right", "middle"),
        f"env.observation_truncation: expected left, right or middle, got {env.observation_truncation!r}",
    )
    num_tokens = sum(env[key] is not None for key in ("bearer_token", "bearer_token_file", "bearer_token_env"))
    _fail_unless(
        num_tokens <= 1, "env.bearer_token, env.bearer_token_file and env.bearer_token_env: set at most one of them"
    )


def _check_trainer(config: DictConfig) -> None:
    _fail_unless(
        not config.trainer.use_v1,
        "trainer.use_v1=True: this recipe runs on verl's RayPPOTrainer; leave trainer.use_v1 out",
    )
    _fail_unless(
        not config.reward.reward_model.enable,
        "reward.reward_model.enable=True: rewards come from the environment service; leave the reward model out",
    )
    _fail_unless(
        not config.trainer.val_only or config.trainer.val_before_train,
        "trainer.val_only=True with trainer.val_before_train=False: verl evaluates before training or not at all, so "
        "it would train; leave trainer.val_before_train out",
    )
    rollout = config.actor_rollout_ref.rollout
    engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    _fail_unless(
        not rollout.full_determinism or engine == "vllm",
        f"actor_rollout_ref.rollout.full_determinism=True with rollout.name={engine}: only vLLM takes a seed "
        "with each request through verl; set actor_rollout_ref.rollout.name=vllm",
    )
    num_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    engine_size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    _fail_unless(
        num_gpus % engine_size == 0,
        f"trainer.n_gpus_per_node * trainer.nnodes = {num_gpus} is not divisible by the size of one inference engine "
        f"({engine_size}; actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size})",
    )


def _check_estimator(config: DictConfig) -> None:
    algorithm = config.algorithm
    name = str(algorithm.adv_estimator)
    key = f"algorithm.adv_estimator={name}"
    _fail_unless(
        name in ESTIMATORS or bool(os.environ.get("VERL_USE_EXTERNAL_MODULES")),
        f"{key}: no such estimator; known are {', '.join(sorted(ESTIMATORS))}. One of your own has to be registered by "
        "a module that the environment variable VERL_USE_EXTERNAL_MODULES names",
    )
    traits = estimator_traits(name)
    _fail_unless(traits.refusal is None, f"{key} is not right on episodes of several turns: {traits.refusal}")
    num_rollouts = config.actor_rollout_ref.rollout.n
    _fail_unless(
        num_rollouts >= traits.min_rollouts,
        f"{key} compares the rollouts of one row, but actor_rollout_ref.rollout.n={num_rollouts}: set "
        f"actor_rollout_ref.rollout.n to {traits.min_rollouts} or more",
    )
    _fail_unless(
        not traits.needs_critic or config.critic.enable is not False,
        f"{key} reads a critic's values, but critic.enable=False: leave critic.enable out",
    )
    _fail_unless(
        not traits.needs_sum_pi_squared or config.actor_rollout_ref.actor.calculate_sum_pi_squared,
        f"{key} needs actor_rollout_ref.actor.calculate_sum_pi_squared=True",
    )
    _fail_unless(
        not config.env.bootstrap_on_truncation or traits.needs_critic,
        f"env.bootstrap_on_truncation=True needs a critic's values, which {key} does not read: take gae, turn_gae or "
        "bilevel_gae, or leave env.bootstrap_on_truncation out",
    )
    _fail_unless(
        not algorithm.use_pf_ppo,
        "algorithm.use_pf_ppo=True: verl draws rows again by their score after advantages are computed, which doubles "
        "some episodes and drops others, masked ones included; leave it out",
    )


def _check_group_filter(config: DictConfig) -> None:
    filter_groups = config.algorithm.filter_groups
    if not (filter_groups and filter_groups.enable):
        return
    name, num_rollouts = str(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n
    _fail_unless(
        num_rollouts > 1 and name != "remax",
        f"algorithm.filter_groups.enable=True filters groups of rollouts of one row, which "
        f"algorithm.adv_estimator={name} with actor_rollout_ref.rollout.n={num_rollouts} does not compare; leave "
        "algorithm.filter_groups.enable out",
    )
    _fail_unless(
        filter_groups.metric in GROUP_FILTER_METRICS,
        f"algorithm.filter_groups.metric={filter_groups.metric}: expected {' or '.join(GROUP_FILTER_METRICS)}",
    )
    _fail_unless(
        filter_groups.max_num_gen_batches >= 1,
        f"algorithm.filter_groups.max_num_gen_batches={filter_groups.max_num_gen_batches} would refill without "
        "end on a policy that solves all or nothing: set it to 1 or more",
    )


def _check_mini_batches(config: DictConfig) -> None:
    sections = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor}
    if config.critic.enable or estimator_traits(str(config.algorithm.adv_estimator)).needs_critic:
        sections["critic"] = config.critic
    num_rows = config.data.train_batch_size
    for name, section in sections.items():
        _fail_unless(
            num_rows % section.ppo_mini_batch_size == 0,
            f"data.train_batch_size={num_rows} cannot be cut into mini-batches of "
            f"{name}.ppo_mini_batch_size={section.ppo_mini_batch_size} (both count rows of the data set, before "
            "they are repeated rollout.n times): choose a divisor",
        )
        if section.shuffle:
            logger.warning(
                "%s.shuffle=True: rows are mixed again in the workers, so a mini-batch may hold masked rows only when "
                "nearly a whole batch failed; its logged loss is then NaN",
                name,
            )


def _check_rollout_correction(config: DictConfig) -> None:
    correction = config.algorithm.rollout_correction
    _fail_unless(
        not (correction and correction.bypass_mode),
        "algorithm.rollout_correction.bypass_mode=True: verl's loss then raises on a micro-batch of masked rows, so "
        "one failed episode would end the run; leave it out (old log-probs are computed by the trainer)",
    )


def describe(config: DictConfig) -> dict[str, Any]:
    """What each length key became, for the start of the log."""
    return {
        "context read on any turn": config.data.max_prompt_length,
        "tokens sampled per turn": config.data.max_response_length,
        "engine context": config.actor_rollout_ref.rollout.max_model_len,
        "turns": config.env.max_turn,
    }
