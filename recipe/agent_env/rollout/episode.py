# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One episode: a conversation between the policy and one environment, from the first prompt to its end.

Owns the order of events, who is to blame for an end, and that every opened environment is closed. It composes the
environment client, the prompt style and a sampler; it knows nothing of Ray, verl or any engine, so a scripted policy
plays the same episodes in tests.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer, PromptTooLongError
from recipe.agent_env.env_client import AsyncEnvClient, AsyncEnvSession, EnvError, Message
from recipe.agent_env.prompt_styles.errors import PromptStyleError
from recipe.agent_env.rollout.ledger import TokenLedger

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class EndReason(str, Enum):
    """How an episode ended; the same word in code, metrics, dumps and docs."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURN = "max_turn"
    CONTEXT_FULL = "context_full"
    PARSE_ERROR = "parse_error"
    REPLY_CUT = "reply_cut"
    PROMPT_TOO_LONG = "prompt_too_long"
    FAILED = "failed"


TRUNCATION_REASONS = frozenset({EndReason.ENV_TRUNCATED, EndReason.MAX_TURN, EndReason.CONTEXT_FULL})
"""Ends where the task went on: we or the service stopped it."""


UNPLAYED_REASONS = frozenset({EndReason.FAILED, EndReason.PROMPT_TOO_LONG})
"""Ends that say nothing about the policy: such a row is never trained on and counts nowhere."""


class EngineError(RuntimeError):
    """The inference engine gave no usable reply: the row carries no learning signal."""


class EngineLostError(RuntimeError):
    """The inference engine is gone for good. This ends the run: masking row after row would only hide it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """What the engine returned for one turn."""

    ids: list[int]
    """Sampled token ids, the end token included where one was sampled."""
    log_probs: list[float] | None = None
    """Log-probability of each id under the sampling policy; None where the engine gives none."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine took from its prefix cache; None where it does not say."""


