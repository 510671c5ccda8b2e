# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 9: how much of the wait for slow environment starts is hidden behind other episodes' turns.

The same batch is played with starts of median 2 s and with starts that take no time. A loop that waits for all
environments before the first token loses the slowest start; what ours loses is the difference of the two makespans.
Time is that of `SkippingEventLoop`.
"""

import dataclasses

from benchmarks import players
from benchmarks.figures import Figure, compare, run_script
from benchmarks.simulation import Workload, allow_many_connections, make_workload, run_timed

_REPETITIONS = 5


def lost_s(num_episodes: int, seed: int) -> tuple[float, float]:
    """Seconds that slow starts cost our loop, and those that a loop would lose that waits for all of them."""
    slow = make_workload(num_episodes, seed=seed, start_median_s=2.0)
    instant = Workload(plans=[dataclasses.replace(plan, start_s=0.0) for plan in slow.plans])
    slow_s, _, _ = run_timed(lambda: players.play(players.play_ours, slow))
    instant_s, _, _ = run_timed(lambda: players.play(players.play_ours, instant))
    return max(0.0, slow_s - instant_s), max(plan.start_s for plan in slow.plans)


def measure(quick: bool) -> list[Figure]:
    """The hidden share at two batch sizes."""
    sizes = (32,) if quick else (256, 1024)
    allow_many_connections(max(sizes))
    lost_s(4, seed=0)  # imports and caches
    figures = []
    for size in sizes:
        pairs = [lost_s(size, seed) for seed in range(1, _REPETITIONS + 1)]
        figures.append(
            compare(
                f"slow_resets_hidden_{size}",
                f"seconds of the slowest start (median start 2 s) that {size} episodes hide, against all of them",
                unit="s",
                ours=[longest - lost for lost, longest in pairs],
                baseline=[longest for _, longest in pairs],
                goal="" if quick else ">= 0.8",
            )
        )
    return figures


if __name__ == "__main__":
    run_script(measure, __doc__)
