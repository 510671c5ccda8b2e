# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The environment client: open an environment, step it, close it.

Owns the list of public names, and nothing else: import the client's parts from here. Two faces with the same names,
`AsyncEnvClient` (aiohttp) for rollouts and `EnvClient` (requests) for notebooks and checks, share one core in
`client/`: `config` has the settings, `protocol` the calls, `answers` and `messages` what comes back, `retry` when to
try again, `errors` the failures, `tool_check` the calls against the schema. None imports torch, ray or verl.
"""

from recipe.agent_env.client.answers import Capabilities, StepResult
from recipe.agent_env.client.async_face import AsyncEnvClient, AsyncEnvSession
from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.errors import (
    EnvCrashedError,
    EnvError,
    EnvGoneError,
    EnvProtocolError,
    EnvRejectedError,
    EnvTimeoutError,
    EnvUnreachableError,
)
from recipe.agent_env.client.messages import Message, normalise_observation
from recipe.agent_env.client.session import ClientStats
from recipe.agent_env.client.sync_face import EnvClient, EnvSession
from recipe.agent_env.client.tool_check import check_tool_calls

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
