# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Episodes on verl's agent loop: which worker plays which row, and what of it reaches the trainer.

Owns the meeting point with verl's `AgentLoopManager` (driver side) and `AgentLoopWorker` (one Ray actor each). The
episode itself is in `episode.py`, its tensors in `batch.py`.
"""

import asyncio
import logging
import os
import time
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.ray_utils import auto_await
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.skip import SkipManager
from verl.workers.rollout.llm_server import LLMServerClient

from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer, PromptTooLongError
from recipe.agent_env.config_checks import check_stop_strings
from recipe.agent_env.env_client import AsyncEnvClient
from recipe.agent_env.episode_settings import env_client_config, episode_rules
from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.rollout.batch import assemble, mark_missing_baselines
from recipe.agent_env.rollout.episode import (
    EndReason,
    EngineError,
    EngineLostError,
    Episode,
    SampledReply,
    play_episode,
)
from recipe.agent_env.rollout.progress import RolloutProgress, summary_line

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

ROLLOUT_INDEX_KEY = "rollout_index"
"""Column: which repetition of its row this is, counted from 0 over the whole batch."""

# Columns that only steer one rollout; all others of the input travel along.
_STEERING_COLUMNS = frozenset({"agent_name", "priority", "__do_sample__"})
# verl's trainer keeps these on its side of the batch and joins them again by row.
_TRAINER_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "uid"})


class TooManyFailedEpisodesError(RuntimeError):
    """More than `env.max_failed_fraction` of a batch failed: going on would train on what is left of an outage."""


class EngineSampler:
    """The policy: one episode's requests to verl's inference servers, token-in/token-out.

    Args:
        llm_client: verl's client; sends all requests with one `request_id` to one replica, for its prefix cache.
        sampling_params: Temperature and the like, as verl's worker composed them.
        style: Names the token ids and strings that end a reply.
        priority: Of vLLM's scheduler; lower is first.
        progress: Counts what is sampled.
    """

    def __init__(
        self,
        llm_client: LLMServerClient,
        sampling_params: dict[str, Any],
        *,
        style: PromptStyle,
        priority: int,
        progress: RolloutProgress,
    ):
        self._llm_client = llm_client
        self._sampling_params = {**sampling_params, "stop_token_ids": list(style.stop_token_ids)}
        if style.stop:
            # Looked for in the text as the style itself reads it, special tokens spelled out.
            self._sampling_params |= {"stop": list(style.stop), "skip_special_tokens": False}
        self._request_id = uuid4().hex
        self._priority = priority
        self._progress = progress

    async def __call__(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        """Sample one reply.

        Raises:
            EngineError: The engine failed or aborted the request.
            EngineLostError: The engine is gone: its actor, or the process behind it.
        """
        try:
            output = await self._llm_client.generate(
                request_id=self._request_id,
                prompt_ids=context_ids,
                sampling_params={**self._sampling_params, "max_tokens": max_tokens},
                priority=self._priority,
            )
        except Exception as exc:
            if _is_engine_gone(exc):
                text = f"an inference engine is gone, on turn {turn + 1}: {type(exc).__name__}: {exc}"
                raise EngineLostError(text) from exc
            raise EngineError(f"the inference engine failed on turn {turn + 1}: {type(exc).__name__}: {exc}") from exc
        if output.stop_reason == "aborted":
            raise EngineError(f"the inference engine aborted the request of turn {turn + 1}")
        self._progress.count_reply(len(output.token_ids))
        return SampledReply(
            ids=list(output.token_ids),
            log_probs=list(output.log_probs) if output.log_probs else None,
            num_cached_tokens=output.extra_fields.get("num_cached_tokens"),
        )


def _is_engine_gone(exc: Exception) -> bool:
    """Whether no further request can succeed; a request is bound to its engine, so trying again would not help.

    vLLM's `EngineDeadError` comes through Ray as a class derived from it; it is told by its name, so that no engine is
    imported here.
    """
    is_dead = any(parent.__name__ == "EngineDeadError" for parent in type(exc).__mro__)
    return is_dead or isinstance(exc, ray.exceptions.RayActorError)


class EnvAgentLoopWorker(AgentLoopWorker):
    """Plays its share of a batch, all episodes at once, in one event loop.

    It leaves to verl's worker how sampling parameters are composed (training, validation, greedy baselines) and
    replaces what happens per row: an episode instead of a registered agent loop, and no padding.
    """

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._rules = episode_rules(config)
        self._episode_tokenizer = EpisodeTokenizer.from_config(config, self.tokenizer)
        check_stop_strings(config, self._episode_tokenizer.style.stop)
        num_workers = config.actor_rollout_ref.rollout.agent.num_workers
        self._client_config = env_client_config(config, num_sharers=num_workers)
        self._client: AsyncEnvClient | None = None
        self._deadline: float | None = None
        self._progress = RolloutProgress()

    async def progress(self) -> dict[str, int]:
        """What is counted of the present rollout, or of the last one; see `RolloutProgress`."""
        return self._progress.snapshot()

    async def generate_sequences(self, batch: DataProto) -> list[Episode]:
        """Play one episode per row.

        Args:
            batch: Columns `env_name`, `seed`, `env_kwargs` and what else `AgentDataset` gives.

        Returns:
            Episodes in row order, unpadded.
        """
        if self._client is None:  # made here: it belongs to the running event loop
            self._client = AsyncEnvClient(self._client_config)
        limit_s = self.config.env.batch_timeout_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._progress.begin(len(batch))
        return await super().generate_sequences(batch)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **row: Any,
    ) -> Episode:
        assert self._client is not None
        with (
            rollout_trace_attr(
                step=trajectory["step"],
                sample_index=trajectory["sample_index"],
                rollout_n=int(row[ROLLOUT_INDEX_KEY]),
                validate=trajectory["validate"],
                name="agent_loop",
                trace=trace,
            ),
            self._progress.episode() as played,
        ):
            sampler = EngineSampler(
                self.llm_client,
                sampling_params,
                style=self._episode_tokenizer.style,
                priority=int(row["priority"]),
                progress=self._progress,
            )
            episode = await play_episode(
                EpisodeSpec(env_name=row["env_name"], seed=int(row["seed"]), env_kwargs=row["env_kwargs"]),
                client=self._client,
                tokenizer=self._episode_tokenizer,
                sample=sampler,
                rules=self._rules,
                deadline=self._deadline,
            )
            played.append(episode)
            return episode

    def _postprocess(
        self, inputs: list[Episode], input_non_tensor_batch: dict | None = None, validate: bool = False
    ) -> list[Episode]:
        """Hand the episodes on as they are: the manager pads once, to the longest row of the whole batch."""
        return inputs

    async def close(self) -> None:
        """Close every environment that is still open. Safe to call at any time, also while episodes run."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


