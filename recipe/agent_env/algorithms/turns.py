# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The turns of a batch, read off its mask: which sampled token belongs to which turn.

A turn is one unbroken run of sampled tokens; at least the next turn's generation header lies between two of them. Owns
the way from tokens to turns and back. Loops over no token. Knows nothing of rewards' meaning or of estimators.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnLayout:
    """Turns of B rows with R response positions; K is the most turns in any row, at least 1."""

    turn_of_token: torch.Tensor
    """int64 (B, R): the turn of each sampled token, counted from 0; K where nothing was sampled."""
    exists: torch.Tensor
    """bool (B, K): whether the row has this turn."""
    first: torch.Tensor
    """int64 (B, K): position of the turn's first sampled token; 0 where the turn does not exist."""
    last: torch.Tensor
    """int64 (B, K): position of the turn's last sampled token; 0 where the turn does not exist."""

    def sum_by_turn(self, tokens: torch.Tensor) -> torch.Tensor:
        """Sums over each turn's sampled tokens, (B, R) to (B, K); what lies elsewhere, NaN too, is left out."""
        num_turns = self.exists.shape[1]
        sums = tokens.new_zeros(tokens.shape[0], num_turns + 1).scatter_add(1, self.turn_of_token, tokens)
        return sums[:, :num_turns]

    def at_first(self, tokens: torch.Tensor) -> torch.Tensor:
        """What stands at each turn's first sampled token, (B, R) to (B, K); 0 where the turn does not exist."""
        return torch.where(self.exists, tokens.gather(1, self.first), tokens.new_zeros(()))

    def spread(self, turns: torch.Tensor) -> torch.Tensor:
        """Give each sampled token its turn's number, (B, K) to (B, R); 0 where nothing was sampled."""
        return F.pad(turns, (0, 1)).gather(1, self.turn_of_token)


def turn_layout(sampled_mask: torch.Tensor) -> TurnLayout:
    """Find the turns.

    Args:
        sampled_mask: (B, R); nonzero on exactly the tokens that the policy sampled.
    """
    mask = sampled_mask.bool()
    starts = mask & ~F.pad(mask[:, :-1], (1, 0))
    num_turns = starts.sum(dim=-1)
    most_turns = max(1, int(num_turns.max()))
    turn_of_token = torch.where(mask, starts.cumsum(dim=-1) - 1, most_turns)
    positions = torch.arange(mask.shape[1]).expand_as(turn_of_token)
    empty = torch.zeros(mask.shape[0], most_turns + 1, dtype=torch.int64)
    first = empty.scatter_reduce(1, turn_of_token, positions, "amin", include_self=False)
    last = empty.scatter_reduce(1, turn_of_token, positions, "amax", include_self=False)
    return TurnLayout(
        turn_of_token=turn_of_token,
        exists=torch.arange(most_turns) < num_turns.unsqueeze(-1),
        first=first[:, :most_turns],
        last=last[:, :most_turns],
    )


def discounted_to_go(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Sum of this and all later turns' rewards, later ones discounted once per turn; (B, K) to (B, K)."""
    to_go = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for turn in reversed(range(rewards.shape[1])):
        following = rewards[:, turn] + gamma * following
        to_go[:, turn] = following
    return to_go


def turn_anchors(layout: TurnLayout, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Number what the environment had just written before each turn, equal numbers for equal token ids.

    Args:
        layout: Turns of the batch.
        prompts: int64 (B, P): what was written before the first turn, padded alike.
        responses: int64 (B, R).

    Returns:
        int64 (B, K): from 0 up; -1 where the turn does not exist. Exact: no two texts share a number.
    """
    numbers: dict[tuple[bool, bytes], int] = {}
    anchors = torch.full(layout.exists.shape, -1, dtype=torch.int64)
    prompt_rows, response_rows = prompts.numpy(), responses.numpy()
    for row, turn in torch.nonzero(layout.exists).tolist():
        if turn == 0:
            key = (True, prompt_rows[row].tobytes())
        else:
            start, stop = int(layout.last[row, turn - 1]) + 1, int(layout.first[row, turn])
            key = (False, response_rows[row, start:stop].tobytes())
        anchors[row, turn] = numbers.setdefault(key, len(numbers))
    return anchors
