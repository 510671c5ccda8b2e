# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Advantage estimators whose unit of action is the turn. Opt-in: `algorithm.adv_estimator=<name>`.

`turn_gae` and `bilevel_gae` read a critic, `turn_grpo` and `gigpo` compare the rollouts of one row. They are registered
with verl (`register_adv_est`) when this file is imported; `verl_patches.py` hands them what verl's call leaves out
(values, prompts, responses). docs/algorithms.md works each one out on an example.

`algorithm.gamma` and `algorithm.lam` count turns here, not tokens: a long reply is not discounted more than a short
one. B rows, R response positions, K turns.
"""

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import register_adv_est
from verl.utils.torch_functional import masked_whiten

from recipe.agent_env.algorithms.groups import group_numbers, normalise_in_groups
from recipe.agent_env.algorithms.turns import TurnLayout, discounted_to_go, turn_anchors, turn_layout


def _turn_level_gae(rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, lam: float) -> torch.Tensor:
    """GAE over turns, (B, K) to (B, K). Rewards and values of turns that do not exist are 0, and so are theirs."""
    advantages = torch.zeros_like(rewards)
    advantage = following = rewards.new_zeros(rewards.shape[0])
    for turn in reversed(range(rewards.shape[1])):
        advantage = rewards[:, turn] + gamma * following - values[:, turn] + gamma * lam * advantage
        following = values[:, turn]
        advantages[:, turn] = advantage
    return advantages


def _whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """verl's whitening over sampled tokens, 0 elsewhere."""
    return torch.where(mask.bool(), masked_whiten(advantages, mask), 0.0)


@register_adv_est("turn_gae")
def compute_turn_gae(
    *,
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    config: DictConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE in which one action is one turn.

    With r_k the reward of turn k and V_k the value before its first token:
    A_k = r_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}. Each token of the turn gets A_k, whitened over sampled tokens;
    the critic's target is A_k + V_k on each of them.

    Args:
        token_level_rewards: (B, R).
        values: (B, R).
        response_mask: (B, R), 1 on sampled tokens; at least two of them.
        config: The `algorithm` config; `gamma` and `lam` count turns.

    Returns:
        advantages: (B, R), 0 where nothing was sampled.
        returns: (B, R), 0 where nothing was sampled.

    Source: Schulman et al., arXiv:1506.02438, over utterances in place of tokens as in ArCHer, arXiv:2402.19446.
    """
    layout = turn_layout(response_mask)
    turn_values = layout.at_first(values)
    turn_rewards = layout.sum_by_turn(token_level_rewards)
    advantages = _turn_level_gae(turn_rewards, turn_values, gamma=config.gamma, lam=config.lam)
    return _whiten(layout.spread(advantages), response_mask), layout.spread(advantages + turn_values)


@register_adv_est("bilevel_gae")
def compute_bilevel_gae(
    *,
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    config: DictConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over turns, and inside each turn GAE over its tokens towards what follows the turn.

    What follows turn k is F_k = gamma (V_{k+1} + lam A_{k+1}) with `turn_gae`'s A, 0 after the last turn. Inside the
    turn, undiscounted: A_t = r_t + V_{t+1} - V_t + token_lam A_{t+1}, and at its last token A_t = r_t + F_k - V_t. With
    token_lam = 1 the first token of a turn has `turn_gae`'s advantage, and turns of one token are `turn_gae`.

    Args:
        token_level_rewards: (B, R).
        values: (B, R).
        response_mask: (B, R), 1 on sampled tokens; at least two of them.
        config: The `algorithm` config; `gamma` and `lam` count turns, `token_lam` is lambda inside a turn.

    Returns:
        As `compute_turn_gae`; the critic's target of a token is its own advantage plus its own value.

    Source: after Bi-Level GAE of VAGEN, arXiv:2510.16907, which starts a turn's tokens from A_k instead of F_k.
    """
    layout = turn_layout(response_mask)
    turn_values = layout.at_first(values)
    turn_advantages = _turn_level_gae(
        layout.sum_by_turn(token_level_rewards), turn_values, gamma=config.gamma, lam=config.lam
    )
    continuation = config.gamma * (turn_values + config.lam * turn_advantages)
    continuation = torch.cat([continuation[:, 1:], torch.zeros_like(continuation[:, :1])], dim=1)
    follows_turn = layout.spread(continuation)
    is_last = _marks(layout.last, layout)
    mask = response_mask.bool()

    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        target = torch.where(is_last[:, t], follows_turn[:, t], next_value + config.token_lam * advantage)
        advantage = torch.where(mask[:, t], token_level_rewards[:, t] + target - values[:, t], 0.0)
        next_value = values[:, t]
        advantages[:, t] = advantage
    returns = torch.where(mask, advantages + values, 0.0)
    return _whiten(advantages, response_mask), returns


