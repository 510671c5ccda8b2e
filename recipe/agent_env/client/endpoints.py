# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which of several services the next episode goes to.

Owns the choice and what it is based on: the free places that services report, the episodes we hold at each, and which
service has just failed to open one. Sends nothing; both faces of the client ask it and tell it how things went.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from recipe.agent_env.client.errors import EnvError

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARNING"))

_REPORT_INTERVAL_S = 2.0
"""A report of free places older than this is asked for again."""
_SILENT_INTERVAL_S = 30.0
"""A service that reported nothing is asked again after this."""
_REFUSALS = frozenset({400, 422})
"""Answers that are about the request's own content, as a bad data row gets them anywhere."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass(kw_only=True, slots=True)
class _Service:
    """What is known about one service."""

    endpoint: str
    num_episodes: int = 0
    """Open or opening, of this client."""
    num_free: int | None = None
    """Places by its last report, less what this client has opened since; None: it reports none."""
    num_failures: int = 0
    """To open an episode, since the last success."""
    out_until: float = -math.inf
    """Left out until then."""
    report_due: float = -math.inf
    """When to ask for its free places."""
    last_chosen: int = 0


class EndpointChooser:
    """Spreads episodes over services.

    Where every service in question reports its free places, the one with the most gets the episode; else the one where
    we hold the fewest, full ones last. One that failed to open an episode is left out for 1 s, twice as long when it
    fails again afterwards, 30 s at most; one that is merely full, for 1 s. When all are left out, the next to come back
    is taken: an open never fails for want of a choice.

    Args:
        endpoints: Root URLs, at least one.
        clock: Seconds, monotonic.
    """

    def __init__(self, endpoints: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._services = {endpoint: _Service(endpoint=endpoint) for endpoint in endpoints}
        self._clock = clock
        self._num_chosen = 0

    @contextmanager
    def opening(self) -> Iterator[str]:
        """Choose a service for one try at `initialize`; the episode counts there until `release`, unless it failed."""
        service = self._choose()
        self._num_chosen += 1
        service.last_chosen = self._num_chosen
        self._count(service, +1)
        try:
            yield service.endpoint
        except BaseException as exc:
            self._count(service, -1)
            if isinstance(exc, EnvError):
                self.note_failure(service.endpoint, exc)
            raise

    def note_opened(self, endpoint: str) -> None:
        """An episode is open there, with all that it needs."""
        self._services[endpoint].num_failures = 0

    def release(self, endpoint: str) -> None:
        """An episode there is over."""
        self._count(self._services[endpoint], -1)

    def note_failure(self, endpoint: str, failure: EnvError) -> None:
        """Leave a service out for a while, unless it only refused what was asked.

        Calls that were under way when it failed do not make that longer.
        """
        service = self._services[endpoint]
        if failure.status in _REFUSALS or not self._is_in(service):
            return
        pause_s = _FIRST_PAUSE_S
        if not failure.is_busy:
            service.num_failures += 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (service.num_failures - 1), _LONGEST_PAUSE_S)
        service.out_until = self._clock() + pause_s
        if len(self._services) > 1 and not failure.is_busy:
            logger.warning("no new episodes for %s for %g s: %s", endpoint, pause_s, failure)

    def has_other(self) -> bool:
        """Whether a service is there that is not left out, so that another try need not wait."""
        return len(self._services) > 1 and any(self._is_in(service) for service in self._services.values())

    def due_reports(self) -> list[str]:
        """Services to ask for their free places now; each is handed out once. None where there is no choice."""
        if len(self._services) == 1:
            return []
        now = self._clock()
        due = [service for service in self._services.values() if service.report_due <= now]
        for service in due:
            service.report_due = now + _REPORT_INTERVAL_S
        return [service.endpoint for service in due]

    def note_report(self, endpoint: str, num_free: int | None) -> None:
        """Take down a service's free places; None: it does not say."""
        service = self._services[endpoint]
        service.num_free = num_free
        if num_free is None:
            service.report_due = self._clock() + _SILENT_INTERVAL_S

    def _choose(self) -> _Service:
        services = [service for service in self._services.values() if self._is_in(service)]
        if not services:
            return min(self._services.values(), key=lambda service: service.out_until)
        if all(service.num_free is not None for service in services):
            return max(services, key=lambda s: (s.num_free, -s.num_episodes, -s.last_chosen))
        return min(services, key=lambda s: (s.num_free is not None and s.num_free <= 0, s.num_episodes, s.last_chosen))

    def _is_in(self, service: _Service) -> bool:
        return service.out_until <= self._clock()

    def _count(self, service: _Service, change: int) -> None:
        service.num_episodes += change
        if service.num_free is not None:
            service.num_free -= change
