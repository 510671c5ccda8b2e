# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A fixed number of places, handed out first come, first served.

Owns: who gets the next free place. Refuses to know: what a place is for.
"""

import asyncio
from collections import deque


class CapacityGate:
    """Counts places in use. Use it from one event loop only.

    Args:
        limit: Places.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_in_use = 0
        self._waiters: deque[asyncio.Future[bool]] = deque()

    @property
    def num_waiting(self) -> int:
        """Callers in line."""
        return sum(not waiter.done() for waiter in self._waiters)

    async def acquire(self, wait_s: float) -> bool:
        """Take a place, standing in line for up to `wait_s` seconds.

        Returns:
            Whether a place was taken; then `release` must be called once.
        """
        if self.num_in_use < self.limit and not self.num_waiting:
            self.num_in_use += 1
            return True
        if wait_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(wait_s, _give_up, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self.release()
            raise
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def release(self) -> None:
        """Give a place back; it goes to the first in line."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return
        self.num_in_use -= 1


def _give_up(waiter: "asyncio.Future[bool]") -> None:
    if not waiter.done():
        waiter.set_result(False)