Sampler = Callable[[list[int], int, int], Awaitable[SampledReply]]
"""`await sample(context_ids, max_tokens, turn)`: one reply of the policy; `turn` counts from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """The limits and penalties of an episode; `data.*` and `env.*` of the config."""

    max_prompt_length: int
    """Longest context read on any turn, in tokens."""
    max_response_length: int
    """Longest reply of one turn, in tokens."""
    max_turn: int
    """Most assistant turns."""
    tool_parsing_error_reward: float
    """Added to the reward of a turn with a policy mistake."""
    on_parse_error: str
    """`feedback` or `terminate`."""
    success_key: str
    """Key of the last step's `info` that says whether the episode was solved."""
    success_on_termination: bool
    """Whether `terminated` counts as solved where `info` lacks the key."""
    max_episode_restarts: int
    """How often a failed episode is played again."""
    episode_timeout_s: float
    """Longest duration of one attempt, in seconds."""
    overlong_reward: float
    """Added to the last turn's reward when our turn or context limit ends the episode."""
    masked_end_reasons: frozenset[EndReason]
    """Ends whose rows carry no learning signal, besides those that never do."""
    bootstrap_on_truncation: bool
    """Whether a truncated episode keeps its last observation, so that the critic can value the state it was cut in."""
    record_renderings: bool = False
    """Whether each state is asked for as the environment shows it to people, for the dump."""

    def __post_init__(self):
        if self.on_parse_error not in ("feedback", "terminate"):
            raise ValueError(f"env.on_parse_error: expected 'feedback' or 'terminate', got {self.on_parse_error!r}")
        for name in ("max_prompt_length", "max_response_length", "max_turn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True, slots=True)
class EpisodeStats:
    """Counts and seconds of one attempt; they become `env/*` metrics."""

    num_env_steps: int = 0
    """Steps that the service answered."""
    num_tool_calls: int = 0
    """Tool calls that were sent."""
    num_parse_errors: int = 0
    """Turns whose tool calls could not be sent: broken, unknown tool or wrong arguments."""
    num_replies_cut: int = 0
    """Turns cut by the reply limit."""
    num_empty_replies: int = 0
    """Turns without text and without a call."""
    num_observations_cut: int = 0
    """Observations shortened to `env.max_observation_tokens`, and first prompts shortened by `data.truncation`."""
    num_cached_tokens: int = 0
    """Prompt tokens of turns 2 and up that the engine took from its prefix cache."""
    num_reread_tokens: int = 0
    """Prompt tokens of turns 2 and up that had been read or sampled on the turn before."""
    generate_s: float = 0.0
    """Waiting for the engine."""
    env_s: float = 0.0
    """Waiting for the service."""
    tokenize_s: float = 0.0
    """Turning chat into tokens and replies into calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One finished episode, ready for batch assembly. P prompt tokens, R response tokens."""

    prompt_ids: np.ndarray
    """int32, shape (P,); empty when no prompt could be made."""
    response_ids: np.ndarray
    """int32, shape (R,)."""
    response_mask: np.ndarray
    """int8, shape (R,); 1 = sampled by the policy."""
    log_probs: np.ndarray | None
    """float32, shape (R,); the engine's, 0 where the mask is 0. None where the engine gave none."""
    rewards: np.ndarray
    """float32, shape (R,); each turn's reward on its last sampled token."""
    engine_ids: np.ndarray
    """int32; all ids that the engine returned, in order, written down at the sampler and not by the ledger."""
    episode_return: float
    """Sum of what the service paid and our penalties, added up as they came and not from `rewards`."""
    end_reason: EndReason
    """How the episode ended."""
    success: float | None
    """1.0 solved, 0.0 not, None where the environment does not say."""
    num_assistant_turns: int
    """Turns of the policy."""
    num_restarts: int
    """Attempts before this one that failed."""
    failure: str | None
    """Text of the last error, for end reason `failed`; never for the model."""
    service: str | None
    """Name and version that the service declared, where it did."""
    stats: EpisodeStats
    """Counts and seconds."""
    is_withheld: bool = False
    """Whether `env.masked_end_reasons` keeps this played episode out of training."""
    is_bootstrapped: bool = False
    """Whether the response goes on, with mask 0, to the end of the last observation and one placeholder token."""
    renderings: list[str] = field(default_factory=list)
    """The start and the state after each turn, as the environment shows them to people; "" where it does not."""

    @property
    def is_masked(self) -> bool:
        """Whether the row carries no learning signal: it failed, nothing was sampled, or its end is masked."""
        never_played = self.end_reason in UNPLAYED_REASONS or len(self.engine_ids) == 0
        return never_played or self.is_withheld


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """What one attempt has gathered so far."""

    ledger: TokenLedger | None = None
    turn: int = 0
    engine_ids: list[int] = field(default_factory=list)
    episode_return: float = 0.0
    last_info: dict[str, Any] = field(default_factory=dict)
    service: str | None = None
    is_bootstrapped: bool = False
    renderings: list[str] = field(default_factory=list)
    stats: EpisodeStats = field(default_factory=EpisodeStats)

    def pay(self, reward: float) -> None:
        assert self.ledger is not None
        self.ledger.add_reward(reward)
        self.episode_return += reward


async def play_episode(
    spec: EpisodeSpec,
    *,
    client: AsyncEnvClient,
    tokenizer: EpisodeTokenizer,
    sample: Sampler,
    rules: EpisodeRules,
    deadline: float | None = None,
) -> Episode:
    """Play one episode to its end, again from its start after a fault of the service or engine.

    Args:
        spec: What to play.
        client: Open connection to the service.
        tokenizer: Chat to tokens and replies to tool calls.
        sample: The policy.
        rules: Limits and penalties.
        deadline: End of the batch's time on the clock of `time.monotonic`, None for no end; an episode that is not over
            by then has failed.

    Returns:
        The episode. A fault that outlasts `rules.max_episode_restarts` is an episode with end reason `failed`, not an
        exception, so that it cannot touch another row.

    Raises:
        EngineLostError: No episode can be played any more.
    """
    failure = ""
    for num_restarts in range(rules.max_episode_restarts + 1):
        attempt = _Attempt()
        try:
            reason = await asyncio.wait_for(
                _play_attempt(spec, attempt, client=client, tokenizer=tokenizer, sample=sample, rules=rules),
                timeout=None if deadline is None else deadline - time.monotonic(),
            )
            return _finish(attempt, reason, rules=rules, num_restarts=num_restarts)
        except EngineLostError:
            raise
        except (EnvError, EngineError, PromptStyleError) as exc:
            failure = f"{type(exc).__name__}: {exc}"
        except asyncio.TimeoutError:
            if _is_past(deadline):
                failure = "the batch took longer than env.batch_timeout_s"
            else:
                failure = f"the episode took longer than env.episode_timeout_s={rules.episode_timeout_s:g} s"
        except Exception as exc:  # an unforeseen fault masks this row and is counted; it must not end the others' run
            failure = f"{type(exc).__name__}: {exc}"
            if client.is_closed:
                break  # the run is ending, which is no fault of anyone's
            logger.exception("episode %s failed on an unforeseen error", spec)
        failure = f"{failure} [episode {spec.env_name!r} seed {spec.seed}, turn {attempt.turn}]"
        logger.warning("attempt %d of %d failed: %s", num_restarts + 1, rules.max_episode_restarts + 1, failure)
        if _is_past(deadline):
            break
    failed = _Attempt(service=attempt.service)
    return _finish(failed, EndReason.FAILED, rules=rules, num_restarts=num_restarts, failure=failure)


def _is_past(deadline: float | None) -> bool:
    """Whether the batch's time is over."""
    return deadline is not None and time.monotonic() >= deadline


async def _play_attempt(
    spec: EpisodeSpec,
    attempt: _Attempt,
    *,
    client: AsyncEnvClient,
    tokenizer: EpisodeTokenizer,
    sample: Sampler,
    rules: EpisodeRules,
) -> EndReason:
    """Open the environment, play, and close it whatever happens.

    Waiting for a free place does not count towards the time limit; the calls of `open` have limits of their own.
    """
    with _Stopwatch(attempt.stats, "env_s"):
        session = await client.open(env_name=spec.env_name, seed=spec.seed, env_kwargs=spec.env_kwargs)
    try:
        attempt.service = f"{session.capabilities.name} {session.capabilities.version}".strip() or None
        return await asyncio.wait_for(
            _play_opened(spec, attempt, session, tokenizer=tokenizer, sample=sample, rules=rules),
            timeout=rules.episode_timeout_s,
        )
    finally:
        session.close_soon()  # a service that hangs in close must not hold up the episode; the client sees to the rest


async def _play_opened(
    spec: EpisodeSpec,
    attempt: _Attempt,
    session: AsyncEnvSession,
    *,
    tokenizer: EpisodeTokenizer,
    sample: Sampler,
    rules: EpisodeRules,
) -> EndReason:
    """The first prompt, then the turns."""
    try:
        with _Stopwatch(attempt.stats, "tokenize_s"):
            prompt_ids, was_cut = tokenizer.first_prompt(session.task_prompt, session.observation, session.tools_schema)
    except PromptTooLongError as exc:
        logger.warning("%s [episode %r seed %s]", exc, spec.env_name, spec.seed)
        return EndReason.PROMPT_TOO_LONG
    attempt.stats.num_observations_cut += was_cut
    attempt.ledger = TokenLedger(prompt_ids)
    if session.is_terminated:
        return EndReason.TERMINATED
    return await _play_turns(attempt, session, tokenizer=tokenizer, sample=sample, rules=rules)


async def _play_turns(
    attempt: _Attempt, session: AsyncEnvSession, *, tokenizer: EpisodeTokenizer, sample: Sampler, rules: EpisodeRules
) -> EndReason:
    """Turn by turn until something ends the episode."""
    assert attempt.ledger is not None
    await _record_rendering(attempt, session, rules)
    for turn in range(rules.max_turn):
        attempt.turn = turn + 1
        reply_ids = await _sample_turn(attempt, turn, sample=sample, rules=rules)
        observation, end_reason = await _answer_turn(attempt, session, reply_ids, tokenizer=tokenizer, rules=rules)
        await _record_rendering(attempt, session, rules)
        if end_reason is None and turn + 1 == rules.max_turn:
            end_reason = EndReason.MAX_TURN
        if end_reason is None or (rules.bootstrap_on_truncation and end_reason in TRUNCATION_REASONS):
            with _Stopwatch(attempt.stats, "tokenize_s"):
                written_ids, was_cut = tokenizer.observation_delta(observation, reply_ids)
            attempt.stats.num_observations_cut += was_cut
            num_context_tokens = attempt.ledger.num_context_tokens + len(written_ids)
            if end_reason is None and num_context_tokens > rules.max_prompt_length:
                end_reason = EndReason.CONTEXT_FULL
            if end_reason is None:
                attempt.ledger.add_written(written_ids)
                continue
            if rules.bootstrap_on_truncation:
                _keep_last_state(attempt, written_ids, rules)
        if end_reason in (EndReason.MAX_TURN, EndReason.CONTEXT_FULL) and rules.overlong_reward != 0:
            attempt.pay(rules.overlong_reward)
        return end_reason
    raise AssertionError("unreachable: the last turn returns")


async def _record_rendering(attempt: _Attempt, session: AsyncEnvSession, rules: EpisodeRules) -> None:
    """Ask how the state looks; a picture that fails is left out, it must not cost an episode."""
    if not rules.record_renderings:
        return
    try:
        with _Stopwatch(attempt.stats, "env_s"):
            attempt.renderings.append(await session.render())
    except EnvError as exc:
        attempt.renderings.append("")
        logger.warning("no rendering: %s", exc)


def _keep_last_state(attempt: _Attempt, written_ids: list[int], rules: EpisodeRules) -> None:
    """Append the observation that no turn answers any more, and one placeholder token after it.

    verl's value at a position is that of the state before its token, so the placeholder's is that of everything read.
    What would make the row longer than a row may be is left out: that episode then counts as if it had ended by itself.
    """
    assert attempt.ledger is not None
    num_tokens = attempt.ledger.num_context_tokens + len(written_ids) + 1
    if num_tokens <= rules.max_prompt_length + rules.max_response_length:
        attempt.ledger.add_written([*written_ids, written_ids[-1]])
        attempt.is_bootstrapped = True


async def _sample_turn(attempt: _Attempt, turn: int, *, sample: Sampler, rules: EpisodeRules) -> list[int]:
    """One reply of the policy, entered into the ledger."""
    ledger, stats = attempt.ledger, attempt.stats
    assert ledger is not None
    num_known_tokens = ledger.num_prompt_tokens + ledger.spans[-1].stop if turn > 0 else 0
    with _Stopwatch(stats, "generate_s"):
        reply = await sample(list(ledger.context_ids), rules.max_response_length, turn)
    if not reply.ids:
        raise EngineError(f"expected at least one sampled token on turn {turn + 1}, the engine returned none")
    if len(reply.ids) > rules.max_response_length:
        raise EngineError(
            f"expected at most data.max_response_length={rules.max_response_length} sampled tokens on turn {turn + 1}, "
            f"the engine returned {len(reply.ids)}: it does not honour max_tokens"
        )
    ledger.add_sampled(reply.ids, reply.log_probs)
    attempt.engine_ids.extend(reply.ids)
    if turn > 0 and reply.num_cached_tokens is not None:
        stats.num_reread_tokens += num_known_tokens
        stats.num_cached_tokens += min(reply.num_cached_tokens, num_known_tokens)
    return reply.ids


async def _answer_turn(
    attempt: _Attempt,
    session: AsyncEnvSession,
    reply_ids: list[int],
    *,
    tokenizer: EpisodeTokenizer,
    rules: EpisodeRules,
) -> tuple[list[Message], EndReason | None]:
    """The environment's answer to one reply, or ours where the reply is a policy mistake.

    Returns:
        observation: Messages for the model; empty when the episode ended by itself.
        end_reason: None while the episode goes on.
    """
    stats = attempt.stats
    if len(reply_ids) >= rules.max_response_length and not tokenizer.style.is_reply_complete(reply_ids):
        stats.num_replies_cut += 1
        text = (
            f"The reply was cut at its limit of {rules.max_response_length} tokens and nothing of it was carried out."
        )
        return _blame_policy(attempt, EndReason.REPLY_CUT, text, rules=rules)

    with _Stopwatch(stats, "tokenize_s"):
        reply = tokenizer.style.parse_reply(reply_ids, session.tools_schema)
        error = reply.error.text if reply.error else session.check_tool_calls(reply.message)
    if error is not None:
        stats.num_parse_errors += 1
        return _blame_policy(attempt, EndReason.PARSE_ERROR, error, rules=rules)

    action, refused = _split_parallel_calls(reply.message, session.allow_parallel_tool_call)
    stats.num_tool_calls += len(action["tool_calls"])
    stats.num_empty_replies += not action["tool_calls"] and not action["content"].strip()
    with _Stopwatch(stats, "env_s"):
        result = await session.step(action)
    stats.num_env_steps += 1
    attempt.pay(result.reward)
    attempt.last_info = result.info
    if result.terminated:
        return [], EndReason.TERMINATED
    observation = _after_tool_messages(result.observation, refused)
    return observation, EndReason.ENV_TRUNCATED if result.truncated else None


def _blame_policy(
    attempt: _Attempt, reason: EndReason, text: str, *, rules: EpisodeRules
) -> tuple[list[Message], EndReason | None]:
    """Penalise the turn; show the error to the model or end the episode. Nothing goes to the service."""
    attempt.pay(rules.tool_parsing_error_reward)
    if rules.on_parse_error == "terminate":
        return [], reason
    return [{"role": "user", "content": f"Error: {text}"}], None


def _split_parallel_calls(message: Message, allow_parallel: bool) -> tuple[Message, list[Message]]:
    """The action to send, and a tool error message for each call that this environment does not take in one turn."""
    calls = message["tool_calls"]
    if allow_parallel or len(calls) <= 1:
        return message, []
    text = "Error: this environment takes one tool call per turn; only the first call was carried out."
    refused = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
        for call in calls[1:]
    ]
    return {**message, "tool_calls": calls[:1]}, refused


