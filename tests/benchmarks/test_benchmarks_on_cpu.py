# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmarks' own machinery: order of the sides, arithmetic, the clock, the runner's JSON, the page. No timing."""

import asyncio
import json
import subprocess

import pytest

from benchmarks import page, run, simulation
from benchmarks.figures import alternate, compare, line, meets, to_json

KEYS = {"name", "ours", "baseline", "ratio", "goal", "met", "spread"}


def test_sides_alternate_and_each_runs_as_often():
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = alternate(3, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert measured == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_ratio_is_the_median_of_pairs_and_the_spread_their_range():
    figure = compare("x", "x", unit="s", ours=[1.0, 10.0, 2.0], baseline=[2.0, 40.0, 2.0], inverted=True, goal=">= 2.0")
    assert (figure.ratio, figure.spread, figure.met) == (2.0, (1.0, 4.0), True)
    assert (figure.ours, figure.baseline) == (2.0, 2.0)
    assert "2 (1 to 4)" in line(figure)


@pytest.mark.parametrize(
    ("ratio", "goal", "met"),
    [(2.5, ">= 2.5", True), (2.4, ">= 2.5", False), (1.3, "< 1.3", False), (1.1, "<= 1.1", True), (9.0, "", None)],
)
def test_goals(ratio, goal, met):
    assert meets(ratio, goal) is met


def test_clock_skips_sleep_and_keeps_the_order():
    async def work() -> list[str]:
        seen: list[str] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(name)

        await asyncio.gather(wait("late", 3000.0), wait("early", 1000.0))
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: 7) == 7
        return seen

    elapsed_s, _, seen = simulation.run_timed(work)
    assert seen == ["early", "late"]
    assert elapsed_s >= 3000.0


def test_players_play_the_same_workload_to_its_end():
    """Every player asserts that its episodes ended; by the clock none can beat the bound."""
    from benchmarks import players
    from benchmarks.rollout_makespan import _PLAYERS

    workload = simulation.make_workload(3, seed=1, max_turn=3)
    for player in _PLAYERS.values():
        elapsed_s, _, _ = simulation.run_timed(lambda player=player: players.play(player, workload))
        assert elapsed_s >= workload.bound_s() - 1e-6


def test_runner_writes_well_formed_json_and_the_page_reads_it(tmp_path):
    """The real runner and a real script, on its quick sizes."""
    out = tmp_path / "latest.json"
    assert run.main(["--quick", "--only", "batch_assembly", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [figure["name"] for figure in figures] == ["batch_peak_memory", "batch_time", "batch_short_episodes"]
    for figure in figures:
        assert KEYS <= figure.keys()
        low, high = figure["spread"]
        assert low <= figure["ratio"] <= high and figure["repetitions"] >= 5
    text = page.replace_table(f"Before.\n{page._BEGIN}\nold\n{page._END}\nAfter.\n", page.table(figures))
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    assert text.count("\n| ") == 1 + len(figures)
    page.plot(figures, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("batch_time") >= 1


def test_runner_keeps_other_figures_and_reports_a_script_that_fails(tmp_path, monkeypatch):
    old = compare("old", "old", unit="s", ours=[1.0], baseline=[1.0])
    out = tmp_path / "latest.json"
    origin = {"script": "tokens_per_turn", "machine": "m", "load_average": 0.0}
    out.write_text(json.dumps([{**to_json([old])[0], **origin}]))

    def fail(name: str, *, quick: bool) -> list:
        raise subprocess.CalledProcessError(3, name)

    monkeypatch.setattr(run, "run_script", fail)
    assert run.main(["--only", "batch_assembly", "--out", str(out)]) == 1
    assert [figure["name"] for figure in json.loads(out.read_text())] == ["old"]
