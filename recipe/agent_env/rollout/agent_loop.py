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

from recipe.agent_env.agent_dataset import AgentDataset, EpisodeSpec, EpisodeTokenizer, PromptTooLongError
from recipe.agent_env.config_checks import check_stop_strings
from recipe.agent_env.env_client import AsyncEnvClient
from recipe.agent_env.episode_settings import env_client_config, episode_rules
from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.rollout.batch import VALIDATION_KEYS, assemble, mark_missing_baselines, object_array
from recipe.agent_env.rollout.dump import dump_columns
from recipe.agent_env.rollout.episode import (
    EndReason,
    EngineError,
    EngineLostError,
    Episode,
    SampledReply,
    play_episode,
)
from recipe.agent_env.rollout.progress import RolloutProgress, summary_line
from recipe.agent_env.rollout.refill import SpareRows, filter_metrics, flat_groups, withhold

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


class RunStoppedError(RuntimeError):
    """The run was told to stop: episodes were broken off, and no more are played."""


class EngineSampler:
    """The policy: one episode's requests to verl's inference servers, token-in/token-out.

    Args:
        llm_client: verl's client; sends all requests with one `request_id` to one replica, for its prefix cache.
        sampling_params: Temperature and the like, as verl's worker composed them.
        style: Names the token ids and strings that end a reply.
        priority: Of vLLM's scheduler; lower is first.
        progress: Counts what is sampled.
        seed_key: What the sampling of this episode is seeded by, with the turn; None leaves it to the engine.
    """

    def __init__(
        self,
        llm_client: LLMServerClient,
        sampling_params: dict[str, Any],
        *,
        style: PromptStyle,
        priority: int,
        progress: RolloutProgress,
        seed_key: tuple[int, ...] | None = None,
    ):
        self._llm_client = llm_client
        self._sampling_params = {**sampling_params, "stop_token_ids": list(style.stop_token_ids)}
        if style.stop:
            # Looked for in the text as the style itself reads it, special tokens spelled out.
            self._sampling_params |= {"stop": list(style.stop), "skip_special_tokens": False}
        self._request_id = uuid4().hex if seed_key is None else f"det-{'-'.join(map(str, seed_key))}"
        self._priority = priority
        self._progress = progress
        self._seed_key = seed_key

    async def __call__(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        """Sample one reply.

        Raises:
            EngineError: The engine failed or aborted the request.
            EngineLostError: The engine is gone: its actor, or the process behind it.
        """
        params = {**self._sampling_params, "max_tokens": max_tokens}
        if self._seed_key is not None:
            params["seed"] = derived_seed(*self._seed_key, turn)
        try:
            output = await self._llm_client.generate(
                request_id=self._request_id,
                prompt_ids=context_ids,
                sampling_params=params,
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


def derived_seed(*key: int) -> int:
    """A seed: the same for the same key, unrelated for another; 0 to 2**31 - 1, which every engine takes.

    Args:
        *key: Whole numbers of at least 0.
    """
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


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
        self._playing: set[asyncio.Future[list[Episode]]] = set()
        self._is_stopped = False

    async def progress(self) -> dict[str, int]:
        """What is counted of the present rollout, or of the last one; see `RolloutProgress`."""
        return self._progress.snapshot()

    async def generate_sequences(self, batch: DataProto) -> list[Episode]:
        """Play one episode per row.

        Args:
            batch: Columns `env_name`, `seed`, `env_kwargs` and what else `AgentDataset` gives.

        Returns:
            Episodes in row order, unpadded.

        Raises:
            RunStoppedError: `stop` was called.
        """
        if self._is_stopped:
            raise RunStoppedError("the run was told to stop")
        if self._client is None:  # made here: it belongs to the running event loop
            self._client = AsyncEnvClient(self._client_config)
        limit_s = self.config.env.batch_timeout_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._progress.begin(len(batch))
        playing = asyncio.ensure_future(super().generate_sequences(batch))
        self._playing.add(playing)
        try:
            return await playing
        except asyncio.CancelledError:
            if self._is_stopped:
                raise RunStoppedError("the run was told to stop; its episodes were broken off") from None
            raise
        finally:
            self._playing.discard(playing)

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
                seed_key=self._seed_key(trajectory, row),
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

    def _seed_key(self, trajectory: dict[str, Any], row: dict[str, Any]) -> tuple[int, ...] | None:
        """Row, repetition and step, where `rollout.full_determinism` asks for it.

        verl's own seed is one for all requests of a replica: rollouts of one row would be copies of each other.
        """
        if not self.rollout_config.full_determinism:
            return None
        step, is_validation = max(0, trajectory["step"]), int(trajectory["validate"])
        return (self.rollout_config.seed, is_validation, step, int(row["index"]), int(row[ROLLOUT_INDEX_KEY]))

    def _postprocess(
        self, inputs: list[Episode], input_non_tensor_batch: dict | None = None, validate: bool = False
    ) -> list[Episode]:
        """Hand the episodes on as they are: the manager pads once, to the longest row of the whole batch."""
        return inputs

    async def stop(self) -> None:
        """Break off all episodes, close their environments, and play no more."""
        self._is_stopped = True
        for playing in self._playing:
            playing.cancel()
        await self.close()

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
        self.services: set[str] = set()
        """Name and version of every environment that was played on, where it declares them."""
        self.known_services: frozenset[str] = frozenset()
        """Those of the checkpoint that the run goes on from; the trainer puts them here."""
        self.steps_per_epoch = 1
        """Batches of an epoch; the trainer puts them here."""
        self.tokenizer: Any = None
        """For the text of dumps; the trainer puts it here."""
        self.train_dataset: AgentDataset | None = None
        """Where rows for `algorithm.filter_groups` come from; the trainer puts it here."""

    @auto_await
    @SkipManager.annotate(role="rollout")
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Play one episode per row; any number of rows on any number of workers.

        Args:
            prompts: Rows of `AgentDataset`.

        Returns:
            See `assemble`; rows in the order of `prompts`.

        Raises:
            RunStoppedError: A worker was told to stop.
            TooManyFailedEpisodesError: The failed share of the batch is above `env.max_failed_fraction`.
            PromptTooLongError: No first prompt of the batch fits.
        """
        columns = prompts.non_tensor_batch
        columns["priority"] = np.arange(len(prompts), dtype=np.int64)
        columns[ROLLOUT_INDEX_KEY] = _rollout_indices(columns["index"])
        is_validation = bool(prompts.meta_info.get("validate"))
        num_repeats = self.rollout_config.val_kwargs.n if is_validation else None
        if not is_validation:
            self._reseed(prompts, np.arange(len(prompts)))
        played, source = _rows_to_play(columns["index"], columns[ROLLOUT_INDEX_KEY], num_repeats)
        played_episodes = await self._play(prompts.select_idxs(played))
        episodes = [played_episodes[i] for i in source]
        self._stop_on_outage(episodes)
        self._stop_on_useless_data(episodes)
        self._note_services(episodes)
        filter_groups = self.config.algorithm.filter_groups
        is_filtered = bool(filter_groups and filter_groups.enable) and not is_validation
        meta_info = await self._refill(prompts, episodes) if is_filtered else {}
        kept = {k: v for k, v in prompts.non_tensor_batch.items() if k not in _STEERING_COLUMNS | _TRAINER_COLUMNS}
        output = assemble(episodes, pad_token_id=self.pad_token_id, passed_on=kept)
        if "__do_sample__" in columns:
            mark_missing_baselines(output, is_greedy=~columns["__do_sample__"].astype(bool))
        output.meta_info.update(meta_info, timing=_timing(episodes))
        if is_validation and self.config.trainer.validation_data_dir:
            self._add_dump(output, columns)
        return output

    def _add_dump(self, output: DataProto, columns: dict[str, np.ndarray]) -> None:
        """Give a validation batch the columns of a dump: verl writes what its metrics are given, and nothing else."""
        output.non_tensor_batch["uid"] = columns["uid"]
        dump = dump_columns(output, self.tokenizer)
        output.non_tensor_batch.update({name: object_array(values) for name, values in dump.items()})
        output.meta_info["reward_extra_keys"] = list(dict.fromkeys([*VALIDATION_KEYS, *dump]))

    async def _play(self, prompts: DataProto) -> list[Episode]:
        """One episode per row, in row order, over all workers."""
        shares = [s for s in np.array_split(np.arange(len(prompts)), len(self.agent_loop_workers)) if len(s)]
        started = time.monotonic()
        results = await asyncio.gather(
            *[
                worker.generate_sequences.remote(prompts.select_idxs(share))
                for worker, share in zip(self.agent_loop_workers, shares, strict=False)
            ]
        )
        played = [episode for result in results for episode in result]
        print(summary_line(played, time.monotonic() - started, prompts.meta_info), flush=True)
        return played

    def _reseed(self, prompts: DataProto, positions: np.ndarray) -> None:
        """Give these rows the seeds of their epoch, in place, where `env.reseed_each_epoch` asks for it.

        The first epoch's are the data's own. Rollouts of one row share theirs, and a resumed run gets the same.
        """
        epoch = (prompts.meta_info.get("global_steps", 1) - 1) // self.steps_per_epoch
        if not self.config.env.reseed_each_epoch or epoch < 1:
            return
        seeds = prompts.non_tensor_batch["seed"].copy()
        for position in positions:
            seeds[position] = derived_seed(int(seeds[position]) % 2**63, epoch)
        prompts.non_tensor_batch["seed"] = seeds

    async def _refill(self, prompts: DataProto, episodes: list[Episode]) -> dict[str, float]:
        """Play other rows in the place of groups without spread, as often as allowed; mask the groups that are left.

        Args:
            prompts: The rows that were played; those of replaced groups are changed in place.
            episodes: Theirs; changed in place.

        Returns:
            See `filter_metrics`.

        Raises:
            TooManyFailedEpisodesError: As in `generate_sequences`, over all episodes of the step.
        """
        assert self.train_dataset is not None
        columns, limits = prompts.non_tensor_batch, self.config.algorithm.filter_groups
        for name in columns:
            columns[name] = columns[name].copy()  # rows of other groups come into these
        spare = SpareRows(
            self.train_dataset,
            seed=self.config.data.seed or 0,
            step=prompts.meta_info["global_steps"],
            taken=set(columns["index"].tolist()),
        )
        played, env_names = list(episodes), columns["env_name"].tolist()
        flat = flat_groups(episodes, columns["uid"], limits.metric)
        num_flat, num_rounds = len(flat), 1
        while flat and num_rounds < limits.max_num_gen_batches:
            replaced = spare.put_into(prompts, flat)
            if not replaced:
                break
            positions = np.concatenate(replaced)
            self._reseed(prompts, positions)
            fresh = await self._play(prompts.select_idxs(positions))
            for position, episode in zip(positions, fresh, strict=True):
                episodes[position] = episode
            played += fresh
            env_names += columns["env_name"][positions].tolist()
            self._stop_on_outage(played)
            self._note_services(fresh)
            given_up = len(flat)
            flat = flat_groups(episodes, columns["uid"], limits.metric)
            num_flat += len(flat) - (given_up - len(replaced))
            num_rounds += 1
        withhold(episodes, flat)
        return filter_metrics(
            played,
            env_names,
            num_rounds=num_rounds,
            group_size=self.rollout_config.n,
            num_flat=num_flat,
            num_left=len(flat),
        )

    def _note_services(self, episodes: list[Episode]) -> None:
        """Remember who played, and say so when the checkpoint was made with somebody else."""
        seen = {e.service for e in episodes if e.service is not None} - self.services
        self.services |= seen
        new = sorted(seen - self.known_services)
        if new and self.known_services:
            logger.warning(
                "episodes are played on %s, but the checkpoint was made on %s: numbers may not be comparable",
                ", ".join(new),
                ", ".join(sorted(self.known_services)),
            )

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
