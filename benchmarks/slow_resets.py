# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 9: how much of the wait for slow environment starts is hidden behind other episodes' turns.

The same batch is played with starts of median 2 s and with starts that take no time. A loop that waits for all
environments before the first token loses the slowest start; what ours loses is the difference of the two makespans.
Time is that of `SkippingEventLoop`.
"""

import dataclasses

from benchmarks import players
from benchmarks.figures import Figure, compare, run_script
from benchmarks.simulation import allow_many_connections, make_workload, run_timed

_REPETITIONS = 5


def lost_s(num_episodes: int, num_slots: int, seed: int) -> tuple[float, float]:
    """Seconds that slow starts cost our loop, and those that a loop would lose that waits for all of them."""
    workload = make_workload(num_episodes, seed=seed, start_median_s=2.0)
    slow = dataclasses.replace(workload, concurrency=num_slots)
    instant = dataclasses.replace(slow, plans=[dataclasses.replace(plan, start_s=0.0) for plan in slow.plans])
    slow_s, _, _ = run_timed(lambda: players.play(players.play_ours, slow))
    instant_s, _, _ = run_timed(lambda: players.play(players.play_ours, instant))
    return max(0.0, slow_s - instant_s), max(plan.start_s for plan in slow.plans)


def measure(quick: bool) -> list[Figure]:
    """The hidden share where the engine waits for episodes, and where episodes wait for the engine."""
    num_slots = 8 if quick else 32
    allow_many_connections(4 * num_slots)
    lost_s(4, num_slots, seed=0)  # imports and caches
    figures = []
    for factor, text in ((1, "as many"), (4, "four times as many")):
        pairs = [lost_s(factor * num_slots, num_slots, seed) for seed in range(1, _REPETITIONS + 1)]
        figures.append(
            compare(
                f"slow_resets_hidden_{factor}_to_1",
                "seconds of the slowest start (median start 2 s) that are hidden behind other episodes' turns, with "
                f"{text} episodes as the engine has slots",
                unit="s",
                ours=[longest - lost for lost, longest in pairs],
                baseline=[longest for _, longest in pairs],
                goal="" if quick else ">= 0.8",
            )
        )
    return figures


if __name__ == "__main__":
    run_script(measure, __doc__)