def _marks(positions: torch.Tensor, layout: TurnLayout) -> torch.Tensor:
    """bool (B, R): True at these positions (B, K) of existing turns."""
    marks = torch.zeros_like(layout.turn_of_token, dtype=torch.int64)
    return marks.scatter_add(1, positions, layout.exists.long()) > 0


@register_adv_est("turn_grpo")
def compute_turn_grpo(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: DictConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Discounted return-to-go of each turn, against the same turn of the row's other rollouts.

    G_k = r_k + gamma G_{k+1}; the turn's advantage is (G_k - mean) / (std + 1e-6) over the rollouts of the group that
    reached turn k, without the division when `norm_adv_by_std_in_grpo` is off, and 0 where only one of them did.

    Args:
        token_level_rewards: (B, R).
        response_mask: (B, R), 1 on sampled tokens.
        index: Group of each row, (B,).
        config: The `algorithm` config; `gamma` counts turns.

    Returns:
        advantages: (B, R), 0 where nothing was sampled.
        returns: The same.

    Source: turn-level group advantages of MT-GRPO, arXiv:2505.11821, on returns-to-go; GRPO, arXiv:2402.03300.
    """
    layout = turn_layout(response_mask)
    rows, turns = torch.nonzero(layout.exists, as_tuple=True)
    to_go = discounted_to_go(layout.sum_by_turn(token_level_rewards), config.gamma)[rows, turns]
    group = group_numbers(index[rows.numpy()], turns.tolist())
    advantages = torch.zeros(layout.exists.shape, dtype=token_level_rewards.dtype)
    advantages[rows, turns] = normalise_in_groups(to_go, group, by_std=config.norm_adv_by_std_in_grpo)
    tokens = layout.spread(advantages)
    return tokens, tokens


@register_adv_est("gigpo")
def compute_gigpo(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    prompts: torch.Tensor,
    responses: torch.Tensor,
    index: np.ndarray,
    config: DictConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO over whole episodes, plus the same comparison among all turns that answered the same observation.

    A turn's advantage is E + step_weight * S. E compares the episode's undiscounted reward within the group; S compares
    the turn's discounted return-to-go among the turns, of any rollout of the group and any turn number, in front of
    which the environment had written the same tokens; 0 where there is no other. The first turns of a group always
    share their observation, the prompt.

    Args:
        token_level_rewards: (B, R).
        response_mask: (B, R), 1 on sampled tokens.
        prompts: (B, P) token ids.
        responses: (B, R) token ids.
        index: Group of each row, (B,).
        config: The `algorithm` config; `gamma` counts turns, `gigpo_step_weight` is the paper's omega.

    Returns:
        advantages: (B, R), 0 where nothing was sampled.
        returns: The same.

    Source: Feng et al., Group-in-Group Policy Optimization, arXiv:2505.10978.
    """
    layout = turn_layout(response_mask)
    by_std = config.norm_adv_by_std_in_grpo
    turn_rewards = layout.sum_by_turn(token_level_rewards)
    episode = normalise_in_groups(turn_rewards.sum(dim=-1), group_numbers(index), by_std=by_std)

    rows, turns = torch.nonzero(layout.exists, as_tuple=True)
    anchors = turn_anchors(layout, prompts, responses)[rows, turns]
    to_go = discounted_to_go(turn_rewards, config.gamma)[rows, turns]
    step = normalise_in_groups(to_go, group_numbers(index[rows.numpy()], anchors.tolist()), by_std=by_std)

    advantages = torch.zeros(layout.exists.shape, dtype=token_level_rewards.dtype)
    advantages[rows, turns] = episode[rows] + config.gigpo_step_weight * step
    tokens = layout.spread(advantages)
    return tokens, tokens
