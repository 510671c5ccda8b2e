# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The HTTP face of the service: a FastAPI application that speaks the protocol of DESIGN.md.

Owns: paths, status codes, the bearer token, the body limit, documentation. Refuses to know: environments and sessions,
which live behind one call `backend.call(operation, env_id, body, step_index)` that takes and gives raw bytes.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recipe.agent_env.env_service import wire
from recipe.agent_env.env_service.counters import to_prometheus, to_stats
from recipe.agent_env.env_service.errors import ServiceError
from recipe.agent_env.env_service.registry import EnvironmentRegistry
from recipe.agent_env.env_service.sessions import Answer, SessionStore
from recipe.agent_env.env_service.settings import SERVICE_NAME, SERVICE_VERSION, ServiceSettings
from recipe.agent_env.env_service.workers import ProcessBackend

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


class Operation:
    """One call of the protocol as an ASGI application: raw body in, raw answer out."""

    def __init__(self, backend: Backend, operation: str) -> None:
        self._backend = backend
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, have it answered, send the answer."""
        body = b""
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        try:
            if self._operation == "initialize":
                answer = await self._open(body, receive)
            else:
                step_index = next((value for name, value in scope["headers"] if name == b"x-env-step-index"), None)
                answer = await self._backend.call(
                    self._operation,
                    scope["path_params"]["env_id"],
                    body,
                    None if step_index is None else step_index.decode("latin-1"),
                )
        except ServiceError as error:
            await _error_response(error)(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _open(self, body: bytes, receive: Receive) -> Answer:
        """Initialize; when the client has hung up meanwhile, close at once, since nobody will ever learn the id."""
        hang_up = asyncio.ensure_future(receive())
        try:
            answer = await self._backend.call("initialize", "", body)
            if hang_up.done() and answer.env_id is not None:
                await self._backend.call("close", answer.env_id, b"")
            return answer
        finally:
            hang_up.cancel()

    def describe(self) -> None:
        """Stands in the route table for this object, whose call has the signature of an ASGI application."""


class OperationRoute(APIRoute):
    """A route that FastAPI documents and routes, and an `Operation` answers.

    FastAPI's own way from request to endpoint (dependency solving, exit stacks, response objects) took 40% of the
    processor time of a step; bodies are checked in `wire` anyway, since they may travel to another process first.
    """

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = endpoint.__self__


_OPERATIONS: tuple[tuple[str, str, type[BaseModel] | None, type[BaseModel]], ...] = (
    # In order of use: routes are tried one after the other.
    ("POST", "step", wire.StepRequest, wire.StepAnswer),
    ("POST", "initialize", wire.InitializeRequest, wire.InitializeAnswer),
    ("GET", "task-prompt", None, wire.TaskPromptAnswer),
    ("GET", "tools-schema-openai", None, wire.ToolsSchemaAnswer),
    ("GET", "allow-parallel-tool-call", None, wire.ParallelAnswer),
    ("POST", "close", None, wire.MessageAnswer),
    ("POST", "keepalive", None, wire.MessageAnswer),
    ("POST", "reset", wire.ResetRequest, wire.ResetAnswer),
    ("GET", "render", None, wire.RenderAnswer),
)


def create_app(
    registry: EnvironmentRegistry, settings: ServiceSettings | None = None, backend: Backend | None = None
) -> FastAPI:
    """Build the application.

    Args:
        registry: The environments on offer.
        settings: Limits; None: the defaults.
        backend: Where sessions live; None: in this process, or in `settings.workers` others.

    Returns:
        An application for any ASGI server; sessions are closed when its lifespan ends.
    """
    settings = settings or ServiceSettings()
    if backend is None:
        backend = ProcessBackend(registry, settings) if settings.workers else LocalBackend(registry, settings)
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

    for method, operation, request, answer in _OPERATIONS:
        app.router.add_api_route(
            f"{_PREFIX}/{operation}" if operation == "initialize" else f"{_PREFIX}/{{env_id}}/{operation}",
            Operation(backend, operation).describe,
            methods=[method],
            name=operation,
            description=(request or answer).__doc__,
            response_model=answer,
            responses=_ERRORS,
            openapi_extra=_request_docs(operation, request),
            route_class_override=OperationRoute,
        )

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


def _request_docs(operation: str, model: type[BaseModel] | None) -> dict[str, Any]:
    """OpenAPI of what an operation reads itself: path and header parameters, the body."""
    docs: dict[str, Any] = {"parameters": []}
    if operation != "initialize":
        docs["parameters"].append(
            {
                "name": "env_id",
                "in": "path",
                "required": True,
                "description": "What `initialize` answered.",
                "schema": {"type": "string"},
            }
        )
    if operation == "step":
        docs["parameters"].append(
            {
                "name": "X-Env-Step-Index",
                "in": "header",
                "required": False,
                "description": "Index of the step, from 0; a repeated index is answered from the stored answer.",
                "schema": {"type": "integer", "minimum": 0},
            }
        )
    if model is not None:
        schema = model.model_json_schema()
        docs["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
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