class EnvAgentLoopManager(AgentLoopManager):
    """Spreads a batch over the workers and assembles what they played."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.agent_loop_workers_class = ray.remote(EnvAgentLoopWorker)
        super().__init__(*args, **kwargs)
        self.pad_token_id = 0
        """Fills the padding, which is masked. The trainer, which holds the tokenizer, puts the tokenizer's here."""

    @auto_await
    @SkipManager.annotate(role="rollout")
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Play one episode per row; any number of rows on any number of workers.

        Args:
            prompts: Rows of `AgentDataset`.

        Returns:
            See `assemble`; rows in the order of `prompts`.

        Raises:
            TooManyFailedEpisodesError: The failed share of the batch is above `env.max_failed_fraction`.
            PromptTooLongError: No first prompt of the batch fits.
        """
        columns = prompts.non_tensor_batch
        columns["priority"] = np.arange(len(prompts), dtype=np.int64)
        columns[ROLLOUT_INDEX_KEY] = _rollout_indices(columns["index"])
        num_repeats = self.rollout_config.val_kwargs.n if prompts.meta_info.get("validate") else None
        played, source = _rows_to_play(columns["index"], columns[ROLLOUT_INDEX_KEY], num_repeats)
        shares = [share for share in np.array_split(played, len(self.agent_loop_workers)) if len(share)]
        started = time.monotonic()
        results = await asyncio.gather(
            *[
                worker.generate_sequences.remote(prompts.select_idxs(share))
                for worker, share in zip(self.agent_loop_workers, shares, strict=False)
            ]
        )
        played_episodes = [episode for result in results for episode in result]
        print(summary_line(played_episodes, time.monotonic() - started, prompts.meta_info), flush=True)
        episodes = [played_episodes[i] for i in source]
        self._stop_on_outage(episodes)
        self._stop_on_useless_data(episodes)
        kept = {k: v for k, v in prompts.non_tensor_batch.items() if k not in _STEERING_COLUMNS | _TRAINER_COLUMNS}
        output = assemble(episodes, pad_token_id=self.pad_token_id, passed_on=kept)
        if "__do_sample__" in columns:
            mark_missing_baselines(output, is_greedy=~columns["__do_sample__"].astype(bool))
        output.meta_info["timing"] = _timing(episodes)
        return output

    def _stop_on_useless_data(self, episodes: list[Episode]) -> None:
        if all(e.end_reason is EndReason.PROMPT_TOO_LONG for e in episodes):
            limit = self.config.data.max_prompt_length
            raise PromptTooLongError(
                f"none of the {len(episodes)} first prompts of the batch fits data.max_prompt_length={limit}, so "
                "there is nothing to train on: raise it, shorten the task prompt and tools, or set data.truncation"
            )

    def _stop_on_outage(self, episodes: list[Episode]) -> None:
        failures = [e.failure for e in episodes if e.failure is not None]
        if not failures:
            return
        share = len(failures) / len(episodes)
        limit = self.config.env.max_failed_fraction
        text = f"{len(failures)} of {len(episodes)} episodes failed ({share:.0%}); the last one: {failures[-1]}"
        if share > limit:
            raise TooManyFailedEpisodesError(
                f"{text}. This is more than env.max_failed_fraction={limit:g}: mend the environment service and resume"
            )
        logger.warning("%s. Their rows are masked out", text)

    @auto_await
    async def close(self) -> None:
        """Close every environment that a worker still holds. A worker that is gone does not keep the others from it."""
        closing = [worker.close.remote() for worker in self.agent_loop_workers]
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("an agent worker left its environments to the service's idle limit: %s", result)


def _rollout_indices(row_indices: np.ndarray) -> np.ndarray:
    """How often each row has come before: 0 for its first repetition, 1 for the second, ..."""
    seen: dict[Any, int] = {}
    counts = np.zeros(len(row_indices), dtype=np.int64)
    for i, row_index in enumerate(row_indices):
        counts[i] = seen.get(row_index, 0)
        seen[row_index] = counts[i] + 1
    return counts


def _rows_to_play(
    row_indices: np.ndarray, rollout_indices: np.ndarray, num_repeats: int | None
) -> tuple[np.ndarray, list[int]]:
    """Rows that need an episode of their own, and for every row which of these episodes is its.

    verl pads a validation batch to the number of workers with copies of its first rows. A copy is a repetition beyond
    `num_repeats`; it takes the episode of the row that it copies instead of playing on the service once more.

    Args:
        row_indices: Row number in the data set, shape (B,).
        rollout_indices: Repetition of that row, shape (B,).
        num_repeats: True repetitions of each row; None when no row is a copy.

    Returns:
        played: Positions to play, in order.
        source: For each of the B rows, a position in `played`.
    """
    if num_repeats is None:
        return np.arange(len(row_indices)), list(range(len(row_indices)))
    played = np.flatnonzero(rollout_indices < num_repeats)
    place = {(row_indices[i], rollout_indices[i]): k for k, i in enumerate(played)}
    source = [place[row, rollout % num_repeats] for row, rollout in zip(row_indices, rollout_indices, strict=True)]
    return played, source


def _timing(episodes: list[Episode]) -> dict[str, float]:
    """Seconds per episode, under verl's names where it has them; they become `timing_s/agent_loop/*`."""
    timing = {}
    for name, seconds in (
        ("generate_sequences", np.array([e.stats.generate_s for e in episodes])),
        ("tool_calls", np.array([e.stats.env_s for e in episodes])),
        ("tokenize", np.array([e.stats.tokenize_s for e in episodes])),
    ):
        timing[f"agent_loop/{name}/min"] = float(seconds.min())
        timing[f"agent_loop/{name}/max"] = float(seconds.max())
        timing[f"agent_loop/{name}/mean"] = float(seconds.mean())
    slowest = max(episodes, key=lambda e: e.stats.generate_s + e.stats.env_s)
    timing["agent_loop/slowest/generate_sequences"] = slowest.stats.generate_s
    timing["agent_loop/slowest/tool_calls"] = slowest.stats.env_s
    return timing