def _after_tool_messages(observation: list[Message], refused: list[Message]) -> list[Message]:
    """Put our tool errors right after the environment's own leading tool messages, as one block of tool results."""
    num_leading = next((i for i, m in enumerate(observation) if m["role"] != "tool"), len(observation))
    return observation[:num_leading] + refused + observation[num_leading:]


def _finish(
    attempt: _Attempt, reason: EndReason, *, rules: EpisodeRules, num_restarts: int, failure: str | None = None
) -> Episode:
    """Freeze an attempt into an episode."""
    ledger = attempt.ledger
    empty = np.zeros(0, dtype=np.int32)
    return Episode(
        prompt_ids=ledger.prompt() if ledger else empty,
        response_ids=ledger.response() if ledger else empty,
        response_mask=ledger.response_mask() if ledger else empty.astype(np.int8),
        log_probs=ledger.log_probs() if ledger else empty.astype(np.float32),
        rewards=ledger.rewards() if ledger else empty.astype(np.float32),
        engine_ids=np.asarray(attempt.engine_ids, dtype=np.int32),
        episode_return=attempt.episode_return,
        end_reason=reason,
        success=_success(attempt, reason, rules),
        num_assistant_turns=len(ledger.spans) if ledger else 0,
        num_restarts=num_restarts,
        failure=failure,
        service=attempt.service,
        stats=attempt.stats,
        is_withheld=reason in rules.masked_end_reasons,
        is_bootstrapped=attempt.is_bootstrapped,
        renderings=attempt.renderings,
    )


def _success(attempt: _Attempt, reason: EndReason, rules: EpisodeRules) -> float | None:
    """The environment's own word on whether the episode was solved."""
    if reason in UNPLAYED_REASONS:
        return None
    said = attempt.last_info.get(rules.success_key)
    if isinstance(said, bool | int | float):
        return float(bool(said))
    if rules.success_on_termination:
        return float(reason is EndReason.TERMINATED)
    return None


class _Stopwatch:
    """Adds the seconds of a `with` block to one field of the stats."""

    def __init__(self, stats: EpisodeStats, field_name: str):
        self._stats, self._field_name = stats, field_name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        elapsed = time.perf_counter() - self._started
        setattr(self._stats, self._field_name, getattr(self._stats, self._field_name) + elapsed)
