# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment client: open an environment, step it, close it.

Owns the list of public names, and nothing else: import the client's parts from here. Two faces with the same names,
`AsyncEnvClient` (aiohttp) for rollouts and `EnvClient` (requests) for notebooks and checks, share one core:
`env_config` has the settings, `env_protocol` the calls, `env_answers` and `env_messages` the answers, `env_retry` when
to try again, `env_errors` the failures, `tool_check` the calls against the schema. None imports torch, ray or verl.
"""

from recipe.agent_env.env_answers import Capabilities, StepResult
from recipe.agent_env.env_client_async import AsyncEnvClient, AsyncEnvSession
from recipe.agent_env.env_client_sync import EnvClient, EnvSession
from recipe.agent_env.env_config import EnvClientConfig
from recipe.agent_env.env_errors import (
    EnvCrashedError,
    EnvError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
    EnvTimeoutError,
    EnvUnreachableError,
)
from recipe.agent_env.env_messages import Message, normalise_observation
from recipe.agent_env.env_session import ClientStats
from recipe.agent_env.tool_check import check_tool_calls

__all__ = [
    "AsyncEnvClient",
    "AsyncEnvSession",
    "Capabilities",
    "ClientStats",
    "EnvClient",
    "EnvClientConfig",
    "EnvCrashedError",
    "EnvError",
    "EnvGoneError",
    "EnvProtocolError",
    "EnvRejectedError",
    "EnvSession",
    "EnvTimeoutError",
    "EnvUnreachableError",
    "Message",
    "StepResult",
    "check_tool_calls",
    "normalise_observation",
]
