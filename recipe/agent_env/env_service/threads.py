# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A bounded pool of threads for synchronous environment code, driven by one event loop.

Owns: running a function off the loop with a time limit. Refuses to know: what the function does.

Unlike `concurrent.futures.ThreadPoolExecutor` its threads are daemons, so a hung environment cannot keep the process
from ending; a thread that is lost to a hung call is replaced, so hung calls cannot use up the pool; it grows only when
calls wait and none ends, since more threads than needed cost short calls dearly (256 clients, 64 threads: twice the
processor time per call); and bookkeeping happens on the loop alone, without locks.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


_GROW_AFTER_S = 0.01


class CallTimeoutError(Exception):
    """The function did not return within its limit; its thread goes on and its result will be dropped."""


class _Job:
    """One call and the future of its result."""

    __slots__ = ("args", "error", "function", "future", "is_abandoned", "on_late", "result")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        future: "asyncio.Future[Any]",
        on_late: Callable[[], None] | None,
    ) -> None:
        self.function = function
        self.args = args
        self.future = future
        self.on_late = on_late
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_abandoned = False


class ThreadPool:
    """Threads that are started when needed, at most `max_threads` plus the lost ones.

    Use it from one running event loop only.
    """

    def __init__(self, max_threads: int, name: str = "env") -> None:
        self._max_threads = max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_busy = 0
        self._num_lost = 0
        self._num_ended = 0
        self._is_watching = False

    @property
    def num_threads(self) -> int:
        """Threads alive."""
        return self._num_threads

    @property
    def num_lost(self) -> int:
        """Threads that still run a call whose time limit has passed."""
        return self._num_lost

    async def run(
        self,
        timeout_s: float,
        function: Callable[..., T],
        *args: Any,
        on_late: Callable[[], None] | None = None,
    ) -> T:
        """Run `function(*args)` on a thread.

        Args:
            timeout_s: Longest wait, time in line included.
            function: What to run.
            *args: Its arguments.
            on_late: Called on the loop once the function has ended after nobody waited for it any more.

        Raises:
            CallTimeoutError: Not done within `timeout_s`.
            Exception: What the function raised; what is no plain exception (SystemExit) comes as a RuntimeError.
        """
        loop = asyncio.get_running_loop()
        job = _Job(function, args, loop.create_future(), on_late)
        self._num_busy += 1
        self._jobs.put(job)
        if self._num_busy > self._num_threads and not self._is_watching:
            self._watch(loop)
        timer = loop.call_later(timeout_s, self._expire, job)
        try:
            return await job.future
        finally:
            timer.cancel()

    def shutdown(self) -> None:
        """Let idle threads end. Busy ones end with their call; none keeps the process alive."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start threads when calls wait and none has ended since the last look; look again while calls wait."""
        num_waiting = self._num_busy - self._num_threads
        num_free = self._max_threads + self._num_lost - self._num_threads
        if self._num_threads == 0 or (self._is_watching and self._num_ended == 0):
            for _ in range(min(num_waiting, num_free, max(1, self._num_threads))):
                self._start_thread(loop)
        self._num_ended = 0
        self._is_watching = num_waiting > 0
        if self._is_watching:
            loop.call_later(_GROW_AFTER_S, self._watch, loop)

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, args=(loop,), name=f"{self._name}-{self._num_threads}", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.is_abandoned:  # its time may have passed in line
                try:
                    job.result = job.function(*job.args)
                except BaseException as error:  # reported by `_finish`
                    job.error = error
            # The loop is closed when the process is ending; there is nobody to tell then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, job)
            job = None

    def _finish(self, job: _Job) -> None:
        self._num_busy -= 1
        self._num_ended += 1
        if job.is_abandoned:
            self._num_lost -= 1
        if job.future.done():
            if job.on_late is not None:
                job.on_late()
        elif job.error is None:
            job.future.set_result(job.result)
        elif isinstance(job.error, Exception) and not isinstance(job.error, StopIteration):
            job.future.set_exception(job.error)
        else:
            # SystemExit would end the loop, StopIteration cannot travel through a future.
            job.future.set_exception(RuntimeError(f"environment code raised {type(job.error).__name__}"))

    def _expire(self, job: _Job) -> None:
        if job.future.done():
            return
        job.is_abandoned = True
        self._num_lost += 1
        job.future.set_exception(CallTimeoutError())
