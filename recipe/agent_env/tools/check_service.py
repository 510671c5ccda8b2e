# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The doctor's look at data rows and at the service: reachable, well-formed, the same start for the same seed.

Owns what is asked of rows and environments before tokens come in. Plays no episode.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from omegaconf import DictConfig

from recipe.agent_env.agent_dataset import AgentDataset, DataRowError, EpisodeSpec
from recipe.agent_env.env_client import EnvClient, EnvClientConfig, EnvError, EnvSession, Message
from recipe.agent_env.start_check import start_difference
from recipe.agent_env.tools.check_report import Report

_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})
_LARGE_INFO_BYTES = 100_000
_SLOW_SHARE = 0.5
"""An answer that takes this share of the time-out is close to failing."""


def check_data(config: DictConfig, overrides: Sequence[str], report: Report) -> list[EpisodeSpec]:
    """Read the data files as training does.

    Args:
        config: Resolved config.
        overrides: The command line, which tells a file that was meant from verl's default.
        report: Where findings go.

    Returns:
        Episodes of the training files; empty when they cannot be read.
    """
    splits: dict[str, list[EpisodeSpec]] = {"train": [], "val": []}
    for split, specs in splits.items():
        key = f"data.{split}_files"
        if split == "val" and not any(override.lstrip("+").startswith(key) for override in overrides):
            report.warn(f"{key} is not set", f"set {key}; training validates on it")
            continue
        try:
            dataset = AgentDataset(config.data[f"{split}_files"], max_samples=config.data[f"{split}_max_samples"])
        except DataRowError as exc:
            report.error(str(exc), f"mend the file, or set {key}")
            continue
        specs.extend(dataset.spec(i) for i in range(len(dataset)))
        counts = Counter(spec.env_name for spec in specs)
        report.ok(f"{key}: {len(specs)} rows: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    train, batch_size = splits["train"], config.data.train_batch_size
    if train and len(train) < batch_size:
        report.error(
            f"{len(train)} training rows do not fill one batch of data.train_batch_size={batch_size}",
            "lower data.train_batch_size, or make more rows",
        )
    shared = {_identity(spec) for spec in train} & {_identity(spec) for spec in splits["val"]}
    if shared:
        report.warn(f"{len(shared)} episodes are in both splits", "validate on seeds that are not trained on")
    return train


def _identity(spec: EpisodeSpec) -> str:
    return json.dumps([spec.env_name, spec.seed, spec.env_kwargs], sort_keys=True)


def check_health(client: EnvClient, report: Report) -> bool:
    """Whether the service answers at all; of several, whether one does. Each that does not is an error."""
    answers = [_is_up(endpoint, client.config, report) for endpoint in client.config.endpoints]
    return any(answers)


def _is_up(endpoint: str, config: EnvClientConfig, report: Report) -> bool:
    """Whether one service answers."""
    started = time.perf_counter()
    try:
        with EnvClient(dataclasses.replace(config, endpoint=endpoint)) as client:
            client.check_health()
    except (EnvError, ValueError) as exc:
        report.error(
            f"the service does not answer: {exc}",
            "start it (python -m recipe.agent_env.env_service MODULE:CLASS --port PORT), or set "
            "env.environment_endpoint to its root URL; a proxy of this machine is used only with env.trust_env=true",
        )
        return False
    report.ok(f"{endpoint} answers, in {1000 * (time.perf_counter() - started):.0f} ms")
    return True


def check_environment(client: EnvClient, spec: EpisodeSpec, report: Report, *, is_grouped: bool) -> EnvSession | None:
    """Open an environment, look at everything it says before the first step, and close it.

    Args:
        client: Open client.
        spec: Which episode.
        report: Where findings go.
        is_grouped: Whether training compares several rollouts of one row, so that seeds must decide the start.

    Returns:
        The closed session with its prompt, tools and observation; None when it could not be opened.
    """
    started = time.perf_counter()
    session = _open(client, spec, report)
    if session is None:
        return None
    seconds = time.perf_counter() - started
    limit_s = client.config.request_timeout_s
    try:
        service = f"{session.capabilities.name} {session.capabilities.version}".strip()
        report.ok(
            f"{spec.env_name} seed {spec.seed} opens in {1000 * seconds:.0f} ms"
            f"{f' ({service})' if service else ''}: {len(session.tools_schema)} tools, "
            f"{'several calls' if session.allow_parallel_tool_call else 'one call'} per turn"
        )
        if seconds > _SLOW_SHARE * limit_s:
            report.warn(f"opening took {seconds:.1f} s of the {limit_s:g} s allowed", "raise env.request_timeout_s")
        check_tools(session.tools_schema, report)
        _check_start(session, report)
        _check_seed(client, session, spec, report, is_grouped=is_grouped)
    finally:
        session.close()
    return session


def _open(client: EnvClient, spec: EpisodeSpec, report: Report) -> EnvSession | None:
    try:
        return client.open(env_name=spec.env_name, seed=spec.seed, env_kwargs=spec.env_kwargs)
    except (EnvError, ValueError) as exc:
        report.error(
            f"{spec.env_name} seed {spec.seed} cannot be opened: {exc}",
            "compare env_name and env_kwargs of the data rows with what the service serves",
        )
        return None


def check_tools(tools_schema: list[dict[str, Any]], report: Report) -> None:
    """Whether models and the check of their calls can make sense of the tools."""
    names: list[str] = []
    for number, tool in enumerate(tools_schema, start=1):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            report.error(
                f"tool {number} is {json.dumps(tool)[:120]}",
                'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}',
            )
            continue
        names.append(function["name"])
        parameters = function.get("parameters", {})
        try:
            validator_for(parameters, default=Draft202012Validator).check_schema(parameters)
        except (SchemaError, TypeError, AttributeError) as exc:
            reason = getattr(exc, "message", str(exc))
            report.error(
                f"the parameters of tool {function['name']} are no JSON schema: {reason}",
                "mend them; until then no call of this tool is checked before it is sent",
            )
        if not function.get("description"):
            report.warn(f"tool {function['name']} has no description", "the model knows it by its name only")
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        report.error(f"several tools are called {doubled[0]}", "give each tool a name of its own")


def _check_start(session: EnvSession, report: Report) -> None:
    """Task prompt and first observation."""
    if not session.task_prompt and not any(message["content"].strip() for message in session.observation):
        report.error(
            "task prompt and first observation are both empty: the model would see no task",
            "return the task from reset, or from the task-prompt call",
        )
    elif not session.observation:
        report.warn("the first observation is empty", "the model sees the task prompt only; is this meant?")
    check_messages(session.observation, report)
    if session.is_terminated:
        report.warn("the episode is over before its first turn", "such rows teach nothing; take them out of the data")
    check_info(session.info, report)


def check_messages(messages: list[Message], report: Report) -> None:
    """Roles and contents of an observation, after the client has normalised it."""
    for message in messages:
        if message["role"] not in _KNOWN_ROLES:
            report.warn(
                f"a message has the role {message['role']!r}", "chat templates know system, user, assistant and tool"
            )
        if not message["content"].strip() and not message.get("tool_calls"):
            report.warn(f"a {message['role']} message has no text", "the model sees an empty message")


def check_info(info: dict[str, Any], report: Report) -> None:
    """`info` travels with every answer, though the model never sees it."""
    size = len(json.dumps(info))
    if size > _LARGE_INFO_BYTES:
        report.warn(f"info has {size / 1000:.0f} kB", "it is sent with every step; keep it small")


def _check_seed(client: EnvClient, session: EnvSession, spec: EpisodeSpec, report: Report, *, is_grouped: bool) -> None:
    """The same seed must give the same start, or rollouts of one row are not comparable."""
    again = _open(client, spec, report)
    if again is None:
        return
    try:
        difference = start_difference(session, again)
        if difference is not None:
            text = f"seed {spec.seed} gave two different starts {difference}"
            advice = "let the seed decide everything random in reset"
            if is_grouped:
                report.error(text, f"{advice}; rollouts of one row are compared with each other")
            else:
                report.warn(text, f"{advice}; episodes cannot be played again otherwise")
            return
        report.ok(f"the same seed gives the same start (seed {spec.seed}, opened twice)")
    finally:
        again.close()
