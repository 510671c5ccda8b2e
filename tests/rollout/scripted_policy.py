# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A policy that says what it is told, in place of an engine: the only thing faked in the rollout tests."""

from collections.abc import Sequence
from typing import Any

from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer
from recipe.agent_env.prompt_styles.qwen2_5 import Qwen25Style
from recipe.agent_env.rollout.episode import EpisodeRules, SampledReply
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer

MOVE_UP = '<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call><|im_end|>'
"""A canonical call of the mock server's tool."""


class ScriptedPolicy:
    """Replies turn by turn, the last one again and again.

    Args:
        replies: Text (control tokens are matched), ids as they are, or an exception to raise.
    """

    def __init__(self, replies: Sequence[str | list[int] | Exception]):
        self._replies = list(replies)
        self.contexts: list[list[int]] = []
        """What each turn was asked with."""
        self.limits: list[int] = []
        """`max_tokens` of each turn."""
        self.returned: list[list[int]] = []
        """What each turn was given."""

    async def __call__(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        self.contexts.append(context_ids)
        self.limits.append(max_tokens)
        reply = self._replies[min(turn, len(self._replies) - 1)]
        if isinstance(reply, Exception):
            raise reply
        ids = encode(reply) if isinstance(reply, str) else list(reply)
        ids = ids[:max_tokens]
        self.returned.append(ids)
        return SampledReply(ids=ids, log_probs=[-0.5] * len(ids))


def encode(text: str) -> list[int]:
    """Ids of a text as the model would sample them, control tokens included."""
    return qwen2_5_tokenizer()(text, add_special_tokens=False)["input_ids"]


def decode(ids: Sequence[int]) -> str:
    """Text of ids, control tokens visible."""
    return qwen2_5_tokenizer().decode([int(i) for i in ids])


def make_tokenizer(
    *,
    max_prompt_length: int = 4096,
    truncation: str = "error",
    max_observation_tokens: int | None = None,
    stop: Sequence[str] = (),
    observation_truncation: str = "middle",
) -> EpisodeTokenizer:
    """The product's own path from chat to tokens, with the real Qwen vocabulary."""
    return EpisodeTokenizer(
        Qwen25Style(qwen2_5_tokenizer(), stop=stop),
        max_prompt_length=max_prompt_length,
        max_response_length=64,
        truncation=truncation,
        max_observation_tokens=max_observation_tokens,
        observation_truncation=observation_truncation,
    )


def make_rules(**changes: Any) -> EpisodeRules:
    """Rules with room to spare, and what a test changes."""
    defaults: dict[str, Any] = {
        "max_prompt_length": 4096,
        "max_response_length": 64,
        "max_turn": 8,
        "tool_parsing_error_reward": -0.5,
        "on_parse_error": "feedback",
        "success_key": "success",
        "success_on_termination": False,
        "max_episode_restarts": 0,
        "episode_timeout_s": 30.0,
        "overlong_reward": 0.0,
        "masked_end_reasons": frozenset(),
        "bootstrap_on_truncation": False,
    }
    return EpisodeRules(**{**defaults, **changes})


def make_spec(seed: int = 0, env_name: str = "game", **env_kwargs: Any) -> EpisodeSpec:
    """An episode of the mock server."""
    return EpisodeSpec(env_name=env_name, seed=seed, env_kwargs=env_kwargs)
