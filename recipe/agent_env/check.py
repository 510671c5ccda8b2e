# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m recipe.agent_env.check key=value ...`: the doctor, before GPUs are burnt.

Owns the order of the checks and the command. Takes the overrides of `main_agent_ppo` as they are; imports no ray, vllm
or verl, so that it runs in seconds on any machine that reaches the service.
"""

import argparse
import asyncio
import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer
from recipe.agent_env.algorithms.catalog import compares_rollouts
from recipe.agent_env.config_checks import ConfigError, describe, finish_config, register_resolvers
from recipe.agent_env.env_client import EnvClient, EnvClientConfig, EnvError, EnvSession
from recipe.agent_env.episode_settings import env_client_config, episode_rules
from recipe.agent_env.prompt_styles.errors import PromptStyleError
from recipe.agent_env.tools.check_episode import (
    check_budget,
    check_episode,
    check_first_prompts,
    play_randomly,
    show_prompt,
    show_turn,
)
from recipe.agent_env.tools.check_report import Report
from recipe.agent_env.tools.check_service import check_data, check_environment, check_health

_EXAMPLES = """\
examples:
  python -m recipe.agent_env.check env.environment_endpoint=http://localhost:8000 \\
      data.train_files=data/sokoban/train.parquet data.val_files=data/sokoban/test.parquet \\
      actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct env.max_turn=10
  python -m recipe.agent_env.check --full +platform=cpu ...     the whole command line of a training run

exit status: 0 ready (warnings are possible), 1 something must be mended first, 2 the command line cannot be read
"""

_MAX_ENVIRONMENTS = 8


def load_config(overrides: Sequence[str]) -> DictConfig:
    """The config of a training run with these overrides, unresolved.

    Raises:
        HydraException: An override has a typo, or names no key.
    """
    register_resolvers()
    with initialize_config_module("recipe.agent_env.config", version_base=None):
        return compose("agent_ppo_trainer", overrides=list(overrides))


def run_checks(config: DictConfig, overrides: Sequence[str], report: Report, *, num_rows: int, is_full: bool) -> None:
    """All checks, in the order in which failures explain each other.

    Args:
        config: Unresolved config.
        overrides: What it was made from.
        report: Where findings go.
        num_rows: Rows per environment that are opened.
        is_full: Whether long prompts are shown whole.
    """
    report.section("config")
    resolved = _check_config(config, report)
    if resolved is None:
        return
    config = resolved
    report.section("data")
    specs = check_data(config, overrides, report)
    report.section("service")
    try:
        client_config = _impatient(env_client_config(config))
        client_config.resolve_token()
    except ValueError as exc:
        report.error(str(exc), "mend the env.* key that it names")
        return
    with EnvClient(client_config) as client:
        if not check_health(client, report):
            return
        groups = _rows_by_environment(specs, num_rows, report)
        is_grouped = compares_rollouts(str(config.algorithm.adv_estimator), config.actor_rollout_ref.rollout.n)
        first = {
            name: check_environment(client, rows[0], report, is_grouped=is_grouped) for name, rows in groups.items()
        }
        report.section("tokens")
        tokenizer = _load_tokenizer(config, report)
        if tokenizer is None:
            return
        for name, rows in groups.items():
            session = first[name]
            if session is None:
                continue
            opened = [(rows[0], session), *_open_others(client, rows[1:], report)]
            check_first_prompts(opened, tokenizer, config.data.max_prompt_length, report)
    for name, session in first.items():
        if session is not None and not session.is_terminated:
            report.section(f"episode of {name}")
            _play(groups[name][0], session, tokenizer, client_config, config, report, is_full=is_full)


def _check_config(config: DictConfig, report: Report) -> DictConfig | None:
    """The finished config; also with a contradiction in it, so that one run of the doctor finds more than one."""
    try:
        finished = finish_config(config)
    except ConfigError as exc:
        report.error(str(exc), "nothing would be started with this")
        finished = config.copy()
        try:
            OmegaConf.resolve(finished)
        except OmegaConfBaseException:
            return None
        return finished
    except OmegaConfBaseException as exc:
        report.error(f"the config cannot be resolved: {exc}", "set the missing key, or mend the ${...} that it names")
        return None
    report.ok("the config can start: " + ", ".join(f"{what} {value}" for what, value in describe(finished).items()))
    return finished


def _impatient(config: EnvClientConfig) -> EnvClientConfig:
    """Settings for a person who waits: failures are said at once instead of being waited out."""
    return dataclasses.replace(config, max_retries=1, busy_wait_s=10.0)


def _rows_by_environment(specs: list[EpisodeSpec], num_rows: int, report: Report) -> dict[str, list[EpisodeSpec]]:
    """The first rows of each environment."""
    groups: dict[str, list[EpisodeSpec]] = {}
    for spec in specs:
        rows = groups.setdefault(spec.env_name, [])
        if len(rows) < num_rows:
            rows.append(spec)
    if len(groups) > _MAX_ENVIRONMENTS:
        report.note(f"{len(groups)} environments; the first {_MAX_ENVIRONMENTS} are looked at")
    return dict(list(groups.items())[:_MAX_ENVIRONMENTS])


def _open_others(client: EnvClient, specs: list[EpisodeSpec], report: Report) -> list[tuple[EpisodeSpec, EnvSession]]:
    """Further rows, only for their first prompts."""
    opened = []
    for spec in specs:
        try:
            with client.open(env_name=spec.env_name, seed=spec.seed, env_kwargs=spec.env_kwargs) as session:
                opened.append((spec, session))
        except (EnvError, ValueError) as exc:
            report.error(f"{spec.env_name} seed {spec.seed} cannot be opened: {exc}", "mend the row or the service")
    return opened


def _load_tokenizer(config: DictConfig, report: Report) -> EpisodeTokenizer | None:
    """The model's tokenizer in its prompt style; also whether the model is long enough."""
    from transformers import AutoConfig, AutoTokenizer

    model = config.actor_rollout_ref.model
    path = model.get("tokenizer_path") or model.path
    advice = "set actor_rollout_ref.model.path to a model folder or a name on the hub that this machine reaches"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.get("trust_remote_code", False))
    except Exception as exc:  # the hub's client, a broken file, remote code: all mean that there is no tokenizer
        report.error(f"no tokenizer at {path}: {type(exc).__name__}: {str(exc).splitlines()[0][:200]}", advice)
        return None
    try:
        episode_tokenizer = EpisodeTokenizer.from_config(config, tokenizer)
    except (PromptStyleError, TypeError, KeyError, ValueError) as exc:
        report.error(f"data.agent_prompt_style={config.data.agent_prompt_style}: {exc}", "choose another prompt style")
        return None
    report.ok(f"tokenizer of {path}, prompt style {config.data.agent_prompt_style}")
    try:
        limit = getattr(AutoConfig.from_pretrained(model.path), "max_position_embeddings", None)
    except (OSError, ValueError):
        limit = None
    length = config.actor_rollout_ref.rollout.max_model_len
    if limit is not None and length is not None and length > limit:
        report.error(
            f"the engine's context of {length} tokens is longer than the model's {limit}",
            "lower data.max_prompt_length, or extend the model (rope scaling)",
        )
    return episode_tokenizer


