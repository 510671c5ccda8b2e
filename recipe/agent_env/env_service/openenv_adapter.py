# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Serve the environments of an OpenEnv server: each session here is one WebSocket session there.

Owns: OpenEnv's session protocol (`/ws`, `/schema`, `/metadata`; read in openenv-core 0.3.0) and the mapping between its
actions and observations and ours. Refuses to know: what an environment is about. The protocol is a few JSON messages,
so neither OpenEnv's package nor the environment's own client is needed here.

    python -m recipe.agent_env.env_service --openenv echo-v0=http://localhost:8001

or, with options, one line in a module of the user's, whose name then goes to the command line (`my_pkg.echo:echo`):

    echo = serve_openenv("http://localhost:8001", task_prompt="Say something nice.")
"""

import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from recipe.agent_env.env_service.environment import Message, ResetResult, StepResult, read_tool_calls
from recipe.agent_env.env_service.errors import ServiceError

ACT_TOOL = "act"
"""Name of the one tool of an environment whose action is a record."""

_CONNECT_TIMEOUT_S = 30.0
_DESCRIPTION_AGE_S = 60.0
_MAX_MESSAGE_BYTES = 100 * 1024 * 1024
_CAPACITY_RETRY_AFTER_S = 1


class OpenEnvError(Exception):
    """The OpenEnv server failed or broke its protocol; the session with it is lost."""


class _RefusedError(OpenEnvError):
    """The server found a message of ours invalid; its session goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvFactory:
    """Makes sessions with one OpenEnv server; see `serve_openenv`."""

    url: str
    task_prompt: str | None = None
    text_field: str | None = None
    observation_field: str | None = None
    descriptions: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict, repr=False, compare=False)
    """What the server said of itself by path, and when, so that not every session asks again."""

    def __call__(self, **reset_options: Any) -> "OpenEnvEnvironment":
        """One environment; connects at its first `reset`.

        Args:
            **reset_options: A row's `env_kwargs`, sent with each `reset`.
        """
        return OpenEnvEnvironment(self, reset_options)


