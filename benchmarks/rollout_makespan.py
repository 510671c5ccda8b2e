# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 1: how long a batch of episodes takes on a simulated engine and service.

Ours against a lock-step loop, against verl's own ToolAgentLoop, and against the bound that no schedule can beat.
Time is that of `SkippingEventLoop`; `--real-clock` runs one batch of each player with real sleeps beside it.
"""

import functools
import sys
from collections.abc import Mapping, Sequence

from benchmarks import players
from benchmarks.figures import Figure, alternate, compare, run_script
from benchmarks.simulation import allow_many_connections, make_workload, run_timed

_PLAYERS = {
    "ours": players.play_ours,
    "verl_tools": players.play_with_verl_tools,
    "lock_step": players.play_in_lock_step(one_by_one=True),
    "lock_step_pool": players.play_in_lock_step(one_by_one=False),
}

_AGAINST = {
    "verl_tools": "verl's ToolAgentLoop with the environment as a tool",
    "lock_step": "a lock-step loop with blocking requests",
    "lock_step_pool": "a lock-step loop that steps all environments of a turn at once",
}


def makespan_s(name: str, num_episodes: int, *, real_clock: bool = False) -> tuple[float, float]:
    """Makespan and processor time of one batch, in seconds."""
    workload = make_workload(num_episodes, seed=num_episodes)
    elapsed_s, cpu_s, _ = run_timed(lambda: players.play(_PLAYERS[name], workload), real_clock=real_clock)
    return elapsed_s, cpu_s


def figures_of(num_episodes: int, names: Sequence[str], goals: Mapping[str, str]) -> list[Figure]:
    """Ours against the other players of `names` and against the bound, five times.

    Args:
        num_episodes: Batch size.
        names: Players, ours among them.
        goals: Goal against each player and `bound`; missing: none.
    """
    workload = make_workload(num_episodes, seed=num_episodes)
    num_turns = sum(plan.num_turns for plan in workload.plans)
    cpu_ms: dict[str, float] = {}

    def side(name: str) -> float:
        elapsed_s, cpu_s = makespan_s(name, num_episodes)
        cpu_ms[name] = 1000 * cpu_s / num_turns
        return elapsed_s

    measured = alternate(5, {name: functools.partial(side, name) for name in names})
    bound = "the bound (longest episode, or work over concurrency)"
    figures = [
        compare(
            f"makespan_{num_episodes}_vs_{name}",
            f"makespan of {num_episodes} episodes against {_AGAINST[name]}",
            unit="s",
            ours=measured["ours"],
            baseline=measured[name],
            inverted=True,
            goal=goals.get(name, ""),
            details={"ours_cpu_ms_per_turn": cpu_ms["ours"], "baseline_cpu_ms_per_turn": cpu_ms[name]},
        )
        for name in names
        if name != "ours"
    ]
    figures.append(
        compare(
            f"makespan_{num_episodes}_vs_bound",
            f"makespan of {num_episodes} episodes against {bound}",
            unit="s",
            ours=measured["ours"],
            baseline=[workload.bound_s()] * len(measured["ours"]),
            goal=goals.get("bound", ""),
            details={"ours_cpu_ms_per_turn": cpu_ms["ours"], "turns": num_turns},
        )
    )
    return figures


def warm_up(names: Sequence[str]) -> None:
    """Imports and caches, so that the first repetition is like the others."""
    for name in names:
        makespan_s(name, 4)


def measure(quick: bool) -> list[Figure]:
    """The batch size of the goals."""
    num_episodes = 32 if quick else 256
    allow_many_connections(num_episodes)
    warm_up(list(_PLAYERS))
    return figures_of(num_episodes, list(_PLAYERS), {"lock_step": ">= 2.5", "verl_tools": ">= 1.0", "bound": "<= 1.1"})


def check_clock(num_episodes: int = 32) -> None:
    """Print the makespan by both clocks, for each player."""
    for name in _PLAYERS:
        skipped_s, _ = makespan_s(name, num_episodes)
        real_s, _ = makespan_s(name, num_episodes, real_clock=True)
        print(f"{name:<16} {num_episodes} episodes: skipping clock {skipped_s:.2f} s, real clock {real_s:.2f} s")


if __name__ == "__main__":
    if "--real-clock" in sys.argv:
        check_clock()
    else:
        run_script(measure, __doc__)
