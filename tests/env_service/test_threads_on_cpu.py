# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The thread pool: limits, growth, lost threads, errors."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from recipe.agent_env.env_service.capacity import CapacityGate
from recipe.agent_env.env_service.threads import CallTimeoutError, ThreadPool


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Calls that wait on it end with the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def fail(error: BaseException) -> None:
    raise error


async def test_result_and_error_come_back():
    pool = ThreadPool(2)
    assert await pool.run(10.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(10.0, divmod, 7, 0)
    pool.shutdown()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration()], ids=repr)
async def test_what_would_end_the_loop_comes_as_an_error(error: BaseException):
    pool = ThreadPool(1)
    with pytest.raises(RuntimeError, match=type(error).__name__):
        await pool.run(10.0, fail, error)
    assert await pool.run(10.0, len, "abc") == 3
    pool.shutdown()


async def test_blocked_calls_get_threads_up_to_the_limit(gate: threading.Event):
    pool = ThreadPool(3)
    calls = [asyncio.ensure_future(pool.run(30.0, gate.wait)) for _ in range(5)]
    while pool.num_threads < 3:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert pool.num_threads == 3 and not any(call.done() for call in calls)
    gate.set()
    assert await asyncio.gather(*calls) == [True] * 5
    pool.shutdown()


async def test_short_calls_share_one_thread():
    pool = ThreadPool(64)
    for _ in range(50):
        assert await pool.run(10.0, len, "abc") == 3
    assert pool.num_threads == 1
    pool.shutdown()


async def test_lost_threads_are_replaced_and_late_ends_reported(gate: threading.Event):
    pool = ThreadPool(1)
    late: list[int] = []
    for number in range(3):
        with pytest.raises(CallTimeoutError):
            await pool.run(0.05, gate.wait, on_late=lambda number=number: late.append(number))
    assert pool.num_lost == 3
    assert await pool.run(10.0, len, "abc") == 3
    assert late == []
    gate.set()
    while pool.num_lost:
        await asyncio.sleep(0.001)
    assert sorted(late) == [0, 1, 2]
    pool.shutdown()


async def test_call_whose_time_passed_in_line_never_runs(gate: threading.Event):
    pool = ThreadPool(1)
    blocking = asyncio.ensure_future(pool.run(30.0, gate.wait))
    await asyncio.sleep(0.01)
    ran: list[int] = []
    waiting = asyncio.ensure_future(pool.run(0.0, ran.append, 1))
    with pytest.raises(CallTimeoutError):
        await waiting
    gate.set()
    await blocking
    while pool.num_lost:
        await asyncio.sleep(0.001)
    assert ran == []
    pool.shutdown()


async def test_cancelled_waiter_gives_its_place_on():
    places = CapacityGate(1)
    assert await places.acquire(0.0) and not await places.acquire(0.0)
    first, second = (asyncio.ensure_future(places.acquire(30.0)) for _ in range(2))
    await asyncio.sleep(0)
    places.release()
    first.cancel()
    assert await second
    assert (places.num_in_use, places.num_waiting) == (1, 0)
    places.release()
    assert places.num_in_use == 0


async def test_waiter_gives_up_after_its_time():
    places = CapacityGate(1)
    assert await places.acquire(0.0)
    assert not await places.acquire(0.02)
    places.release()
    assert await places.acquire(0.0)
