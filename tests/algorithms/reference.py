# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each estimator once more, written from its definition: float64, plain loops, one episode as a list of turns.

Shares no code with verl or the recipe. A turn is a list of sampled positions; everything is looked up by position.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

Episodes = list["RefEpisode"]


@dataclass
class RefEpisode:
    """One unmasked row."""

    row: int
    uid: str
    turns: list[list[int]]
    rewards: np.ndarray
    values: np.ndarray
    responses: np.ndarray
    weights: np.ndarray
    """1 - 2 pi + sum pi^2 per token, for the optimal token baseline."""
    greedy_return: float

    @property
    def tokens(self) -> list[int]:
        return [t for turn in self.turns for t in turn]

    @property
    def score(self) -> float:
        return float(sum(self.rewards[t] for t in self.tokens))

    def turn_rewards(self) -> list[float]:
        return [float(sum(self.rewards[t] for t in turn)) for turn in self.turns]


def episodes_of(batch) -> Episodes:
    """Unmasked rows of a DataProto."""
    tensors = {key: tensor.double().numpy() for key, tensor in batch.batch.items()}
    episodes = []
    for row, mask in enumerate(tensors["response_mask"]):
        turns: list[list[int]] = []
        for t, sampled in enumerate(mask):
            if sampled:
                if t > 0 and mask[t - 1]:
                    turns[-1].append(t)
                else:
                    turns.append([t])
        if not turns:
            continue
        weights = 1 - 2 * np.exp(tensors["old_log_probs"][row]) + tensors["sum_pi_squared"][row]
        episodes.append(
            RefEpisode(
                row=row,
                uid=batch.non_tensor_batch["uid"][row],
                turns=turns,
                rewards=tensors["token_level_rewards"][row],
                values=tensors["values"][row],
                responses=tensors["responses"][row],
                weights=weights,
                greedy_return=float(tensors["reward_baselines"][row]),
            )
        )
    return episodes


def mean(xs) -> float:
    return sum(xs) / len(xs)


def std(xs) -> float:
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def whiten(table: dict) -> dict:
    """Zero mean and unit variance over tokens."""
    xs = list(table.values())
    scale = 1 / math.sqrt(std(xs) ** 2 + 1e-8)
    return {key: (x - mean(xs)) * scale for key, x in table.items()}


def groups_of(episodes: Episodes) -> dict[str, Episodes]:
    groups = defaultdict(list)
    for e in episodes:
        groups[e.uid].append(e)
    return groups


def _per_row(episodes: Episodes, advantage) -> tuple[dict, dict]:
    """Give every token of a row `advantage(episode, group)`; 0 for a row that is alone."""
    table = {}
    for group in groups_of(episodes).values():
        for e in group:
            for t in e.tokens:
                table[e.row, t] = advantage(e, group) if len(group) > 1 else 0.0
    return table, dict(table)


