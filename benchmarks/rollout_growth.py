# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 1, continued: how the makespan grows with the batch, from 64 to 4,096 episodes."""

from benchmarks.figures import Figure, run_script
from benchmarks.rollout_makespan import figures_of, warm_up
from benchmarks.simulation import allow_many_connections

_SIZES = {64: ["ours", "verl_tools", "lock_step"], 1024: ["ours", "lock_step"], 4096: ["ours"]}
"""Who plays which batch size; the slower players would take most of the benchmark's time at the larger ones."""


def measure(quick: bool) -> list[Figure]:
    """The figures of each size."""
    sizes = {16: _SIZES[64]} if quick else _SIZES
    allow_many_connections(max(sizes))
    warm_up(_SIZES[64])
    return [figure for size, names in sizes.items() for figure in figures_of(size, names, {})]


if __name__ == "__main__":
    run_script(measure, __doc__)
