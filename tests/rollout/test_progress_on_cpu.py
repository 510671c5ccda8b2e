# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Progress of a rollout: what is counted, what is shown, and that showing it can harm nothing."""

import io
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from recipe.agent_env.progress_display import ProgressDisplay, Rates, ask_workers
from recipe.agent_env.rollout.episode import EndReason
from recipe.agent_env.rollout.progress import RolloutProgress, add_up, progress_line, summary_line
from tests.rollout.episodes import make_episode


def test_episodes_are_counted_in_and_out():
    progress = RolloutProgress()
    progress.begin(4)
    with progress.episode() as played:
        assert (progress.num_in_flight, progress.num_finished) == (1, 0)
        progress.count_reply(7)
        played.append(make_episode())
    with progress.episode() as played:
        played.append(make_episode(end_reason=EndReason.FAILED))
    with pytest.raises(RuntimeError), progress.episode():
        raise RuntimeError("the engine is gone")
    assert progress.snapshot() == {
        "num_rows": 4,
        "num_in_flight": 0,
        "num_finished": 1,
        "num_failed": 2,
        "num_turns": 1,
        "num_tokens": 7,
    }
    progress.begin(2)
    assert progress.snapshot() == {**RolloutProgress().snapshot(), "num_rows": 2}


def test_line_adds_up_the_workers():
    a = RolloutProgress(num_rows=4, num_in_flight=2, num_finished=1, num_failed=1, num_turns=8, num_tokens=800)
    b = RolloutProgress(num_rows=4, num_in_flight=4)
    line = progress_line(add_up([a.snapshot(), b.snapshot()]), 3.25, 1234.4)
    assert line == "rollout: 2 of 8 episodes ended, 6 in flight, 1 failed | 3.2 turns/s, 1,234 tokens/s"


def test_rates_are_those_since_the_last_look_and_start_anew_with_a_rollout():
    rates = Rates()
    assert rates.update(RolloutProgress(num_turns=5, num_tokens=50), 10.0) == (0.0, 0.0)
    assert rates.update(RolloutProgress(num_turns=9, num_tokens=150), 12.0) == (2.0, 50.0)
    assert rates.update(RolloutProgress(num_turns=4, num_tokens=40), 16.0) == (1.0, 10.0)
    assert rates.update(RolloutProgress(num_turns=5, num_tokens=41), 16.0) == (0.0, 0.0)


def test_summary_counts_played_episodes_and_names_the_ends():
    episodes = [
        make_episode(rewards=[0.0, 1.0], success=1.0),
        make_episode(rewards=[-0.5], success=0.0, end_reason=EndReason.MAX_TURN),
        make_episode(end_reason=EndReason.FAILED),
        make_episode(rewards=[0.0, 0.0, 0.0], success=None),
    ]
    assert summary_line(episodes, 4.0, {"global_steps": 3, "validate": False}) == (
        "step 3 rollout: 4 episodes in 4.0 s, return 0.167, solved 50.0%, 2.0 turns, 3 tokens/s; "
        "ended as 2 terminated, 1 max_turn, 1 failed"
    )


def test_summary_of_an_outage_and_of_a_validation():
    failed = [make_episode(end_reason=EndReason.FAILED)]
    assert summary_line(failed, 1.0, {}) == "step ? rollout: 1 episodes in 1.0 s, 0 tokens/s; ended as 1 failed"
    assert summary_line([make_episode()], 1.0, {"validate": True, "global_steps": 0}).startswith("step 0 validation: ")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Asked:
    """Answers as told, the last answer again and again, and says when all were asked for."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.is_done = threading.Event()

    def __call__(self):
        answer = self._answers[0]
        if len(self._answers) > 1:
            self._answers.pop(0)
        else:
            self.is_done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


RUNNING = RolloutProgress(num_rows=8, num_in_flight=6, num_finished=2)
IDLE = RolloutProgress(num_rows=8, num_finished=8)


def test_lines_only_while_episodes_are_in_flight():
    stream = io.StringIO()
    ask = Asked(None, RUNNING, RUNNING, IDLE, IDLE)
    with ProgressDisplay(ask, stream, interval_s=0.001):
        assert ask.is_done.wait(30)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(line.startswith("rollout: 2 of 8 episodes ended, 6 in flight") for line in lines)


def test_terminal_gets_a_bar_that_goes_away():
    stream = Terminal()
    ask = Asked(RUNNING, RUNNING, IDLE)
    with ProgressDisplay(ask, stream, interval_s=0.2):
        assert ask.is_done.wait(30)
    assert "2/8" in stream.getvalue() and "6 in flight" in stream.getvalue()
    assert stream.getvalue().rstrip("\r").endswith("\x1b[2K\x1b[?25h"), "the bar is still there"


def test_faults_do_not_end_the_display_at_once_and_never_the_run():
    stream = io.StringIO()
    ask = Asked(OSError("gone"), OSError("gone"), RUNNING, None)
    with ProgressDisplay(ask, stream, interval_s=0.001):
        assert ask.is_done.wait(30)
    assert len(stream.getvalue().splitlines()) == 1
    dead = ProgressDisplay(Asked(OSError("gone")), stream, interval_s=0.001)
    with dead:
        dead._thread.join(30)
        assert not dead._thread.is_alive(), "it goes on asking for ever"


def test_closed_stream_ends_only_the_display():
    stream = io.StringIO()
    stream.close()
    display = ProgressDisplay(Asked(RUNNING), stream=_Closed(stream), interval_s=0.001)
    with display:
        display._thread.join(30)
        assert not display._thread.is_alive()


class _Closed:
    """A stream that breaks when written to."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name):
        return getattr(self._stream, name)


def test_question_that_hangs_does_not_keep_the_run_from_ending(monkeypatch):
    monkeypatch.setattr("recipe.agent_env.progress_display._ASK_TIMEOUT_S", -1.0)
    asked, answer = threading.Event(), threading.Event()

    def hang():
        asked.set()
        answer.wait(60)

    started = time.monotonic()
    with ProgressDisplay(hang, io.StringIO(), interval_s=0.001):
        assert asked.wait(30)
    assert time.monotonic() - started < 30, "it waited for the answer"
    answer.set()


def test_workers_are_found_by_their_names_and_a_late_one_gives_no_answer(monkeypatch):
    """Ray itself is replaced: what it would answer is given, what is asked of it is looked at."""
    answers = {"agent_loop_worker_0_ab": 3, "agent_loop_worker_1_cd": 4, "other_actor": 100}
    late: list[str] = []

    def get_actor(name):
        if name == "agent_loop_worker_2_ef":
            raise ValueError("it ended meanwhile")
        return SimpleNamespace(progress=SimpleNamespace(remote=lambda: name))

    def wait(pending, *, num_returns, timeout):
        assert num_returns == len(pending) == 2 and timeout > 0
        return [name for name in pending if name not in late], late

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [*answers, "agent_loop_worker_2_ef"])
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda done: [RolloutProgress(num_in_flight=answers[n]).snapshot() for n in done])
    assert ask_workers() == RolloutProgress(num_in_flight=7)
    late.append("agent_loop_worker_1_cd")
    assert ask_workers() is None
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert ask_workers() is None
