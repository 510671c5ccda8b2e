# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Shows how far the rollout is while it runs, in the process that the user started.

Owns: asking the agent workers now and then, and the face of the answer: a bar on a terminal, elsewhere a line every ten
seconds. It runs on a thread of its own beside the training: it only reads, each question has a time limit, and
whatever goes wrong in it ends the display, never the run.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from recipe.agent_env.rollout.progress import RolloutProgress, add_up, progress_line

logger = logging.getLogger(__name__)

WORKER_NAME = "agent_loop_worker_"
"""How verl 0.9.1 names its agent workers (`AgentLoopManager._init_agent_loop_workers`)."""

_ASK_TIMEOUT_S = 5.0
_LINE_INTERVAL_S = 10.0
_BAR_INTERVAL_S = 1.0
_MAX_FAULTS_IN_A_ROW = 5


def agent_workers() -> list[Any]:
    """Handles of this run's agent workers; none before Ray and they have started."""
    import ray

    if not ray.is_initialized():
        return []
    handles = []
    for name in ray.util.list_named_actors():
        if name.startswith(WORKER_NAME):
            try:
                handles.append(ray.get_actor(name))
            except ValueError:
                continue  # it ended between the two calls
    return handles


def ask_workers() -> RolloutProgress | None:
    """The workers' counts, added up; None when there is no worker yet, or one does not answer in time.

    Raises:
        ray.exceptions.RayError: A worker is gone.
    """
    import ray

    pending = [worker.progress.remote() for worker in agent_workers()]
    if not pending:
        return None
    done, late = ray.wait(pending, num_returns=len(pending), timeout=_ASK_TIMEOUT_S)
    return None if late else add_up(ray.get(done))


class Rates:
    """Turns and tokens per second, between one look and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, RolloutProgress] | None = None

    def update(self, now: RolloutProgress, at_s: float) -> tuple[float, float]:
        """Take a look.

        Args:
            now: The counts.
            at_s: When, in seconds of any clock that only grows.

        Returns:
            Turns/s and tokens/s since the last look; a new rollout counts from its start.
        """
        last_s, last = self._last if self._last is not None else (at_s, RolloutProgress())
        self._last = (at_s, now)
        if at_s <= last_s:
            return 0.0, 0.0
        if now.num_turns < last.num_turns or now.num_tokens < last.num_tokens:
            last = RolloutProgress()
        elapsed_s = at_s - last_s
        return (now.num_turns - last.num_turns) / elapsed_s, (now.num_tokens - last.num_tokens) / elapsed_s


class ProgressDisplay:
    """A context: while it is open, the rollouts of this process's run are shown.

    Args:
        ask: Returns the present counts, or None when there is nothing to show.
        stream: Where to write; a terminal gets a bar.
        interval_s: Seconds between two looks; None: 1 on a terminal, 10 elsewhere.
    """

    def __init__(
        self,
        ask: Callable[[], RolloutProgress | None] = ask_workers,
        stream: TextIO | None = None,
        interval_s: float | None = None,
    ) -> None:
        self._ask = ask
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval_s = interval_s or (_BAR_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-progress", daemon=True)

    def __enter__(self) -> "ProgressDisplay":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._is_over.set()
        # A look that hangs must not keep the run from ending; the thread is a daemon.
        self._thread.join(timeout=_ASK_TIMEOUT_S + 1.0)

    def _run(self) -> None:
        show, close = self._bar() if self._is_terminal else (self._line, lambda: None)
        rates = Rates()
        num_faults = 0
        try:
            while not self._is_over.wait(self._interval_s):
                try:
                    now = self._ask()
                    num_faults = 0
                except Exception as error:
                    # Workers come and go at the start and at the end of a run.
                    num_faults += 1
                    logger.debug("no progress to show: %s: %s", type(error).__name__, error)
                    if num_faults >= _MAX_FAULTS_IN_A_ROW:
                        return
                    continue
                if now is not None:
                    show(now, *rates.update(now, time.monotonic()))
        except Exception as error:  # a closed stream; the run goes on without a display
            logger.debug("the progress display ended: %s: %s", type(error).__name__, error)
        finally:
            close()

    def _line(self, now: RolloutProgress, turns_per_s: float, tokens_per_s: float) -> None:
        """Quiet between rollouts."""
        if now.num_in_flight:
            print(progress_line(now, turns_per_s, tokens_per_s), file=self._stream, flush=True)

    def _bar(self) -> tuple[Callable[[RolloutProgress, float, float], None], Callable[[], None]]:
        """A bar that is there only while episodes are in flight; what others print scrolls above it."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        progress.start()

        def show(now: RolloutProgress, turns_per_s: float, tokens_per_s: float) -> None:
            if not now.num_in_flight:
                for task_id in progress.task_ids:
                    progress.remove_task(task_id)
                return
            text = (
                f"{now.num_in_flight} in flight, {now.num_failed} failed | "
                f"{turns_per_s:,.1f} turns/s, {tokens_per_s:,.0f} tokens/s"
            )
            if not progress.task_ids:
                progress.add_task("rollout", total=now.num_rows, text=text)
            progress.update(
                progress.task_ids[0], total=now.num_rows, completed=now.num_finished + now.num_failed, text=text
            )

        return show, progress.stop
