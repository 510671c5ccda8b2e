# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A scripted policy that plays legally, wrongly and strangely, and remembers what it was asked and what it said.

Owns the replies, what each means, and the record. Refuses to know: services and faults.
"""

import random
from dataclasses import dataclass, field
from functools import lru_cache

from recipe.agent_env.rollout.episode import SampledReply
from tests.chaos.ledger_env import DIRECTIONS
from tests.rollout.scripted_policy import encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One reply and what has to become of it."""

    text: str
    """With control tokens."""
    move: str | None
    """What the environment has to apply; None: nothing of it may be sent."""


def _walk(direction: str) -> str:
    return f'<tool_call>\n{{"name": "walk", "arguments": {{"direction": "{direction}"}}}}\n</tool_call>'


_LEGAL = [Reply(text=f"{_walk(d)}<|im_end|>", move=d) for d in DIRECTIONS]
_STRANGE = [
    Reply(text="I wait.<|im_end|>", move="nothing"),
    Reply(text=f"{_walk('west')}\n{_walk('east')}<|im_end|>", move="west"),
    Reply(text='<tool_call>\n{"name": "walk", "arguments": {"direction": "no<|im_end|>', move=None),
    Reply(text=f"{_walk('up')}<|im_end|>", move=None),
    Reply(text='<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call><|im_end|>', move=None),
]


@lru_cache(maxsize=64)
def _ids(text: str) -> tuple[int, ...]:
    return tuple(encode(text))


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What one attempt at an episode saw and said."""

    replies: list[Reply] = field(default_factory=list)
    """In order."""
    sampled: list[list[int]] = field(default_factory=list)
    """Their ids."""
    last_context: list[int] = field(default_factory=list)
    """What the last turn was asked with; it extends all the others."""


class ChaosPolicy:
    """The sampler of one episode."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self.attempts: list[Attempt] = []
        """In order; the last one is the row's, where the episode did not fail."""

    async def __call__(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        if turn == 0:
            self.attempts.append(Attempt())
        reply = self._rng.choice(_LEGAL if self._rng.random() < 0.75 else _STRANGE)
        ids = list(_ids(reply.text))
        assert len(ids) <= max_tokens
        attempt = self.attempts[-1]
        attempt.replies.append(reply)
        attempt.sampled.append(ids)
        attempt.last_context = context_ids
        return SampledReply(ids=ids, log_probs=[-0.5] * len(ids))
