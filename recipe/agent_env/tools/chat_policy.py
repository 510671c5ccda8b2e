# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A policy behind an OpenAI-compatible chat endpoint, for the episode loop that trains on tokens.

Owns the conversation with the endpoint. `play_episode` asks for token ids; an endpoint gives text, so ids here are
placeholders: as many as the endpoint says it sampled, which is all that the loop's limits need. Nothing that is trained
on may be made from them.
"""

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import aiohttp

from recipe.agent_env.agent_dataset import EpisodeTokenizer
from recipe.agent_env.env_client import Message
from recipe.agent_env.prompt_styles.replies import ParsedReply
from recipe.agent_env.rollout.episode import EngineError, SampledReply

_PLACEHOLDER_ID = 0
_MAX_RETRY_AFTER_S = 60.0
_PASSING_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """How to reach the model."""

    base_url: str
    """URL up to and with the version, such as `http://localhost:8000/v1`."""
    model: str
    """The model's name there."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    temperature: float | None = None
    """None: the endpoint's choice."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    timeout_s: float = 600.0
    """Longest wait for one reply."""
    max_retries: int = 4
    """How often a request that failed in passing is sent again."""
    retry_wait_s: float = 1.0
    """Wait before the first of them; doubles."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base URL: expected http:// or https://, got {self.base_url!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """One answer of the endpoint."""

    message: Message
    """Assistant message with `content` str and `tool_calls` list."""
    reasoning: str
    """Thinking that the endpoint keeps apart; empty for none."""
    is_cut: bool
    """Whether the token limit ended it."""
    num_tokens: int
    """Tokens that were sampled; 1 where the endpoint does not say."""


class ChatEndpoint:
    """An OpenAI-compatible endpoint, for one event loop; an async context manager."""

    def __init__(self, config: EndpointConfig):
        self.config = config
        """As given."""
        self.num_prompt_tokens = 0
        """Read so far, as the endpoint counts them."""
        self.num_sampled_tokens = 0
        """Sampled so far."""
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ChatEndpoint":
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()

    async def reply(self, messages: list[Message], tools: list[dict[str, Any]], max_tokens: int) -> ChatReply:
        """One reply.

        Args:
            messages: The conversation so far.
            tools: Tool schemas; empty for none.
            max_tokens: Longest reply.

        Raises:
            EngineError: The endpoint failed, or answered something that is no chat completion.
        """
        body: dict[str, Any] = {"model": self.config.model, "messages": messages, "max_tokens": max_tokens}
        if tools:
            body["tools"] = tools
        if self.config.temperature is not None:
            body["temperature"] = self.config.temperature
        answer = await self._post({**body, **self.config.extra})
        reply = _read_completion(answer)
        usage = answer.get("usage") or {}
        self.num_prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self.num_sampled_tokens += reply.num_tokens
        return reply

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, again where the failure may pass."""
        wait_s = self.config.retry_wait_s
        for tries_left in range(self.config.max_retries, -1, -1):
            try:
                return await self._post_once(body)
            except _PassingError as exc:
                if tries_left == 0:
                    raise EngineError(str(exc)) from exc
                await asyncio.sleep(wait_s if exc.retry_after_s is None else min(_MAX_RETRY_AFTER_S, exc.retry_after_s))
                wait_s *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    async def _post_once(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._http is not None
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        try:
            async with self._http.post(url, json=body) as response:
                text = await response.text()
                status, retry_after = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, asyncio.TimeoutError) as exc:
            raise _PassingError(f"no answer from {url}: {type(exc).__name__}: {exc}") from exc
        if status in _PASSING_STATUSES:
            wait_s = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
            raise _PassingError(f"{url} answered {status}: {text[:300]}", retry_after_s=wait_s)
        if status != 200:
            raise EngineError(f"{url} answered {status}: {text[:300]}")
        try:
            answer = json.loads(text)
        except ValueError as exc:
            raise EngineError(f"{url}: expected JSON, got {text[:120]!r}") from exc
        if not isinstance(answer, dict):
            raise EngineError(f"{url}: expected a JSON object, got {text[:120]!r}")
        return answer


class _PassingError(Exception):
    """A failure after which the same request may succeed."""

    def __init__(self, text: str, *, retry_after_s: float | None = None):
        super().__init__(text)
        self.retry_after_s = retry_after_s


