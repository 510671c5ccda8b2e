# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Figure 5: memory and time of making the trainer's tensors from finished episodes.

Peak memory is what the kernel saw the process use on top of the episodes, against the size of the tensors themselves.
"""

import ctypes
import gc
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, compare, run_script
from recipe.agent_env.rollout.batch import assemble
from recipe.agent_env.rollout.episode import EndReason, Episode, EpisodeStats

_REPETITIONS = 5
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_PROMPT, _TURN, _OBSERVATION = 512, 100, 40


def make_episode(num_tokens: int, seed: int) -> Episode:
    """An episode of this many tokens: a prompt, then turns of 100 sampled and 40 written tokens."""
    rng = np.random.default_rng(seed)
    num_response = num_tokens - _PROMPT
    mask = (np.arange(num_response) % (_TURN + _OBSERVATION) < _TURN).astype(np.int8)
    mask[-1] = 1
    response = rng.integers(0, 150_000, num_response, dtype=np.int32)
    rewards = np.zeros(num_response, dtype=np.float32)
    rewards[-1] = 1.0
    return Episode(
        prompt_ids=rng.integers(0, 150_000, _PROMPT, dtype=np.int32),
        response_ids=response,
        response_mask=mask,
        log_probs=np.where(mask, -0.5, 0.0).astype(np.float32),
        rewards=rewards,
        engine_ids=response[mask.astype(bool)],
        episode_return=1.0,
        end_reason=EndReason.TERMINATED,
        success=1.0,
        num_assistant_turns=num_response // (_TURN + _OBSERVATION) + 1,
        num_restarts=0,
        failure=None,
        service=None,
        stats=EpisodeStats(),
    )


def assemble_once(episodes: list[Episode]) -> tuple[float, float, float]:
    """Assemble a batch and throw it away.

    Returns:
        seconds: Wall time.
        peak_mb: Highest memory on top of what was there before.
        tensors_mb: Size of the batch's tensors.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts anew
    before = _status_mb("VmRSS")
    started = time.perf_counter()
    batch = assemble(episodes, pad_token_id=0, passed_on={})
    seconds = time.perf_counter() - started
    peak_mb = _status_mb("VmHWM") - before
    tensors_mb = sum(tensor.numel() * tensor.element_size() for tensor in batch.batch.values()) / 1e6
    return seconds, peak_mb, tensors_mb


def _status_mb(key: str) -> float:
    """A line of the process's status, in millions of bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(key)


def measure(quick: bool) -> list[Figure]:
    """Peak memory, time, and what short episodes pay for a long limit."""
    # Arrays freed by one repetition must go back to the kernel, or the next one would seem to need no memory.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    rows, length = (32, 8192) if quick else (256, 15_488)
    episodes = [make_episode(length, seed) for seed in range(rows)]
    short = [make_episode(length // 8, seed) for seed in range(rows)]
    assemble_once(short)  # imports and allocator
    full = [assemble_once(episodes) for _ in range(_REPETITIONS)]
    brief = [assemble_once(short) for _ in range(_REPETITIONS)]
    return [
        compare(
            "batch_peak_memory",
            f"peak memory of assembling {rows} rows x {length} tokens against the size of the tensors",
            unit="MB",
            ours=[peak for _, peak, _ in full],
            baseline=[size for _, _, size in full],
            goal="" if quick else "<= 1.3",
            details={"process_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6},
        ),
        compare(
            "batch_time",
            f"time of assembling {rows} rows x {length} tokens against the limit of 3 s",
            unit="s",
            ours=[seconds for seconds, _, _ in full],
            baseline=[3.0] * _REPETITIONS,
            goal="<= 1.0",
        ),
        compare(
            "batch_short_episodes",
            "size of the tensors when all episodes are an eighth as long, against the full length",
            unit="MB",
            ours=[size for _, _, size in brief],
            baseline=[size for _, _, size in full],
            goal="<= 0.13",
        ),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