def _play(
    spec: EpisodeSpec,
    session: EnvSession,
    tokenizer: EpisodeTokenizer,
    client_config: EnvClientConfig,
    config: DictConfig,
    report: Report,
    *,
    is_full: bool,
) -> None:
    """One episode, and what can be told from it."""
    rules = dataclasses.replace(episode_rules(config), max_episode_restarts=0)
    episode, record, policy = asyncio.run(
        play_randomly(spec, session, tokenizer=tokenizer, client_config=client_config, rules=rules)
    )
    if len(episode.prompt_ids):
        show_prompt(episode, tokenizer, report, is_full=is_full)
        show_turn(episode, tokenizer, report)
    if policy.unread:
        call = policy.unread[0]["tool_calls"][0]["function"]
        report.warn(
            f"a call as this prompt style writes it is not read back as it was: {call['name']}({call['arguments']})",
            "choose the parser of the model's call format: +data.agent_prompt_style_kwargs.tool_parser=...",
        )
    check_episode(episode, record, rules, report)
    if record is not None:
        check_budget(episode, record, tokenizer, rules, report)


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.check",
        description="Check config, data, service, tokens and one whole episode before a training run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for recipe.agent_env.main_agent_ppo")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="rows opened per environment (%(default)s)")
    parser.add_argument("--full", action="store_true", help="show long prompts whole")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status, see `--help`.
    """
    args: Any = build_parser().parse_args(arguments)
    # Failures are findings here; what the client and the episode log about them would say everything twice.
    logging.getLogger("recipe.agent_env").setLevel(logging.ERROR)
    report = Report(Console())
    try:
        config = load_config(args.overrides)
    except (HydraException, OmegaConfBaseException, ConfigError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    try:
        run_checks(config, args.overrides, report, num_rows=max(1, args.rows), is_full=args.full)
    except KeyboardInterrupt:
        return 130
    return report.verdict()


if __name__ == "__main__":
    sys.exit(main())