def _read_completion(answer: dict[str, Any]) -> ChatReply:
    """The first choice of a chat completion.

    Raises:
        EngineError: The answer has another shape.
    """
    try:
        choice = answer["choices"][0]
        said = choice["message"]
        calls = [
            {
                "id": str(call.get("id") or f"call{i:05d}"),
                "type": "function",
                "function": {"name": str(call["function"]["name"]), "arguments": _text(call["function"]["arguments"])},
            }
            for i, call in enumerate(said.get("tool_calls") or [])
        ]
        message = {"role": "assistant", "content": _text(said.get("content")), "tool_calls": calls}
        num_tokens = int((answer.get("usage") or {}).get("completion_tokens") or 1)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        raise EngineError(f"expected a chat completion, got {json.dumps(answer)[:300]}") from exc
    return ChatReply(
        message=message,
        reasoning=_text(said.get("reasoning_content") or said.get("reasoning")),
        is_cut=choice.get("finish_reason") == "length",
        num_tokens=max(1, num_tokens),
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidTurn:
    """One turn as text, for people."""

    reply: str
    """What the model said and called."""
    observation: str
    """What it was answered; empty at the end."""


class ChatConversation:
    """One episode's conversation: sampler and tokenizer of `play_episode` in one, since both need the messages.

    Args:
        endpoint: The model.
    """

    def __init__(self, endpoint: ChatEndpoint):
        self._endpoint = endpoint
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self._reply: ChatReply | None = None
        self.prompt = ""
        """The first prompt as text."""
        self.turns: list[SaidTurn] = []
        """What was said."""

    def as_tokenizer(self) -> EpisodeTokenizer:
        """This object under the type that `play_episode` asks for."""
        return cast(EpisodeTokenizer, self)

    @property
    def style(self) -> "ChatConversation":
        """Reads replies too."""
        return self

    def first_prompt(
        self, task_prompt: str, observation: list[Message], tools_schema: list[dict[str, Any]]
    ) -> tuple[list[int], bool]:
        """Begin; also begins again when an episode is restarted."""
        system: list[Message] = [{"role": "system", "content": task_prompt}] if task_prompt else []
        self._messages = system + observation
        self._tools = tools_schema
        self._reply = None
        self.prompt = _shown(self._messages)
        self.turns = []
        return [_PLACEHOLDER_ID], False

    async def sample(self, context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
        """Ask the endpoint for the next reply."""
        reply = await self._endpoint.reply(self._messages, self._tools, max_tokens)
        self._reply = reply
        self.turns.append(SaidTurn(reply=_shown_reply(reply), observation=""))
        num_tokens = max_tokens if reply.is_cut else min(reply.num_tokens, max_tokens)
        return SampledReply(ids=[_PLACEHOLDER_ID] * num_tokens)

    def is_reply_complete(self, sampled_ids: list[int]) -> bool:
        """Whether the model ended its reply by itself."""
        assert self._reply is not None
        return not self._reply.is_cut

    def parse_reply(self, sampled_ids: list[int], tools: list[dict[str, Any]] | None) -> ParsedReply:
        """The endpoint has parsed it already; arguments are checked against the schema by the episode loop."""
        assert self._reply is not None
        message = self._reply.message
        return ParsedReply(message=message, calls_found=len(message["tool_calls"]))

    def observation_delta(self, observation: list[Message], sampled_ids: list[int]) -> tuple[list[int], bool]:
        """Note the answer to the last reply."""
        assert self._reply is not None
        said = _for_history(self._reply)
        answers = _answer_every_call(said, observation)
        self._messages = [*self._messages, said, *answers]
        self.turns[-1] = SaidTurn(reply=self.turns[-1].reply, observation=_shown(answers))
        return [_PLACEHOLDER_ID], False


def _for_history(reply: ChatReply) -> Message:
    """The reply as endpoints take it back: calls only with arguments that are JSON objects, none from a cut reply."""
    message = {"role": "assistant", "content": reply.message["content"]}
    calls = [] if reply.is_cut else reply.message["tool_calls"]
    if calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return message


def _object_text(arguments: str) -> str:
    try:
        return arguments if isinstance(json.loads(arguments), dict) else "{}"
    except ValueError:
        return "{}"


def _answer_every_call(said: Message, observation: list[Message]) -> list[Message]:
    """Endpoints refuse a call without a tool message of its id right behind it: give each one its own.

    The environment's tool messages come first, in the order of the calls; a call without one gets the text of the
    first other message (the feedback to a broken call is one), or an empty text.
    """
    calls = said.get("tool_calls") or []
    if not calls:
        return [message if message["role"] != "tool" else {**message, "role": "user"} for message in observation]
    by_id = {message.get("tool_call_id"): message for message in observation if message["role"] == "tool"}
    others = [message for message in observation if message["role"] != "tool"]
    answers: list[Message] = []
    for call in calls:
        answer = by_id.get(call["id"])
        if answer is None:
            taken = others.pop(0) if others and not by_id else {"content": ""}
            answer = {"content": taken["content"]}
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": answer["content"]})
    return answers + others


def _shown_reply(reply: ChatReply) -> str:
    """A reply for people."""
    parts = [f"<think>{reply.reasoning}</think>"] if reply.reasoning else []
    parts += [reply.message["content"]] if reply.message["content"] else []
    parts += [f"{c['function']['name']}({c['function']['arguments']})" for c in reply.message["tool_calls"]]
    return "\n".join(parts)


def _shown(messages: list[Message]) -> str:
    """Messages for people."""
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