def _chain_gae(rewards, values, gamma, lam) -> list[float]:
    """A_k = sum over l of (gamma lam)^l delta_{k+l}, by the definition's sum and not by recursion."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * nxt - v for r, nxt, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(deltas))) for k in range(len(deltas))
    ]


def gae(episodes, gamma, lam, **_):
    advantages, returns = {}, {}
    for e in episodes:
        chain = _chain_gae([e.rewards[t] for t in e.tokens], [e.values[t] for t in e.tokens], gamma, lam)
        for t, a in zip(e.tokens, chain, strict=True):
            advantages[e.row, t], returns[e.row, t] = a, a + e.values[t]
    return whiten(advantages), returns


def turn_gae(episodes, gamma, lam, **_):
    advantages, returns = {}, {}
    for e in episodes:
        values = [e.values[turn[0]] for turn in e.turns]
        for turn, a, v in zip(e.turns, _chain_gae(e.turn_rewards(), values, gamma, lam), values, strict=True):
            for t in turn:
                advantages[e.row, t], returns[e.row, t] = a, a + v
    return whiten(advantages), returns


def bilevel_gae(episodes, gamma, lam, token_lam, **_):
    advantages, returns = {}, {}
    for e in episodes:
        values = [e.values[turn[0]] for turn in e.turns]
        chain = _chain_gae(e.turn_rewards(), values, gamma, lam)
        for k, turn in enumerate(e.turns):
            follows = gamma * (values[k + 1] + lam * chain[k + 1]) if k + 1 < len(e.turns) else 0.0
            following = [e.values[t] for t in turn[1:]] + [follows]
            deltas = [e.rewards[t] + nxt - e.values[t] for t, nxt in zip(turn, following, strict=True)]
            for i, t in enumerate(turn):
                a = sum(token_lam ** (j - i) * deltas[j] for j in range(i, len(turn)))
                advantages[e.row, t], returns[e.row, t] = a, a + e.values[t]
    return whiten(advantages), returns


def grpo(episodes, **_):
    return _per_row(episodes, lambda e, g: (e.score - mean([o.score for o in g])) / (std([o.score for o in g]) + 1e-6))


def rloo(episodes, **_):
    return _per_row(episodes, lambda e, g: e.score - mean([o.score for o in g if o is not e]))


def opo(episodes, **_):
    def baseline(g):
        return sum(len(o.tokens) * o.score for o in g) / sum(len(o.tokens) for o in g)

    return _per_row(episodes, lambda e, g: e.score - baseline(g))


def gpg(episodes, **_):
    compared = [e for g in groups_of(episodes).values() if len(g) > 1 for e in g]
    alpha = len(compared) / max(1, sum(e.score != 0 for e in compared))
    return _per_row(episodes, lambda e, g: alpha * (e.score - mean([o.score for o in g])))


def grpo_passk(episodes, **_):
    def advantage(e, g):
        best, second = sorted((o.score for o in g), reverse=True)[:2]
        return (best - second) / (std([o.score for o in g]) + 1e-6) if e.score == best else 0.0

    return _per_row(episodes, advantage)


def reinforce_plus_plus_baseline(episodes, **_):
    compared = {uid for uid, g in groups_of(episodes).items() if len(g) > 1}
    table, _ = _per_row(episodes, lambda e, g: e.score - mean([o.score for o in g]))
    uid_of = {e.row: e.uid for e in episodes}
    whitened = whiten({key: a for key, a in table.items() if uid_of[key[0]] in compared})
    table = {key: whitened.get(key, 0.0) for key in table}
    return table, dict(table)


def reinforce_plus_plus(episodes, gamma, **_):
    returns = {}
    for e in episodes:
        for i, t in enumerate(e.tokens):
            returns[e.row, t] = sum(gamma**j * e.rewards[later] for j, later in enumerate(e.tokens[i:]))
    return whiten(returns), returns


def remax(episodes, **_):
    advantages = {(e.row, t): e.score - e.greedy_return for e in episodes for t in e.tokens}
    returns = {(e.row, t): e.score for e in episodes for t in e.tokens}
    return advantages, returns


def tir_optimal_token_baseline(episodes, **_):
    advantages, returns = {}, {}
    for group in groups_of(episodes).values():
        lengths = sorted(len(e.tokens) for e in group)
        for e in group:
            to_go = {o.row: [sum(o.rewards[t] for t in o.tokens[i:]) for i in range(len(o.tokens))] for o in group}
            weight = {o.row: np.cumsum([o.weights[t] for t in o.tokens]) for o in group}
            for i, t in enumerate(e.tokens):
                reached = [o for o in group if len(o.tokens) > i]
                total = sum(weight[o.row][i] for o in reached) + 1e-8
                baseline = sum(to_go[o.row][i] * weight[o.row][i] for o in reached) / total
                if i >= lengths[-2]:  # only the longest rollout reaches this token
                    baseline = 0.0
                advantages[e.row, t], returns[e.row, t] = to_go[e.row][i] - baseline, to_go[e.row][i]
    return advantages, returns


def _to_go(e: RefEpisode, gamma) -> list[float]:
    rewards = e.turn_rewards()
    return [sum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards))) for k in range(len(rewards))]


def _against_equals(keyed: dict) -> dict:
    """Entry to (key, value): normalised among the entries with its key, 0 when alone."""
    members = defaultdict(list)
    for key, value in keyed.values():
        members[key].append(value)
    return {
        entry: (value - mean(members[key])) / (std(members[key]) + 1e-6) if len(members[key]) > 1 else 0.0
        for entry, (key, value) in keyed.items()
    }


def turn_grpo(episodes, gamma, **_):
    keyed = {
        (e.row, k): ((e.uid, k), g) for e in episodes for k, g in enumerate(_to_go(e, gamma)) if _has_peer(e, episodes)
    }
    return _by_turn(episodes, _against_equals(keyed))


def gigpo(episodes, gamma, step_weight, **_):
    keyed = {}
    for e in episodes:
        if not _has_peer(e, episodes):
            continue
        for k, g in enumerate(_to_go(e, gamma)):
            written = tuple(e.responses[e.turns[k - 1][-1] + 1 : e.turns[k][0]]) if k else "prompt"
            keyed[e.row, k] = ((e.uid, written), g)
    step = _against_equals(keyed)
    whole, _ = grpo(episodes)
    by_turn = {
        (e.row, k): whole[e.row, e.turns[k][0]] + step_weight * step.get((e.row, k), 0.0)
        for e in episodes
        for k in range(len(e.turns))
    }
    return _by_turn(episodes, by_turn)


def _has_peer(e: RefEpisode, episodes: Episodes) -> bool:
    return any(o is not e and o.uid == e.uid for o in episodes)


def _by_turn(episodes: Episodes, by_turn: dict) -> tuple[dict, dict]:
    table = {(e.row, t): by_turn.get((e.row, k), 0.0) for e in episodes for k, turn in enumerate(e.turns) for t in turn}
    return table, dict(table)


REFERENCES = {
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "opo": opo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gpg": gpg,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "turn_gae": turn_gae,
    "bilevel_gae": bilevel_gae,
    "turn_grpo": turn_grpo,
    "gigpo": gigpo,
}
