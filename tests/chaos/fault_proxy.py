# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A proxy in front of a service that breaks requests and answers at random.

Owns the faults, how often each is injected, and their count. Refuses to know: environments, clients, what is right.
"""

import asyncio
import json
import random
from collections import Counter
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import aiohttp
from aiohttp import web

from tests.chaos.services import RestartableService

MARKER = "CHAOS-PAGE"
"""Stands in every page of the proxy's own; no token of a row may come from one."""

_PAGE = f"<html><body><h1>{MARKER}</h1>Traceback (most recent call last): File 'gateway.py'</body></html>"
_WRONG_FIELDS: dict[str, list[tuple[str, Any]]] = {
    "initialize": [("env_id", []), ("env_id", None), ("observation", [{"role": 3}]), ("info", "text")],
    "step": [
        ("reward", "1.0"),
        ("reward", None),
        ("reward", float("nan")),
        ("done", "false"),
        ("truncated", None),
        ("observation", [{"role": ["user"]}]),
        ("info", 3),
    ],
    "task-prompt": [("task_prompt", 7), ("task_prompt", ["text"])],
    "tools-schema-openai": [("tools_schema", "text"), ("tools_schema", [1])],
    "allow-parallel-tool-call": [("allow_parallel_tool_call", "no")],
}
"""Fields that the protocol's rules refuse, by call."""

PROXY_FAULTS = (
    "delay",
    "drop_before",
    "drop_after",
    "status_500",
    "status_503",
    "html",
    "truncated",
    "wrong_types",
    "clock",
)
"""What one request may meet here. Restarts and a full service happen behind the proxy."""


class FaultProxy:
    """Forwards to one service.

    Args:
        upstream: The service.
        rates: Probability of each fault per request; faults that are not named are off. May be changed at any time.
        time_limit_s: The client's limit on a call; some delays are longer.
        hides_dedup: Whether the service looks like one that cannot apply a repeated step once.
        rng: Draws the faults.
    """

    def __init__(
        self,
        upstream: RestartableService,
        rates: dict[str, float],
        *,
        time_limit_s: float,
        hides_dedup: bool,
        rng: random.Random,
    ) -> None:
        self.rates = rates
        self.injected: Counter[str] = Counter()
        """How often each fault was injected, and how often the service itself said that it is full (`capacity`)."""
        self.url = ""
        self._upstream = upstream
        self._time_limit_s = time_limit_s
        self._hides_dedup = hides_dedup
        self._rng = rng
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Listen on a free loopback port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=75.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def stop(self) -> None:
        """Stop listening."""
        assert self._runner is not None and self._http is not None
        await self._runner.cleanup()
        await self._http.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = request.path.rpartition("/")[2]
        fault = self._draw(call)
        if fault == "delay":
            is_long = self._rng.random() < 0.15
            await asyncio.sleep(self._time_limit_s * (1.2 if is_long else 0.1 * self._rng.random()))
        elif fault == "drop_before":
            return _drop(request)
        elif fault == "status_500":
            return web.Response(status=500, text=_PAGE)
        elif fault == "status_503":
            return web.Response(status=503, text=_PAGE, headers={"Retry-After": "0.05"})
        elif fault == "clock":
            return self._refuse_by_a_wrong_clock()
        elif fault == "html" and self._rng.random() < 0.5:
            return web.Response(text=_PAGE, content_type="text/html")
        try:
            answer, content = await self._forward(request, body)
        except aiohttp.ClientError:  # the service is being restarted
            return web.Response(status=502, text=_PAGE)
        if answer.status == 503:
            self.injected["capacity"] += 1
        return self._spoil(request, call, answer, content, fault)

    def _draw(self, call: str) -> str | None:
        """At most one fault for a request."""
        point = self._rng.random()
        for fault, rate in self.rates.items():
            point -= rate
            if point < 0:
                if fault == "wrong_types" and call not in _WRONG_FIELDS:
                    return None
                self.injected[fault] += 1
                return fault
        return None

    async def _forward(self, request: web.Request, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        assert self._http is not None
        passed_on = ("Content-Type", "X-Env-Step-Index")
        headers = {name: request.headers[name] for name in passed_on if name in request.headers}
        async with self._http.request(
            request.method, f"{self._upstream.url}{request.path}", data=body or None, headers=headers
        ) as answer:
            return answer, await answer.read()

    def _spoil(
        self, request: web.Request, call: str, answer: aiohttp.ClientResponse, content: bytes, fault: str | None
    ) -> web.StreamResponse:
        """The service's answer, or what is left of it."""
        if fault == "drop_after":
            return _drop(request)
        if fault == "html":
            return web.Response(text=_PAGE, content_type="text/html")
        if fault == "truncated":
            assert request.transport is not None
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
            request.transport.write(head + content[: len(content) // 2])  # type: ignore[attr-defined]
            return _drop(request)
        if call == "initialize" and self._hides_dedup and answer.status == 200:
            start = json.loads(content)
            content = json.dumps({**start, "capabilities": {**start["capabilities"], "step_dedup": False}}).encode()
        if fault == "wrong_types" and answer.status == 200:
            field, value = self._rng.choice(_WRONG_FIELDS[call])
            content = json.dumps({**json.loads(content), field: value}).encode()
        elif fault == "wrong_types":
            self.injected[fault] -= 1  # an error has no fields to spoil
        headers = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
        return web.Response(status=answer.status, body=content, headers=headers, content_type="application/json")

    def _refuse_by_a_wrong_clock(self) -> web.Response:
        """A busy answer of a gateway whose clock is an hour off, so that the time to come again is nonsense."""
        when = datetime.now(timezone.utc) + timedelta(hours=self._rng.choice([-1, 1]))
        date = format_datetime(when, usegmt=True)
        return web.Response(status=503, text=_PAGE, headers={"Retry-After": date, "Date": date})


def _drop(request: web.Request) -> web.Response:
    """Close the connection without a further byte."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()
