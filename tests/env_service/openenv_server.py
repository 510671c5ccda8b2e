# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Environments written with OpenEnv's own package, served by its own server on loopback.

Owns: what the adapter's tests talk to. Refuses to know: the adapter.
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)


class GuessAction(Action):
    """Name a number."""

    number: int
    on: datetime.date | None = None
    """What a date is, a JSON schema does not tell."""


class GuessObservation(Observation):
    """What was said, and a flag."""

    hint: str = ""
    won: bool = False
    num_guesses: int = 0


class GuessEnvironment(Environment):
    """Find a number; negative guesses break it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    num_closed = 0

    def reset(self, seed=None, episode_id=None, high=20):
        if high < 1:
            raise ValueError("high is too low")
        self.number, self.num_guesses = (seed or 0) % high, 0
        return GuessObservation(hint=f"Guess a number below {high}.")

    def step(self, action, timeout_s=None):
        if action.number < 0:
            raise RuntimeError("boom")
        self.num_guesses += 1
        won = action.number == self.number
        hint = "Yes!" if won else "No."
        reward = 1.0 if won else None
        return GuessObservation(hint=hint, won=won, num_guesses=self.num_guesses, reward=reward, done=won)

    @property
    def state(self):
        return State()

    def close(self):
        type(self).num_closed += 1


class TalkAction(Action):
    """Say something."""

    message: str


class TalkObservation(Observation):
    """Two texts and a list."""

    heard: str = ""
    mood: str = ""
    history: list[str] = []


class TalkEnvironment(Environment):
    """Hears what is said."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None):
        self.history: list[str] = []
        return TalkObservation(heard="", mood="calm")

    def step(self, action, timeout_s=None):
        self.history.append(action.message)
        return TalkObservation(heard=action.message, mood="glad", history=self.history, reward=True)

    @property
    def state(self):
        return State()


class ToolEnvironment(MCPEnvironment):
    """Offers tools by the Model Context Protocol."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("tools")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @tools.tool
        def fail(text: str) -> str:
            """Never works."""
            raise ValueError(text)

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **options):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **options):
        raise AssertionError("only tools are called")

    @property
    def state(self):
        return State()


GUESS = (GuessEnvironment, GuessAction, GuessObservation)
TALK = (TalkEnvironment, TalkAction, TalkObservation)
TOOLS = (ToolEnvironment, CallToolAction, CallToolObservation)


@contextlib.contextmanager
def openenv_server(kinds: tuple[Any, Any, Any], *, max_sessions: int = 8, **options: Any) -> Iterator[str]:
    """Run an OpenEnv server in a thread; its URL."""
    config = uvicorn.Config(
        create_fastapi_app(*kinds, max_concurrent_envs=max_sessions),
        host="127.0.0.1",
        port=0,
        log_level="critical",
        timeout_graceful_shutdown=5,
        **options,
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the OpenEnv server did not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
