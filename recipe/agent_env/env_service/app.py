# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The HTTP face of the service: a FastAPI application that speaks the protocol of DESIGN.md.

Owns: paths, status codes, the bearer token, the body limit, documentation. Refuses to know: environments and sessions,
which live behind one call `backend.call(operation, env_id, body, step_index)` that takes and gives raw bytes.
"""

import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipe.agent_env.env_service import wire
from recipe.agent_env.env_service.counters import to_prometheus, to_stats
from recipe.agent_env.env_service.errors import ServiceError
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.sessions import Answer, SessionStore
from recipe.agent_env.env_service.settings import SERVICE_NAME, SERVICE_VERSION, ServiceSettings

_PREFIX = "/api/environment"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorAnswer, "description": text}
    for status, text in (
        (400, "The body is not JSON."),
        (401, "The bearer token is missing or wrong."),
        (404, "No such environment name or session."),
        (409, "The step does not follow the last one, or the episode is over."),
        (410, "The session was there and is gone."),
        (413, "The body is too large."),
        (422, "The request has another form than documented, or the environment refuses its values."),
        (500, "The environment crashed or answered outside its interface; its session is lost."),
        (503, "Every place is taken, or the service shuts down; retry after `Retry-After` seconds."),
        (504, "The environment ran past its time limit; its session is lost."),
    )
}


class Backend(Protocol):
    """Where the sessions live."""

    async def start(self) -> None:
        """Get ready; called once before the first request."""

    async def shutdown(self) -> None:
        """Close every session."""

    async def call(self, operation: str, env_id: str, body: bytes, step_index: str | None = None) -> Answer:
        """Answer one request, or raise `ServiceError`."""

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Merged counters, and the present values of gauges."""