def serve_openenv(
    url: str,
    *,
    task_prompt: str | None = None,
    text_field: str | None = None,
    observation_field: str | None = None,
) -> OpenEnvFactory:
    """A factory for the registry or the command line.

    Args:
        url: Root of the OpenEnv server.
        task_prompt: What the policy is told once. None: the server's own description of the environment.
        text_field: Field of the action that takes the policy's plain text; no tool is offered then.
        observation_field: Field of the observation that the policy reads. None: see `observation_text`.

    Raises:
        ValueError: The URL is not http or https.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"OpenEnv server {url!r}: expected an http:// or https:// URL")
    return OpenEnvFactory(
        url=url.rstrip("/"), task_prompt=task_prompt, text_field=text_field, observation_field=observation_field
    )


@dataclass(kw_only=True, slots=True)
class _Connection:
    """One WebSocket with its HTTP session, and the answers that have come."""

    http: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse
    answers: "asyncio.Queue[str | None]" = field(default_factory=asyncio.Queue)
    reading: "asyncio.Task[None] | None" = None

    async def read_for_ever(self) -> None:
        """Queue what comes, None at the end. Runs all the time: only a read answers the server's pings, and a server
        whose pings stay unanswered through a long generation hangs up."""
        try:
            async for message in self.socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self.answers.put_nowait(message.data)
        finally:
            self.answers.put_nowait(None)

    async def close(self) -> None:
        """Hang up; the server then closes the environment."""
        await self.socket.close()
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.gather(self.reading, return_exceptions=True)
        await self.http.close()


class OpenEnvEnvironment:
    """One OpenEnv session behind the interface of `environment.Environment`.

    Args:
        factory: Server and options.
        reset_options: Sent with each `reset`, besides the seed.
    """

    allow_parallel_tool_call = False
    is_over = False

    def __init__(self, factory: OpenEnvFactory, reset_options: dict[str, Any]) -> None:
        self.task_prompt = ""
        self.tools_schema: list[dict[str, Any]] = []
        self.version = "0"
        self._factory = factory
        self._reset_options = reset_options
        self._connection: _Connection | None = None
        self._is_mcp = False

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Connect where that has not happened yet, and start an episode.

        Raises:
            ValueError: The server refuses the options.
            ServiceError: 503 when all of the server's sessions are in use.
            OpenEnvError: The server failed.
        """
        if self._connection is None:
            self._connection = await self._connect()
            await self._describe(self._connection.http)
        data = {**self._reset_options, **(options or {})}
        if seed is not None:
            data["seed"] = seed
        try:
            answer = await self._ask("reset", data)
        except _RefusedError as error:
            raise ValueError(str(error)) from None
        observation, _, is_done = self._read(answer)
        if self._is_mcp and not self.tools_schema:
            self.tools_schema = await self._list_tools()
        self.is_over = is_done
        return self._first_text(observation), scalars(observation)

    async def step(self, action: Message) -> StepResult:
        """Translate the policy's call, or its text, into one action.

        Raises:
            OpenEnvError: The server or its environment failed.
        """
        calls = read_tool_calls(action)
        if self._factory.text_field is not None:
            data: dict[str, Any] = {self._factory.text_field: action["content"]}
        elif not calls:
            return "Call one of the tools.", 0.0, False, False, {}
        elif self._is_mcp:
            data = {"type": "call_tool", "tool_name": calls[0].name, "arguments": calls[0].arguments}
        else:
            data = calls[0].arguments
        try:
            answer = await self._ask("step", data)
        except _RefusedError as error:
            return f"Invalid action: {error}", 0.0, False, False, {}
        observation, reward, is_done = self._read(answer)
        return self._text(observation), reward, is_done, False, scalars(observation)

    async def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    # ---- the protocol ----------------------------------------------------------------------------------------------

    async def _connect(self) -> _Connection:
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S))
        try:
            socket = await http.ws_connect(f"{self._factory.url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            await http.close()
            raise OpenEnvError(f"no OpenEnv server at {self._factory.url}: {type(error).__name__}: {error}") from error
        except BaseException:
            await http.close()
            raise
        connection = _Connection(http=http, socket=socket)
        connection.reading = asyncio.create_task(connection.read_for_ever())
        return connection

    async def _describe(self, http: aiohttp.ClientSession) -> None:
        """Learn what the environment is called and which actions it takes."""
        metadata = await self._get(http, "/metadata")
        self.version = str(metadata.get("version") or "0")
        description = str(metadata.get("description") or "")
        self.task_prompt = description if self._factory.task_prompt is None else self._factory.task_prompt
        if self._factory.text_field is not None:
            return
        schema = (await self._get(http, "/schema")).get("action")
        if not isinstance(schema, dict):
            raise OpenEnvError(f"{self._factory.url}/schema: expected an object 'action'")
        parameters = action_parameters(schema)
        self._is_mcp = not parameters["properties"] or "tool_name" in parameters["properties"]
        if not self._is_mcp:
            self.tools_schema = [_tool(ACT_TOOL, str(schema.get("description") or "Take one action."), parameters)]

    async def _get(self, http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        """What the server says of itself, at most a minute old."""
        now = time.monotonic()
        said_at, answer = self._factory.descriptions.get(path, (-math.inf, None))
        if answer is not None and now - said_at < _DESCRIPTION_AGE_S:
            return answer
        try:
            async with http.get(f"{self._factory.url}{path}") as response:
                response.raise_for_status()
                answer = await response.json()
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            raise OpenEnvError(f"{self._factory.url}{path}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise OpenEnvError(f"{self._factory.url}{path}: expected an object")
        self._factory.descriptions[path] = (now, answer)
        return answer

    async def _list_tools(self) -> list[dict[str, Any]]:
        """The tools of an environment that offers them by the Model Context Protocol."""
        answer = await self._ask("mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1})
        result = answer.get("result")
        if not isinstance(result, dict) or not isinstance(result.get("tools"), list):
            raise OpenEnvError(
                f"tools/list of {self._factory.url}: expected a list of tools, got {answer.get('error')}"
            )
        tools = []
        for tool in result["tools"]:
            schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
            tools.append(_tool(tool["name"], tool.get("description") or "", schema))
        return tools

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one message and wait for its answer; the service limits how long a call may take.

        Raises:
            _RefusedError: The message is invalid to the server.
            ServiceError: 503, all of the server's sessions are in use.
            OpenEnvError: Anything else that is no answer.
        """
        connection = self._connection
        if connection is None:
            raise OpenEnvError("the session with the OpenEnv server is closed")
        try:
            await connection.socket.send_str(json.dumps({"type": kind, "data": data}))
        except (aiohttp.ClientError, OSError):
            pass  # it hung up; what it said before that is in the queue
        text = await connection.answers.get()
        if text is None:
            raise OpenEnvError(f"{self._factory.url} hung up during {kind}")
        try:
            message = json.loads(text)
            content = message["data"]
            is_error = message["type"] == "error"
        except (ValueError, KeyError, TypeError) as error:
            raise OpenEnvError(f"{self._factory.url}: no message of OpenEnv's protocol after {kind}") from error
        if not isinstance(content, dict):
            raise OpenEnvError(f"{self._factory.url}: 'data' of the answer to {kind} is no object")
        if not is_error:
            return content
        code, reason = content.get("code"), str(content.get("message"))
        if code == "VALIDATION_ERROR":
            raise _RefusedError(_validation_text(content))
        if code == "CAPACITY_REACHED":
            raise ServiceError(503, "at_capacity", f"{self._factory.url}: {reason}", _CAPACITY_RETRY_AFTER_S)
        raise OpenEnvError(f"{kind} at {self._factory.url}: {code}: {reason}")

    def _read(self, answer: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        """Observation, reward (None counts 0) and whether the episode is over."""
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvError(
                f"{self._factory.url}: expected an object 'observation', got {type(observation).__name__}"
            )
        reward = answer.get("reward")
        if not isinstance(reward, int | float | None):
            raise OpenEnvError(f"{self._factory.url}: expected a number as reward, got {reward!r}")
        return observation, float(reward or 0.0), bool(answer.get("done"))

    # ---- what the policy reads -------------------------------------------------------------------------------------

    def _text(self, observation: dict[str, Any]) -> str:
        name = self._factory.observation_field
        if name is None:
            return observation_text(observation)
        if name not in observation:
            raise OpenEnvError(f"observation_field={name!r}: the observation has only {sorted(observation)}")
        value = observation[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _first_text(self, observation: dict[str, Any]) -> str | list[Message]:
        """Environments with tools often start with an empty observation: then there is no message."""
        return self._text(observation) if observation else []


def action_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an action as the parameters of a tool: without `metadata`, which is not the policy's."""
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    kept = {key: value for key, value in schema.items() if key in ("$defs", "additionalProperties", "required")}
    return {"type": "object", "properties": properties, "required": [], **kept}


def observation_text(observation: dict[str, Any]) -> str:
    """An observation for the policy.

    Returns:
        For the result of a tool: its text, or the error's message. For an observation whose only text field holds
        something: that text. Else the whole observation as JSON.
    """
    if "tool_name" in observation and "result" in observation:
        error = observation.get("error")
        return str(error.get("message")) if isinstance(error, dict) else _result_text(observation["result"])
    texts = [value for value in observation.values() if isinstance(value, str) and value]
    has_structure = any(isinstance(value, dict | list) and value for value in observation.values())
    if len(texts) == 1 and not has_structure:
        return texts[0]
    return json.dumps(observation, ensure_ascii=False)


def _result_text(result: Any) -> str:
    """What a tool returned: the texts of its content parts, or JSON."""
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(part, dict) and "text" in part for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def scalars(observation: dict[str, Any]) -> dict[str, Any]:
    """The numbers and flags of an observation, as `info`; `env.success_key` may name one of them."""
    return {name: value for name, value in observation.items() if isinstance(value, bool | int | float)}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _validation_text(content: dict[str, Any]) -> str:
    """Which field is wrong and why, as the server says it."""
    errors = content.get("errors")
    if not isinstance(errors, list) or not errors:
        return str(content.get("message"))
    return "; ".join(f"{'.'.join(map(str, error.get('loc', [])))}: {error.get('msg')}" for error in errors)
