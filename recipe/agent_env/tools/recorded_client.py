# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An environment client that remembers what was said, for tools that show an episode afterwards.

Owns the record. The calls themselves are the real client's; nothing about an episode changes by being recorded.
"""

import time
from dataclasses import dataclass, field
from typing import Any, cast

from recipe.agent_env.env_client import AsyncEnvClient, AsyncEnvSession, Message, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One step that the service answered."""

    action: Message
    """What was sent."""
    result: StepResult
    """What came back."""
    seconds: float
    """How long it took."""


@dataclass(kw_only=True, slots=True)
class RecordedEpisode:
    """One environment from its opening on."""

    open_s: float
    """Seconds until prompt and tools were there."""
    task_prompt: str
    """System text."""
    observation: list[Message]
    """First observation."""
    tools_schema: list[dict[str, Any]]
    """Tools."""
    steps: list[RecordedStep] = field(default_factory=list)
    """In order."""


class RecordingClient:
    """Stands in for an `AsyncEnvClient` in `play_episode`.

    Args:
        client: The client that does the calls.
    """

    def __init__(self, client: AsyncEnvClient):
        self._client = client
        self.episodes: list[RecordedEpisode] = []
        """One per opened environment, in order; a restarted episode has several."""

    async def open(self, *, env_name: str, seed: object = None, env_kwargs: object = None) -> AsyncEnvSession:
        """Open an environment and start its record."""
        started = time.perf_counter()
        session = await self._client.open(env_name=env_name, seed=seed, env_kwargs=env_kwargs)
        record = RecordedEpisode(
            open_s=time.perf_counter() - started,
            task_prompt=session.task_prompt,
            observation=session.observation,
            tools_schema=session.tools_schema,
        )
        self.episodes.append(record)
        return cast(AsyncEnvSession, _RecordingSession(session, record))

    def as_client(self) -> AsyncEnvClient:
        """This object under the type that `play_episode` asks for."""
        return cast(AsyncEnvClient, self)


class _RecordingSession:
    """A session whose steps are recorded; everything else is the session's."""

    def __init__(self, session: AsyncEnvSession, record: RecordedEpisode):
        self._session = session
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def step(self, action: Message) -> StepResult:
        started = time.perf_counter()
        result = await self._session.step(action)
        self._record.steps.append(RecordedStep(action=action, result=result, seconds=time.perf_counter() - started))
        return result
