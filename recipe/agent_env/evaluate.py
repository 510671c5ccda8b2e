# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m recipe.agent_env.evaluate`: any chat endpoint plays a data set with training's own episode loop.

Owns the command, what is counted and the dump. Needs no GPU here; episodes, penalties and end reasons are those of
training, token ids are not (see `chat_policy.py`).
"""

import argparse
import asyncio
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from recipe.agent_env.agent_dataset import AgentDataset, DataRowError, EpisodeSpec
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig, EnvError
from recipe.agent_env.metrics import fill_success
from recipe.agent_env.rollout.episode import EngineError, Episode, EpisodeRules, play_episode
from recipe.agent_env.tools.chat_policy import ChatConversation, ChatEndpoint, EndpointConfig
from recipe.agent_env.tools.service_arguments import add_service_arguments, client_config

_EXAMPLES = """\
examples:
  python -m recipe.agent_env.evaluate --data data/sokoban/test.parquet --base-url http://localhost:8001/v1 \\
      --model Qwen/Qwen2.5-7B-Instruct --out eval.jsonl
  OPENAI_API_KEY=... python -m recipe.agent_env.evaluate --data test.jsonl --base-url https://api.openai.com/v1 \\
      --model gpt-4.1-mini --max-episodes 20 --concurrency 4
  python -m recipe.agent_env.trajectory_page eval.jsonl -o eval.html

The endpoint has to speak OpenAI's chat completions with tools (vLLM: --enable-auto-tool-choice --tool-call-parser).
"""

_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One finished episode."""

    index: int
    """Row of the data."""
    repeat: int
    """Which repetition of the row."""
    spec: EpisodeSpec
    """What was played."""
    episode: Episode
    """How it went; its ids are placeholders."""
    conversation: ChatConversation
    """What was said."""

    def dump_row(self) -> dict[str, Any]:
        """A line of the dump, in the columns of training's dumps that do not need tokens."""
        rewards = _turn_rewards(self.episode)
        return {
            "step": 0,
            "env_name": self.spec.env_name,
            "seed": self.spec.seed,
            "env_kwargs": self.spec.env_kwargs,
            "uid": f"row-{self.index}",
            "rollout_index": self.repeat,
            "end_reason": self.episode.end_reason.value,
            "acc": self.episode.success,
            "episode_return": self.episode.episode_return,
            "num_restarts": self.episode.num_restarts,
            "failure": self.episode.failure,
            "renderings": self.episode.renderings,
            "input": self.conversation.prompt,
            "turns": [
                {"reply": turn.reply, "observation": turn.observation, "reward": reward}
                for turn, reward in zip(self.conversation.turns, rewards, strict=False)
            ],
        }


