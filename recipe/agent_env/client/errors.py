# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What can go wrong between us and an environment service, as exceptions.

Owns the closed set of failure kinds and the facts that travel with each one. Knows nothing of HTTP libraries, of
retries, or of what an episode does about a failure. The model's mistakes are not here: they are no exceptions.
"""

from __future__ import annotations


class EnvError(Exception):
    """The environment failed, not the model: this trajectory carries no learning signal.

    The text says what was expected, what came, where (call, URL, environment), and what to do next. The same facts are
    attributes, so that callers can count and group failures without reading text. The episode loop adds episode and
    turn to the text, which only it knows.
    """

    def __init__(
        self,
        message: str,
        *,
        call: str = "",
        url: str = "",
        env_name: str | None = None,
        env_id: str | None = None,
        status: int | None = None,
        may_have_been_applied: bool = True,
        is_transient: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.call = call
        """Which call of the protocol failed: `initialize`, `reset`, `step`, `close`, `task-prompt`, ..."""
        self.url = url
        """The URL that was called; never holds credentials."""
        self.env_name = env_name
        """The environment's registered name; None for calls that concern the whole service."""
        self.env_id = env_id
        """The session's id; None before the service gave one."""
        self.status = status
        """HTTP status of the answer; None when no answer came."""
        self.may_have_been_applied = may_have_been_applied
        """False only when the service cannot have acted on the request."""
        self.is_transient = is_transient
        """True when the same request may succeed a moment later."""
        self.retry_after_s = retry_after_s
        """The wait the service asked for, in seconds; None when it named none."""

    @property
    def is_busy(self) -> bool:
        """The service is up but has no room now: it said 429, or 503 together with a time to come again."""
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)


class EnvUnreachableError(EnvError):
    """No answer: refused, reset, unknown host, failed TLS. `may_have_been_applied` tells whether the request left."""


class EnvTimeoutError(EnvError):
    """No complete answer within the limit. `may_have_been_applied` is False when the connection never stood."""


class EnvRejectedError(EnvError):
    """The service answered 3xx or 4xx: it understood enough to say no."""


class EnvGoneError(EnvRejectedError):
    """The service no longer knows this session (404 or 410): it expired, or the service restarted."""


class EnvCrashedError(EnvError):
    """The service, or a gateway in front of it, answered 5xx."""


class EnvProtocolError(EnvError):
    """An answer outside the agreed shape; never retried."""
