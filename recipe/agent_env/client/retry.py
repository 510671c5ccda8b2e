# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""When a failed call is tried again, and how long to wait first.

Owns the retry rules, as options for tenacity's sync and async loops alike. Sends nothing itself.

A call is tried again only when its failure may pass (no connection, a broken connection, 429, 502, 503, 504) and the
repeat does no harm: the call is repeatable, or the service cannot have acted on it. A time-out after sending is never
tried again: the call has had its time. Retries are bounded in count and in time; at a full service `initialize` queues
under a longer bound in time alone, with waits no shorter than the first backoff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenacity import RetryCallState, retry_if_exception
from tenacity.wait import wait_exponential, wait_random

from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.errors import EnvError
from recipe.agent_env.client.protocol import Call


def retry_options(
    config: EnvClientConfig,
    call: Call,
    on_retry: Callable[[], None],
    has_other: Callable[[], bool] = lambda: False,
    *,
    spent_s: float = 0.0,
) -> dict[str, Any]:
    """Options for `tenacity.Retrying` or `tenacity.AsyncRetrying` that carry out one call.

    Args:
        on_retry: Called once before each repeat.
        has_other: Whether the repeat goes to another service, for which there is nothing to wait.
        spent_s: What the first try took, where it was made before; it counts towards the limits.
    """
    backoff = wait_exponential(multiplier=config.retry_wait_s, max=config.retry_max_wait_s)
    jitter = wait_random(0, config.retry_wait_s)
    fault_count = 0

    def is_worth_retrying(exc: BaseException) -> bool:
        return isinstance(exc, EnvError) and exc.is_transient and (call.is_repeatable or not exc.may_have_been_applied)

    def wait(state: RetryCallState) -> float:
        if has_other():
            return jitter(state)
        asked_s = _failure(state).retry_after_s
        if not asked_s:
            return backoff(state) + jitter(state)
        return max(min(asked_s, config.max_retry_after_s), config.retry_wait_s) + jitter(state)

    def stop(state: RetryCallState) -> bool:
        nonlocal fault_count
        elapsed_s = spent_s + (state.seconds_since_start or 0.0) + state.upcoming_sleep
        if call.name == "initialize" and _failure(state).is_busy:
            return elapsed_s > config.busy_wait_s
        fault_count += 1
        return fault_count > config.max_retries or elapsed_s > min(config.retry_time_s, call.retry_time_s)

    return {
        "retry": retry_if_exception(is_worth_retrying),
        "wait": wait,
        "stop": stop,
        "before_sleep": lambda state: on_retry(),
        "reraise": True,
    }


def _failure(state: RetryCallState) -> EnvError:
    """The failure that the retry loop is looking at."""
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, EnvError)
    return failure
