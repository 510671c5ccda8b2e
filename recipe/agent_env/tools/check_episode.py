# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The doctor's episode: random calls, the product's own tokens and limits, and whether they will do for a whole run.

Owns the random policy, the look at one episode's tokens, and the prediction of its length. Refuses to know how rows and
services are checked before.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer, PromptTooLongError
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig, EnvSession, Message
from recipe.agent_env.prompt_styles.base import PromptStyle
from recipe.agent_env.rollout.episode import EndReason, Episode, EpisodeRules, SampledReply, play_episode
from recipe.agent_env.rollout.token_texts import TokenTexts
from recipe.agent_env.tools.check_report import Report
from recipe.agent_env.tools.check_service import check_info, check_messages
from recipe.agent_env.tools.random_calls import random_action
from recipe.agent_env.tools.recorded_client import RecordedEpisode, RecordingClient

_SHOWN_PROMPT_LINES = 60


class RandomPolicy:
    """Says random calls that fit their schemas, in the tokens of a prompt style.

    Args:
        style: How the model family writes.
        tools_schema: What may be called.
        seed: Of its choices.
    """

    def __init__(self, style: PromptStyle, tools_schema: list[dict[str, Any]], *, seed: int):
        self._style = style
        self._tools = tools_schema
        self._rng = random.Random(seed)
        self.unread: list[Message] = []
        """Messages that the style did not read back as they were written."""

    async def __call__(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        action = random_action(self._tools, self._rng)
        ids = encode_reply(self._style, action)
        if _calls(self._style.parse_reply(ids, self._tools).message) != _calls(action):
            self.unread.append(action)
        return SampledReply(ids=ids[:max_tokens])


def encode_reply(style: PromptStyle, action: Message) -> list[int]:
    """The ids that a model would sample to say a message: the style's own rendering of it without the header.

    Args:
        style: Prompt style.
        action: Assistant message.
    """
    header = style.encode_observation([], turn_is_closed=True)
    whole = style.encode_observation([action], turn_is_closed=True, add_header=False)
    num_shared = 0
    while num_shared < min(len(header), len(whole)) and header[num_shared] == whole[num_shared]:
        num_shared += 1
    reply = whole[num_shared:]
    ends = [i for i, token_id in enumerate(reply) if token_id in style.end_of_turn_ids]
    return reply[: ends[0] + 1] if ends else reply


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def play_randomly(
    spec: EpisodeSpec,
    session: EnvSession,
    *,
    tokenizer: EpisodeTokenizer,
    client_config: EnvClientConfig,
    rules: EpisodeRules,
) -> tuple[Episode, RecordedEpisode | None, RandomPolicy]:
    """Play one episode with random calls.

    Args:
        spec: Which episode.
        session: One like it, for its tools.
        tokenizer: Chat to tokens.
        client_config: The service.
        rules: Limits and penalties.

    Returns:
        The episode, what was said (None when no environment was opened), and the policy.
    """
    policy = RandomPolicy(tokenizer.style, session.tools_schema, seed=spec.seed)
    client = AsyncEnvClient(client_config)
    recorder = RecordingClient(client)
    try:
        episode = await play_episode(spec, client=recorder.as_client(), tokenizer=tokenizer, sample=policy, rules=rules)
    finally:
        await client.aclose()
    return episode, (recorder.episodes[-1] if recorder.episodes else None), policy


def check_episode(episode: Episode, record: RecordedEpisode | None, rules: EpisodeRules, report: Report) -> None:
    """How it ended, what the steps said, and how long they took."""
    if episode.end_reason is EndReason.FAILED:
        report.error(
            f"the episode failed: {episode.failure}",
            "mend the service: calls that fit the tools schema must be answered, whatever the move",
        )
        return
    if record is None or not record.steps:
        report.note(f"no step was played ({episode.end_reason.value})")
        return
    steps = record.steps
    report.ok(
        f"an episode of {episode.num_assistant_turns} random turns ended as {episode.end_reason.value}, "
        f"return {episode.episode_return:+g}"
    )
    seconds = [step.seconds for step in steps]
    report.note(f"a step takes {1000 * float(np.mean(seconds)):.0f} ms, the slowest {1000 * max(seconds):.0f} ms")
    for step in steps:
        check_messages(step.result.observation, report)
        is_over = step.result.terminated or step.result.truncated
        if not is_over and not step.result.observation:
            report.warn("a step was answered with an empty observation", "the model learns nothing of what it did")
        asked = {call["id"] for call in step.action["tool_calls"]}
        strange = [
            m.get("tool_call_id")
            for m in step.result.observation
            if m["role"] == "tool" and m.get("tool_call_id") not in asked
        ]
        if strange and asked:
            report.warn(
                f"a tool message answers {strange[0]!r}, which was not called",
                "give tool messages the tool_call_id of the call that they answer",
            )
            break
    last = steps[-1].result
    check_info(last.info, report)
    if episode.success is None:
        report.warn(
            f"the last step's info has no {rules.success_key!r}: there will be no success rate",
            "put it into info at the end, name another key with env.success_key, or set "
            "env.success_on_termination=true when ending is solving",
        )
    if all(step.result.reward == 0 for step in steps):
        report.note("no step of this episode paid anything; with sparse rewards a random policy may never see one")


def check_first_prompts(
    sessions: Sequence[tuple[EpisodeSpec, EnvSession]], tokenizer: EpisodeTokenizer, limit: int, report: Report
) -> None:
    """Whether the first prompts fit.

    Args:
        sessions: Opened rows.
        tokenizer: Chat to tokens.
        limit: `data.max_prompt_length`.
        report: Where findings go.
    """
    lengths = []
    for spec, session in sessions:
        try:
            ids, was_cut = tokenizer.first_prompt(session.task_prompt, session.observation, session.tools_schema)
        except PromptTooLongError as exc:
            report.error(
                f"{spec.env_name} seed {spec.seed}: {exc}",
                "raise data.max_prompt_length, or let data.truncation cut the observation (left, right, middle)",
            )
            continue
        lengths.append(len(ids))
        if was_cut:
            report.warn(
                f"{spec.env_name} seed {spec.seed}: the first observation is cut to data.max_prompt_length={limit}",
                "raise data.max_prompt_length",
            )
    if lengths:
        report.ok(f"first prompts of {len(lengths)} rows: {min(lengths)} to {max(lengths)} tokens, {limit} allowed")


def check_budget(
    episode: Episode, record: RecordedEpisode, tokenizer: EpisodeTokenizer, rules: EpisodeRules, report: Report
) -> None:
    """Whether `env.max_turn` turns fit into `data.max_prompt_length`, with short and with the longest replies.

    Turn k reads the prompt and k - 1 replies and observations; observations are taken to be as long as in this episode.
    """
    deltas = [len(tokenizer.observation_delta(step.result.observation, [])[0]) for step in record.steps]
    replies = _span_lengths(episode.response_mask)
    if not deltas or not replies:
        return
    num_prompt, delta, reply = len(episode.prompt_ids), float(np.mean(deltas)), float(np.mean(replies))
    limit, max_turn = rules.max_prompt_length, rules.max_turn
    report.note(
        f"tokens: first prompt {num_prompt}, a bare call {reply:.0f}, an observation {delta:.0f} "
        f"(longest {max(deltas)})"
    )
    for length, what in ((reply, "bare calls"), (rules.max_response_length, "replies at data.max_response_length")):
        needed = int(np.ceil(num_prompt + (max_turn - 1) * (length + delta)))
        if needed > limit:
            num_fitting = max(1, int((limit - num_prompt) // (length + delta)) + 1)
            report.warn(
                f"with {what} about {num_fitting} of env.max_turn={max_turn} turns fit into "
                f"data.max_prompt_length={limit}; longer episodes end as context_full",
                f"data.max_prompt_length={needed} takes them all; or lower env.max_turn or data.max_response_length, "
                "or set env.max_observation_tokens",
            )
            return
    report.ok(f"env.max_turn={max_turn} turns of the longest replies fit into data.max_prompt_length={limit}")


def _span_lengths(mask: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return [int(stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def show_prompt(episode: Episode, tokenizer: EpisodeTokenizer, report: Report, *, is_full: bool) -> None:
    """The first prompt as the model reads it, control tokens told apart from text that looks like them."""
    text = token_text(tokenizer.style.tokenizer, episode.prompt_ids.tolist())
    lines = text.split("\n", allow_blank=True)
    if not is_full and len(lines) > _SHOWN_PROMPT_LINES:
        half = _SHOWN_PROMPT_LINES // 2
        gap = Text(f"... {len(lines) - 2 * half} lines more (--full shows them) ...", style="yellow")
        lines = type(lines)([*lines[:half], gap, *lines[-half:]])
    report.note(f"the first prompt, {len(episode.prompt_ids)} tokens (magenta: control tokens):")
    report.show(Text("\n").join(lines))


def show_turn(episode: Episode, tokenizer: EpisodeTokenizer, report: Report) -> None:
    """The first turn and its answer: green is mask 1, grey is mask 0, a reward stands behind the token that gets it."""
    mask = episode.response_mask
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    if not len(edges):
        return
    stop = int(edges[2]) if len(edges) > 2 else len(mask)
    text = token_text(
        tokenizer.style.tokenizer,
        episode.response_ids[:stop].tolist(),
        mask=mask[:stop].tolist(),
        rewards=episode.rewards[:stop].tolist(),
    )
    report.note(
        "the first turn (green: mask 1, sampled and trained on; grey: mask 0; a reward stands behind its token):"
    )
    report.show(text)


def token_text(
    tokenizer: Any, ids: list[int], *, mask: list[int] | None = None, rewards: list[float] | None = None
) -> Text:
    """Token ids as coloured text.

    Args:
        tokenizer: Hugging Face tokenizer.
        ids: Token ids.
        mask: 1 where sampled; None: all 0.
        rewards: Per token; None: all 0.
    """
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    text = Text()
    for i, (token_id, content) in enumerate(zip(ids, TokenTexts(tokenizer)(ids), strict=True)):
        is_sampled = mask is not None and mask[i] == 1
        styles = [("black on green3", "black on spring_green3")[i % 2] if is_sampled else "grey58"]
        if token_id in added:
            styles.append("bold magenta" if not is_sampled else "bold")
        text.append(content, style=" ".join(styles))
        if rewards is not None and rewards[i] != 0:
            text.append(f" {rewards[i]:+g} ", style="bold white on red3" if rewards[i] < 0 else "bold white on blue3")
    return text
