# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The token ledger: one episode as one token sequence, written down while it happens.

Owns which tokens the policy sampled, which the environment wrote, and where each reward sits. Knows nothing of text,
HTTP, engines or tensors libraries beyond numpy.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSpan:
    """Where one turn's sampled tokens lie, as positions in the response."""

    start: int
    """First sampled position."""
    stop: int
    """One past the last sampled position; always greater than `start`."""


class TokenLedger:
    """Append-only record of one episode: prompt, then sampled and written tokens in the order they happened.

    Args:
        prompt_ids: Token ids of the first prompt, at least one.

    Raises:
        ValueError: The prompt is empty.
    """

    def __init__(self, prompt_ids: list[int]):
        if not prompt_ids:
            raise ValueError("an episode needs at least one prompt token, got none")
        self._context_ids = list(prompt_ids)
        self._num_prompt_tokens = len(prompt_ids)
        self._spans: list[SampledSpan] = []
        self._log_probs: list[float] = []
        self._has_log_probs = True
        self._rewards: list[float] = []

    @property
    def context_ids(self) -> list[int]:
        """All tokens so far: what the policy reads on its next turn."""
        return self._context_ids

    @property
    def num_context_tokens(self) -> int:
        """Length of `context_ids`."""
        return len(self._context_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the first prompt."""
        return self._num_prompt_tokens

    @property
    def spans(self) -> list[SampledSpan]:
        """The sampled span of each turn, in play order."""
        return self._spans

    def add_sampled(self, ids: list[int], log_probs: list[float] | None) -> None:
        """Append one turn's sampled tokens; they get mask 1.

        Args:
            ids: Token ids as the engine returned them, at least one.
            log_probs: Log-probability of each id under the sampling policy, or None where the engine gives none.

        Raises:
            ValueError: No id, or the two lengths differ.
        """
        if not ids:
            raise ValueError("a turn needs at least one sampled token, got none")
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"expected one log-prob for each of {len(ids)} sampled ids, got {len(log_probs)}")
        start = len(self._context_ids) - self._num_prompt_tokens
        self._context_ids.extend(ids)
        self._spans.append(SampledSpan(start=start, stop=start + len(ids)))
        self._rewards.append(0.0)
        if log_probs is None:
            self._has_log_probs = False
        else:
            self._log_probs.extend(log_probs)

    def add_written(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample (glue, observation, generation header); they get mask 0."""
        self._context_ids.extend(ids)

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the latest turn. It will sit on that turn's last sampled token.

        Raises:
            ValueError: No turn has been sampled yet.
        """
        if not self._rewards:
            raise ValueError("a reward came before the first sampled turn, so no sampled token can carry it")
        self._rewards[-1] += reward

    def prompt(self) -> np.ndarray:
        """Prompt token ids, int32, shape (P,)."""
        return np.asarray(self._context_ids[: self._num_prompt_tokens], dtype=np.int32)

    def response(self) -> np.ndarray:
        """All tokens after the prompt, int32, shape (R,)."""
        return np.asarray(self._context_ids[self._num_prompt_tokens :], dtype=np.int32)

    def response_mask(self) -> np.ndarray:
        """1 on exactly the sampled tokens, 0 on all others; int8, shape (R,)."""
        mask = np.zeros(len(self._context_ids) - self._num_prompt_tokens, dtype=np.int8)
        for span in self._spans:
            mask[span.start : span.stop] = 1
        return mask

    def log_probs(self) -> np.ndarray | None:
        """Log-probabilities of sampled tokens, 0 elsewhere; float32, shape (R,). None when a turn had none."""
        if not self._has_log_probs:
            return None
        log_probs = np.zeros(len(self._context_ids) - self._num_prompt_tokens, dtype=np.float32)
        log_probs[self.response_mask().astype(bool)] = self._log_probs
        return log_probs

    def rewards(self) -> np.ndarray:
        """Each turn's reward on the last sampled token of that turn, 0 elsewhere; float32, shape (R,)."""
        rewards = np.zeros(len(self._context_ids) - self._num_prompt_tokens, dtype=np.float32)
        for span, reward in zip(self._spans, self._rewards, strict=True):
            rewards[span.stop - 1] = reward
        return rewards
