# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a client knows about its environments, whichever face opened them.

Owns the facts of one open environment and the counts of one client. Sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipe.agent_env.client.answers import Capabilities, StartReply
from recipe.agent_env.client.errors import EnvError
from recipe.agent_env.client.messages import Message
from recipe.agent_env.client.protocol import Call, EnvProtocol
from recipe.agent_env.client.tool_check import ToolChecker, checker_of


@dataclass(kw_only=True, slots=True)
class ClientStats:
    """What one client did so far."""

    opened: int = 0
    """Environments that the service confirmed, late and malformed answers included."""
    closed: int = 0
    """Environments that are gone: the service confirmed `close`, or no longer knew them."""
    close_failures: int = 0
    """Environments whose `close` failed; the service's idle limit has to end them."""
    retries: int = 0
    """Calls sent again."""
    keepalive_failures: int = 0
    """Keepalive calls without a good answer."""

    @property
    def live(self) -> int:
        """Environments that are open now."""
        return self.opened - self.closed - self.close_failures


class SessionState:
    """What both faces know about one environment."""

    def __init__(self, env_name: str, env_id: str, protocol: EnvProtocol) -> None:
        self.protocol = protocol
        """Builds the calls to the service that it is open at."""
        self.env_name = env_name
        """The name it was opened with."""
        self.env_id = env_id
        """The service's id of it."""
        self.capabilities = Capabilities()
        """What the service declared beyond the protocol."""
        self.observation: list[Message] = []
        """First observation, of `initialize` or the last `reset`."""
        self.info: dict[str, Any] = {}
        """Of `initialize` or the last `reset`; never for the model."""
        self.is_terminated = False
        """The start is already solved or lost: there is nothing to play."""
        self.task_prompt = ""
        """System text of the task."""
        self.tools_schema: list[dict[str, Any]] = []
        """OpenAI tool schemas, as the service answered them."""
        self.allow_parallel_tool_call = False
        """Whether several calls in one turn are allowed."""
        self._tool_checker = ToolChecker([])
        self._step_index = 0
        self._is_in_doubt = False

    def take_start(self, start: StartReply) -> None:
        """Note the answer of `initialize` or `reset`, after which steps count from 0 again."""
        self.observation = start.observation
        self.info = start.info
        self.is_terminated = start.is_terminated
        self._step_index = 0
        self._is_in_doubt = False

    def take_tools(self, tools_schema: list[dict[str, Any]]) -> None:
        """Note the tools and their checks."""
        self.tools_schema = tools_schema
        self._tool_checker = checker_of(tools_schema)

    def check_tool_calls(self, message: Message) -> str | None:
        """Feedback for the model when a call in `message` would be refused, else None; see `ToolChecker.check`."""
        return self._tool_checker.check(message)

    def next_step_call(self, action: Message) -> Call:
        """The next step; carries its index where the service uses it to apply a repeated step once.

        Elsewhere the session is in doubt from here on, until `end_step` tells how the step went: a step that may have
        been applied must not be followed by another try.
        """
        if self._is_in_doubt:
            raise RuntimeError(
                f"a step of session {self.env_id!r} of {self.env_name!r} is under way, or failed and may have been "
                "applied; reset the session or open a new one"
            )
        step_index = self._step_index if self.capabilities.step_dedup else None
        call = self.protocol.step(self.env_name, self.env_id, action, step_index=step_index)
        self._is_in_doubt = step_index is None
        return call

    def end_step(self, failure: EnvError | None = None) -> None:
        """Note how the step of `next_step_call` went."""
        if failure is None:
            self._step_index += 1
        if failure is None or not failure.may_have_been_applied:
            self._is_in_doubt = False

    def raise_if_closed(self, is_closed: bool) -> None:
        """Refuse calls on a session that was closed."""
        if is_closed:
            raise RuntimeError(f"session {self.env_id!r} of {self.env_name!r} is closed; open a new one")
