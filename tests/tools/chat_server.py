# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""An OpenAI-compatible chat endpoint on a loopback port, whose replies are a function of the conversation.

It checks what strict endpoints check: every tool call of the history has its tool message right behind it.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Body = dict[str, Any]


def call(name: str, arguments: str = "{}", *, call_id: str = "c1") -> dict[str, Any]:
    """A tool call as the endpoint answers it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def say(content: str | None = None, *calls: dict[str, Any], finish_reason: str = "stop", num_tokens: int = 7) -> Body:
    """A chat completion."""
    message = {"role": "assistant", "content": content, "tool_calls": list(calls) or None}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": num_tokens}}


def history_problem(messages: list[dict[str, Any]]) -> str | None:
    """What a strict endpoint would refuse about a conversation."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"no call {message['tool_call_id']}"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"calls {waiting} without an answer"
        for tool_call in message.get("tool_calls") or []:
            if not isinstance(json.loads(tool_call["function"]["arguments"]), dict):
                return "arguments are no object"
            waiting.append(tool_call["id"])
    return f"calls {waiting} without an answer" if waiting else None


class ChatServer:
    """Use it as a context manager.

    Args:
        reply: From a request's body to a completion, or to an HTTP status.
    """

    def __init__(self, reply: Callable[[Body], Body | int]):
        self._reply = reply
        self.requests: list[Body] = []
        """Bodies of all requests but the first, which only asks whether the endpoint is there."""
        self.headers: list[dict[str, str]] = []
        """Headers of all requests."""
        self.base_url = ""
        """With the version."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._is_ready = threading.Event()
        self._num_requests = 0

    def __enter__(self) -> "ChatServer":
        self._thread.start()
        assert self._is_ready.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._is_ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        self._num_requests += 1
        if self._num_requests > 1:
            self.requests.append(body)
        problem = history_problem(body["messages"])
        if problem is not None:
            return web.json_response({"error": {"message": problem}}, status=400)
        answer = self._reply(body)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "as told"}}, status=answer, headers={"Retry-After": "0"})
        return web.json_response(answer)
