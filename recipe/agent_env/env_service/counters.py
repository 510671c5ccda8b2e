# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the service counts: sessions, steps, latencies.

Owns: the counters, their sum over several processes, and their two faces (`/stats` JSON and Prometheus).
Refuses to know: when something is counted.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

COUNTS = {
    "opened": "Environments opened.",
    "closed": "Environments closed by their client or at shutdown.",
    "reaped": "Environments closed because no request came within the idle limit.",
    "crashed": "Environments lost to an exception of their own or to an invalid answer.",
    "timed_out": "Environments lost to a call past its time limit.",
    "lost": "Environments lost with their worker process.",
    "close_failures": "Calls of an environment's close that raised or hung.",
    "refused": "Requests to open that found no free place.",
    "steps": "Actions applied.",
    "replayed_steps": "Repeated actions answered from the stored answer.",
}


class Counters:
    """Plain integers and recent step latencies of one process."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.live_by_name: dict[str, int] = {}
        self._recent_s: deque[float] = deque(maxlen=4096)
        self._buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def add(self, name: str, amount: int = 1) -> None:
        """Count something of `COUNTS`."""
        self.counts[name] += amount

    def change_live(self, env_name: str, change: int) -> None:
        """Count an environment of this name in (+1) or out (-1)."""
        live = self.live_by_name.get(env_name, 0) + change
        if live:
            self.live_by_name[env_name] = live
        else:
            self.live_by_name.pop(env_name, None)

    def record_step(self, seconds: float) -> None:
        """Count one applied action and how long the environment took."""
        self.counts["steps"] += 1
        self._recent_s.append(seconds)
        self._buckets[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain JSON, for `merge`."""
        return {
            "counts": dict(self.counts),
            "live_by_name": dict(self.live_by_name),
            "recent_s": list(self._recent_s),
            "buckets": list(self._buckets),
            "sum_s": self._sum_s,
        }


def merge(snapshots: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up the snapshots of several processes."""
    total = Counters().snapshot()
    for snapshot in snapshots:
        for name, value in snapshot["counts"].items():
            total["counts"][name] += value
        for name, value in snapshot["live_by_name"].items():
            total["live_by_name"][name] = total["live_by_name"].get(name, 0) + value
        total["recent_s"].extend(snapshot["recent_s"])
        total["buckets"] = [a + b for a, b in zip(total["buckets"], snapshot["buckets"], strict=True)]
        total["sum_s"] += snapshot["sum_s"]
    return total


def to_stats(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The `/stats` form: counters, live sessions and latency percentiles in milliseconds over recent steps."""
    ordered = sorted(snapshot["recent_s"])

    def percentile(fraction: float) -> float | None:
        return round(1000 * ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 3) if ordered else None

    return {
        "live_sessions": sum(snapshot["live_by_name"].values()),
        "live_by_name": snapshot["live_by_name"],
        **snapshot["counts"],
        "step_latency_ms": {
            "p50": percentile(0.5),
            "p90": percentile(0.9),
            "p99": percentile(0.99),
            "max": percentile(1.0),
            "samples": len(ordered),
        },
    }


class _Snapshot(Collector):
    """One snapshot as Prometheus metric families."""

    def __init__(self, snapshot: dict[str, Any], gauges: dict[str, float]) -> None:
        self._snapshot = snapshot
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Yield one metric family per number."""
        live = GaugeMetricFamily("agent_env_live_sessions", "Environments alive.", labels=["env_name"])
        for name, value in self._snapshot["live_by_name"].items():
            live.add_metric([name], value)
        yield live
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"agent_env_{name}", f"{name.replace('_', ' ').capitalize()}.", value=value)
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"agent_env_{name}", text, value=self._snapshot["counts"][name])
        total, buckets = 0, []
        for bound, count in zip([*map(str, LATENCY_BUCKETS_S), "+Inf"], self._snapshot["buckets"], strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            "agent_env_step_seconds",
            "Time an environment took for a step.",
            buckets=buckets,
            sum_value=self._snapshot["sum_s"],
        )


def to_prometheus(snapshot: dict[str, Any], gauges: dict[str, float]) -> bytes:
    """The same numbers in Prometheus' text format.

    Args:
        snapshot: From `merge` or `Counters.snapshot`.
        gauges: Present values that are no counters, e.g. `max_sessions`.
    """
    registry = CollectorRegistry()
    registry.register(_Snapshot(snapshot, gauges))
    return generate_latest(registry)