def _turn_rewards(episode: Episode) -> list[float]:
    """What each turn earned."""
    edges = np.flatnonzero(np.diff(episode.response_mask, prepend=0, append=0))
    return [
        round(float(episode.rewards[start:stop].sum()), 6) for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


async def evaluate(
    rows: list[tuple[int, int, EpisodeSpec]],
    *,
    endpoint_config: EndpointConfig,
    service_config: EnvClientConfig,
    rules: EpisodeRules,
    on_finished: Any,
) -> list[Played]:
    """Play every row, as many at once as the client holds environments.

    Args:
        rows: Index, repetition and episode.
        endpoint_config: The model.
        service_config: The environments.
        rules: Limits and penalties.
        on_finished: Called with each `Played` as it finishes.

    Returns:
        All of them, in order of `rows`.

    Raises:
        EngineError: The endpoint does not answer at all.
        EnvError: The service does not answer at all.
    """
    slots = asyncio.Semaphore(service_config.max_concurrent_episodes)
    client = AsyncEnvClient(service_config)
    async with ChatEndpoint(endpoint_config) as endpoint:
        try:
            await client.check_health()
            await endpoint.reply([{"role": "user", "content": "Say ok."}], [], 1)

            async def play(index: int, repeat: int, spec: EpisodeSpec) -> Played:
                async with slots:
                    conversation = ChatConversation(endpoint)
                    episode = await play_episode(
                        spec,
                        client=client,
                        tokenizer=conversation.as_tokenizer(),
                        sample=conversation.sample,
                        rules=rules,
                    )
                played = Played(index=index, repeat=repeat, spec=spec, episode=episode, conversation=conversation)
                on_finished(played)
                return played

            return list(await asyncio.gather(*[play(*row) for row in rows]))
        finally:
            await client.aclose()


def summarise(played: list[Played]) -> list[dict[str, Any]]:
    """One entry per environment, and one over all when there are several.

    Returns:
        `env_name`, `num_episodes`, `num_failed`, `success_rate` and `success_stderr` (None where no environment says),
        `mean_return`, `mean_turns`, `end_reasons`. Means are over episodes that did not fail.
    """
    names = sorted({p.spec.env_name for p in played})
    groups = {name: [p for p in played if p.spec.env_name == name] for name in names}
    if len(groups) > 1:
        groups["all"] = played
    return [{"env_name": name, **_summary(group)} for name, group in groups.items()]


def _summary(played: list[Played]) -> dict[str, Any]:
    episodes = [p.episode for p in played]
    counted = [not e.is_masked for e in episodes]
    filled = fill_success([p.spec.env_name for p in played], [e.success for e in episodes], counted)
    solved = [float(value) for value in filled if value is not None]
    rate = float(np.mean(solved)) if solved else None
    kept = [episode for episode, counts in zip(episodes, counted, strict=True) if counts]
    reasons = [episode.end_reason.value for episode in episodes]
    return {
        "num_episodes": len(episodes),
        "num_failed": len(episodes) - len(kept),
        "success_rate": rate,
        "success_stderr": None if rate is None else math.sqrt(rate * (1 - rate) / len(solved)),
        "mean_return": float(np.mean([episode.episode_return for episode in kept])) if kept else None,
        "mean_turns": float(np.mean([episode.num_assistant_turns for episode in kept])) if kept else None,
        "end_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def show_summary(console: Console, summary: list[dict[str, Any]]) -> None:
    """A table for people."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("environment")
    for name in ("episodes", "solved", "return", "turns", "failed"):
        table.add_column(name, justify="right")
    table.add_column("ends")
    for entry in summary:
        rate = entry["success_rate"]
        table.add_row(
            escape(entry["env_name"]),
            str(entry["num_episodes"]),
            "-" if rate is None else f"{rate:.1%} ± {entry['success_stderr']:.1%}",
            "-" if entry["mean_return"] is None else f"{entry['mean_return']:+.3f}",
            "-" if entry["mean_turns"] is None else f"{entry['mean_turns']:.1f}",
            str(entry["num_failed"]),
            ", ".join(f"{reason} {count}" for reason, count in entry["end_reasons"].items()),
        )
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.evaluate",
        description="Let a model behind a chat endpoint play a data set; reports success per environment.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, nargs="+", metavar="FILE", help="rows to play, as for training")
    parser.add_argument("--max-episodes", type=int, metavar="N", help="play the first N rows only")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="episodes per row (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="episodes at one time (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="dump of the episodes (.jsonl)")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="the results as JSON")
    model = parser.add_argument_group("model")
    model.add_argument("--base-url", required=True, metavar="URL", help="chat endpoint, up to and with /v1")
    model.add_argument("--model", required=True, metavar="NAME", help="model's name at the endpoint")
    model.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key (%(default)s)"
    )
    model.add_argument("--temperature", type=float, metavar="T", help="by default the endpoint's choice")
    model.add_argument("--extra", default="{}", metavar="JSON", help="further fields of each request")
    model.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="longest wait for a reply")
    rules = parser.add_argument_group("rules, named and set as in training")
    rules.add_argument("--max-turn", type=int, default=10, help="env.max_turn (%(default)s)")
    rules.add_argument("--max-response-length", type=int, default=512, help="data.max_response_length (%(default)s)")
    rules.add_argument("--on-parse-error", default="feedback", choices=["feedback", "terminate"])
    rules.add_argument("--tool-parsing-error-reward", type=float, default=-0.5)
    rules.add_argument("--success-key", default="success", help="env.success_key (%(default)s)")
    rules.add_argument("--success-on-termination", action="store_true", help="env.success_on_termination")
    rules.add_argument("--max-episode-restarts", type=int, default=2)
    rules.add_argument("--renderings", action="store_true", help="env.record_renderings")
    rules.add_argument("--episode-timeout-s", type=float, default=3600.0)
    add_service_arguments(parser)
    return parser


def _rules(args: argparse.Namespace) -> EpisodeRules:
    return EpisodeRules(
        max_prompt_length=_UNBOUNDED,
        max_response_length=args.max_response_length,
        max_turn=args.max_turn,
        tool_parsing_error_reward=args.tool_parsing_error_reward,
        on_parse_error=args.on_parse_error,
        success_key=args.success_key,
        success_on_termination=args.success_on_termination,
        max_episode_restarts=args.max_episode_restarts,
        episode_timeout_s=args.episode_timeout_s,
        overlong_reward=0.0,
        masked_end_reasons=frozenset(),
        bootstrap_on_truncation=False,
        record_renderings=args.renderings,
    )


def _endpoint_config(args: argparse.Namespace) -> EndpointConfig:
    try:
        extra = json.loads(args.extra)
    except ValueError as exc:
        raise ValueError(f"--extra: {exc}") from exc
    if not isinstance(extra, dict):
        raise ValueError(f"--extra: expected a JSON object, got {args.extra!r}")
    return EndpointConfig(
        base_url=args.base_url,
        model=args.model,
        api_key=os.environ.get(args.api_key_env) or None,
        temperature=args.temperature,
        extra=extra,
        timeout_s=args.timeout_s,
    )


class _Writer:
    """Writes episodes as they finish, so that a broken-off evaluation keeps what it has."""

    def __init__(self, file: TextIO | None, progress: Progress, total: int):
        self._file, self._progress = file, progress
        self._task = progress.add_task("episodes", total=total)

    def __call__(self, played: Played) -> None:
        if self._file is not None:
            self._file.write(json.dumps(played.dump_row(), ensure_ascii=False) + "\n")
            self._file.flush()
        self._progress.advance(self._task)


def run(args: argparse.Namespace, console: Console) -> int:
    """Evaluate as the arguments say.

    Returns:
        Exit status: 0, or 1 when every episode failed.

    Raises:
        ValueError: Wrong arguments or data.
        EngineError: The endpoint does not answer.
        EnvError: The service does not answer.
    """
    if args.concurrency < 1 or args.repeats < 1:
        raise ValueError("--concurrency and --repeats: expected at least 1")
    dataset = AgentDataset(args.data, max_samples=args.max_episodes or -1)
    rows = [(i, k, dataset.spec(i)) for i in range(len(dataset)) for k in range(args.repeats)]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    file = None if args.out is None else args.out.open("w", encoding="utf-8")
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    try:
        with progress:
            played = asyncio.run(
                evaluate(
                    rows,
                    endpoint_config=_endpoint_config(args),
                    service_config=client_config(args, max_concurrent_episodes=args.concurrency),
                    rules=_rules(args),
                    on_finished=_Writer(file, progress, len(rows)),
                )
            )
    finally:
        if file is not None:
            file.close()
    summary = summarise(played)
    show_summary(console, summary)
    failures = [p.episode.failure for p in played if p.episode.failure]
    if failures:
        console.print(f"{len(failures)} failed; the last one: {failures[-1]}", markup=False, highlight=False)
    if args.summary is not None:
        args.summary.parent.mkdir(parents=True, exist_ok=True)
        args.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 1 if len(failures) == len(played) else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, 1 when the endpoint, the service or every episode failed, 2 for wrong arguments or data.
    """
    args = build_parser().parse_args(arguments)
    try:
        return run(args, Console())
    except (DataRowError, ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except (EngineError, EnvError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("broken off; finished episodes are in the dump", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
