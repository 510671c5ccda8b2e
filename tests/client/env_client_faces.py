# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Both faces of the environment client behind one set of awaitable calls, so that one test covers both.

Owns that wrapping and the short limits of tests. Knows nothing of any test's subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from recipe.agent_env.env_client import AsyncEnvClient, EnvClient, EnvClientConfig, EnvSession

FACES = ("async", "sync")

SHORT_LIMITS: dict[str, Any] = {"retry_wait_s": 0.01, "retry_max_wait_s": 0.02, "close_timeout_s": 5.0}
"""Retries that follow at once; everything else as configured by default."""

ACTION = {"role": "assistant", "content": "up"}


class Threaded:
    """A sync client or session whose calls run in a thread and are awaited."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not callable(found) or name == "protocol":
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await asyncio.to_thread(found, *args, **kwargs)
            return Threaded(result) if isinstance(result, EnvSession) else result

        return call


@asynccontextmanager
async def connect(face: str, url: str | list[str], **settings: Any) -> AsyncIterator[Any]:
    """A client of either face; sessions that it opens have the same calls, all to be awaited."""
    config = EnvClientConfig(endpoint=url, **{**SHORT_LIMITS, **settings})
    if face == "async":
        async with AsyncEnvClient(config) as client:
            yield client
    else:
        sync_client = EnvClient(config)
        try:
            yield Threaded(sync_client)
        finally:
            await asyncio.to_thread(sync_client.close)