class LocalBackend:
    """Sessions in this process."""

    def __init__(self, registry: EnvironmentRegistry, settings: ServiceSettings) -> None:
        self.store = SessionStore(registry, settings)
        self.start = self.store.start
        self.shutdown = self.store.shutdown
        self.call = self.store.call

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Counters of the one store."""
        gate = self.store.gate
        return self.store.counters.snapshot(), {"max_sessions": gate.limit, "waiting": gate.num_waiting}


class Guard:
    """ASGI middleware: the bearer token and the body limit, before anything is read.

    Args:
        app: What is guarded.
        bearer_token: Required on every path but `/`; None: open to all.
        max_body_bytes: Larger bodies are refused, whether or not they announce their size.
    """

    def __init__(self, app: ASGIApp, bearer_token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if bearer_token is None else f"Bearer {bearer_token}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("//"):
            # A base URL with a trailing slash.
            scope = {**scope, "path": "/" + scope["path"].lstrip("/")}
        length, given = None, b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = value
            elif name == b"authorization":
                given = value
        if self._expected is not None and not hmac.compare_digest(given, self._expected) and scope["path"] != "/":
            error = ServiceError(401, "unauthorized", "expected the service's bearer token in Authorization")
            await _error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        if length is None:
            receive = self._limit(receive)
        elif not length.isdigit() or int(length) > self._max_body_bytes:
            await _error_response(self._too_large(), {"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _too_large(self) -> ServiceError:
        return ServiceError(413, "body_too_large", f"expected at most {self._max_body_bytes} bytes")

    def _limit(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited


def create_app(
    registry: EnvironmentRegistry, settings: ServiceSettings | None = None, backend: Backend | None = None
) -> FastAPI:
    """Build the application.

    Args:
        registry: The environments on offer.
        settings: Limits; None: the defaults.
        backend: Where sessions live; None: in this process.

    Returns:
        An application for any ASGI server; sessions are closed when its lifespan ends.
    """
    settings = settings or ServiceSettings()
    backend = backend or LocalBackend(registry, settings)
    started = time.monotonic()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        yield
        await backend.shutdown()

    app = FastAPI(
        title="Environment service",
        description="Gym-like environments for language-model agents over HTTP.",
        version=SERVICE_VERSION,
        lifespan=lifespan,
        openapi_url="/openapi.json",
    )
    app.state.backend = backend
    app.add_middleware(Guard, bearer_token=settings.bearer_token, max_body_bytes=settings.max_body_bytes)
    app.add_exception_handler(ServiceError, _answer_service_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_bug)

    def add_session_route(
        method: str, operation: str, request: type[BaseModel] | None, answer: type[BaseModel]
    ) -> None:
        async def endpoint(env_id: str, request: Request) -> Response:
            result = await backend.call(
                operation, env_id, await request.body(), request.headers.get("x-env-step-index")
            )
            return Response(result.body, media_type="application/json")

        endpoint.__doc__ = answer.__doc__ if request is None else request.__doc__
        app.add_api_route(
            f"{_PREFIX}/{{env_id}}/{operation}",
            endpoint,
            methods=[method],
            name=operation,
            response_model=answer,
            responses=_ERRORS,
            openapi_extra=_request_docs(request, has_step_index=operation == "step"),
        )

    @app.post(
        f"{_PREFIX}/initialize",
        response_model=wire.InitializeAnswer,
        responses=_ERRORS,
        openapi_extra=_request_docs(wire.InitializeRequest),
    )
    async def initialize(request: Request) -> Response:
        """Open an environment and start its first episode."""
        answer = await backend.call("initialize", "", await request.body())
        if answer.env_id is not None and await request.is_disconnected():
            # Nobody will ever learn this id.
            await backend.call("close", answer.env_id, b"")
        return Response(answer.body, media_type="application/json")

    add_session_route("POST", "step", wire.StepRequest, wire.StepAnswer)
    add_session_route("GET", "task-prompt", None, wire.TaskPromptAnswer)
    add_session_route("GET", "tools-schema-openai", None, wire.ToolsSchemaAnswer)
    add_session_route("GET", "allow-parallel-tool-call", None, wire.ParallelAnswer)
    add_session_route("POST", "close", None, wire.MessageAnswer)
    add_session_route("POST", "reset", wire.ResetRequest, wire.ResetAnswer)
    add_session_route("POST", "keepalive", None, wire.MessageAnswer)
    add_session_route("GET", "render", None, wire.RenderAnswer)

    @app.get("/")
    async def health() -> dict[str, str]:
        """Whether the service answers. Needs no token."""
        return {"status": "ok", "service": SERVICE_NAME, "version": SERVICE_VERSION}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Live sessions, capacity, counters and step latencies."""
        snapshot, gauges = await backend.snapshot()
        return {
            "service": SERVICE_NAME,
            "version": SERVICE_VERSION,
            "environments": registry.names,
            "uptime_s": round(time.monotonic() - started, 3),
            **gauges,
            **to_stats(snapshot),
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        """The counters for Prometheus."""
        return Response(to_prometheus(*await backend.snapshot()), media_type="text/plain; version=0.0.4")

    return app


def _request_docs(model: type[BaseModel] | None, has_step_index: bool = False) -> dict[str, Any] | None:
    """OpenAPI of a body that the endpoint reads itself."""
    if model is None:
        return None
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    docs: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }
    if has_step_index:
        docs["parameters"] = [
            {
                "name": "X-Env-Step-Index",
                "in": "header",
                "required": False,
                "description": "Index of the step, from 0; a repeated index is answered from the stored answer.",
                "schema": {"type": "integer", "minimum": 0},
            }
        ]
    return docs


def _error_response(error: ServiceError, headers: dict[str, str] | None = None) -> Response:
    if error.retry_after_s is not None:
        headers = {**(headers or {}), "Retry-After": str(error.retry_after_s)}
    return Response(json.dumps(error.to_json()), error.status, headers, media_type="application/json")


async def _answer_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "not_found", 405: "method_not_allowed"}
    answer = ServiceError(error.status_code, kinds.get(error.status_code, "refused"), str(error.detail))
    return _error_response(answer, dict(error.headers or {}))


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _error_response(ServiceError(500, "internal_error", f"a bug of the service ({type(error).__name__})"))
