# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Every limit of the service, in one record, checked when it is made.

Owns: names, units, defaults and bounds of the settings. Refuses to know: where the values come from (see `__main__`).
"""

from dataclasses import dataclass, field

SERVICE_NAME = "agent_env"
SERVICE_VERSION = "0.1.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSettings:
    """Limits and options of one service."""

    max_sessions: int = 1024
    """Environments alive at once. One more waits in line, then gets 503."""

    queue_wait_s: float = 5.0
    """How long `initialize` waits in line for a free place before it is answered 503. 0: at once."""

    retry_after_s: int = 1
    """What a 503 tells the client to wait, in whole seconds."""

    idle_timeout_s: float = 600.0
    """A session without a request for this long is closed (a client that died leaves sessions behind)."""

    call_timeout_s: float = 120.0
    """Longest run of one call into an environment. Past it the call is answered 504 and the session is lost."""

    close_timeout_s: float = 5.0
    """Longest wait for one environment's `close`, and for all of them at shutdown."""

    max_threads: int = 64
    """Synchronous environment calls that run at once. A thread lost to a hung call is replaced."""

    workers: int = 0
    """Processes that hold the environments. 0: the service's own process."""

    max_body_bytes: int = 4 * 1024 * 1024
    """Larger requests get 413."""

    bearer_token: str | None = field(default=None, repr=False)
    """When set, every request but `GET /` must carry it."""

    step_log_path: str | None = None
    """When set, one JSON line per initialize, reset, step and close is appended to this file."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: A setting is out of its bounds; the text names it.
        """
        for name, smallest in (
            ("max_sessions", 1),
            ("max_threads", 1),
            ("workers", 0),
            ("max_body_bytes", 1024),
            ("retry_after_s", 1),
            ("queue_wait_s", 0.0),
        ):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}: expected at least {smallest}, got {getattr(self, name)!r}")
        for name in ("idle_timeout_s", "call_timeout_s", "close_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0 seconds, got {getattr(self, name)!r}")
        if self.bearer_token is not None and not self.bearer_token.strip():
            raise ValueError("bearer_token: empty; leave it out for a service without one")
        if self.workers > self.max_sessions:
            raise ValueError(f"workers: {self.workers} processes for {self.max_sessions} sessions leave some idle")
