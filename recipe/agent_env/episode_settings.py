# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The config's words about episodes and the service, as the objects that play them.

Owns which key becomes which field. Imports no ray or verl, so that checking tools read a config as training does.
"""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.agent_env.env_client import EnvClientConfig
from recipe.agent_env.rollout.episode import EndReason, EpisodeRules


def episode_rules(config: DictConfig) -> EpisodeRules:
    """The rules of an episode, from the whole config."""
    return EpisodeRules(
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        max_turn=config.env.max_turn,
        tool_parsing_error_reward=config.env.tool_parsing_error_reward,
        on_parse_error=config.env.on_parse_error,
        success_key=config.env.success_key,
        success_on_termination=config.env.success_on_termination,
        max_episode_restarts=config.env.max_episode_restarts,
        episode_timeout_s=config.env.episode_timeout_s,
        overlong_reward=config.env.overlong_reward,
        masked_end_reasons=frozenset(EndReason(word) for word in config.env.masked_end_reasons),
        bootstrap_on_truncation=config.env.bootstrap_on_truncation,
        record_renderings=config.env.record_renderings,
    )


def env_client_config(config: DictConfig, *, num_sharers: int = 1) -> EnvClientConfig:
    """The client's options, from the whole config.

    Args:
        config: The whole config.
        num_sharers: Processes that share `env.max_concurrent_episodes`; each gets its part, at least one.
    """
    env = config.env
    headers: Any = OmegaConf.to_container(env.headers)
    endpoint = env.environment_endpoint
    return EnvClientConfig(
        endpoint=endpoint if isinstance(endpoint, str) else list(endpoint),
        request_timeout_s=env.request_timeout_s,
        connect_timeout_s=env.connect_timeout_s,
        retry_time_s=env.retry_time_s,
        busy_wait_s=env.busy_wait_s,
        keepalive_s=env.keepalive_s,
        max_concurrent_episodes=max(1, env.max_concurrent_episodes // num_sharers),
        bearer_token=env.bearer_token,
        bearer_token_file=env.bearer_token_file,
        bearer_token_env=env.bearer_token_env,
        headers=headers,
        verify_tls=env.verify_tls,
        ca_file=env.ca_file,
        client_cert_file=env.client_cert_file,
        client_key_file=env.client_key_file,
        proxy=env.proxy,
        trust_env=env.trust_env,
    )
