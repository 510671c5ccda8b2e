# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""One HTTP exchange on `requests`, with the limits that `requests` lacks.

Owns the whole-call time limit (requests bounds each read, so one byte a second never ends), the size limit, the age
limit of pooled connections, and the knowledge of whether a request had left when it failed. Knows nothing of the
protocol's fields or of retries. Name look-up is bounded by the resolver's own limit only.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http.client import BadStatusLine, LineTooLong, RemoteDisconnected, UnknownProtocol
from http.cookiejar import DefaultCookiePolicy
from types import TracebackType
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from recipe.agent_env.client.config import EnvClientConfig
from recipe.agent_env.client.protocol import Answer, Call, EnvProtocol

_CHUNK_BYTES = 64 * 1024


class SyncTransport:
    """Sends calls; safe to share between threads."""

    def __init__(self, config: EnvClientConfig, protocol: EnvProtocol) -> None:
        self._config = config
        self._protocol = protocol
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.clear()
        self._session.headers.update(config.resolve_headers())
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._session.verify = (config.ca_file or True) if config.verify_tls else False
        if config.client_cert_file is not None:
            key_file = config.client_key_file or config.client_cert_file
            self._session.cert = (config.client_cert_file, key_file)
        self._proxies = {
            endpoint: {"http": proxy, "https": proxy} if (proxy := config.resolve_proxy(endpoint)) is not None else None
            for endpoint in config.endpoints
        }
        adapter = _LimitedAdapter(config.keepalive_s)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def send(self, call: Call) -> Answer:
        """Send one call and read its whole answer.

        Raises:
            EnvUnreachableError, EnvTimeoutError, EnvProtocolError: No answer, not in time, or too long.
        """
        connect_limit_s = min(self._config.connect_timeout_s, call.timeout_s)
        headers = dict(call.headers)
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        with _Watch(call.timeout_s) as watch:
            try:
                with self._session.request(
                    call.method,
                    call.url,
                    data=call.body,
                    headers=headers,
                    timeout=(connect_limit_s, call.timeout_s),
                    allow_redirects=False,
                    proxies=self._proxies[call.endpoint],
                    stream=True,
                ) as response:
                    answer = Answer(
                        status=response.status_code,
                        body=self._read(response, call),
                        retry_after=response.headers.get("Retry-After"),
                        location=response.headers.get("Location"),
                    )
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
                if watch.has_expired or isinstance(exc, requests.ReadTimeout):
                    raise self._protocol.timed_out(call, was_sent=watch.was_sent, limit_s=call.timeout_s) from exc
                if isinstance(exc, requests.ConnectTimeout):
                    raise self._protocol.timed_out(call, was_sent=False, limit_s=connect_limit_s) from exc
                if _is_no_http(exc):
                    raise self._protocol.not_http(call, exc) from exc
                raise self._protocol.unreachable(call, exc, was_sent=watch.was_sent) from exc
        if watch.has_expired:  # http.client takes a connection shut in mid-header for the end of the headers
            raise self._protocol.timed_out(call, was_sent=True, limit_s=call.timeout_s)
        return answer

    def _read(self, response: requests.Response, call: Call) -> bytes:
        """The whole body, within the size limit."""
        body = bytearray()
        for chunk in response.iter_content(_CHUNK_BYTES):
            body += chunk
            if len(body) > self._config.max_response_bytes:
                raise self._protocol.too_long(call)
        return bytes(body)

    def close(self) -> None:
        """Drop all pooled connections."""
        self._session.close()


def _is_no_http(exc: BaseException | None) -> bool:
    """Whether bytes came that are no HTTP answer, somewhere in a chain of exceptions."""
    while exc is not None:
        if isinstance(exc, (BadStatusLine, LineTooLong, UnknownProtocol)):
            return not isinstance(exc, RemoteDisconnected)
        exc = exc.__cause__ or exc.__context__
    return False


class _Watch:
    """Ends the exchange of the current thread when its time is over, by shutting its socket down."""

    _current = threading.local()

    def __init__(self, limit_s: float) -> None:
        self.was_sent = False
        self.has_expired = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(limit_s, self._expire)
        self._timer.daemon = True

    @classmethod
    def current(cls) -> _Watch | None:
        """The watch of the exchange that this thread is in."""
        return getattr(cls._current, "watch", None)

    def attach(self, sock: socket.socket | None) -> None:
        """Name the socket to shut down; one that comes too late is shut down at once."""
        self._socket = sock
        if self.has_expired:
            self._expire()

    def _expire(self) -> None:
        self.has_expired = True
        if self._socket is not None:
            with suppress(OSError, ValueError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Watch:
        self._current.watch = self
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._socket = None
        self._current.watch = None


class _WatchedMixin:
    """A connection that reports to the watch, and that calls itself dropped once it has idled too long."""

    keepalive_s = 0.0
    sock: Any
    _answered_at = 0.0

    def send(self, data: Any) -> None:
        watch = _Watch.current()
        if self.sock is None:
            self.connect()  # type: ignore[attr-defined]
        if watch is not None:
            watch.attach(self.sock)
            watch.was_sent = True
        super().send(data)  # type: ignore[misc]

    def getresponse(self) -> Any:
        response = super().getresponse()  # type: ignore[misc]
        self._answered_at = time.monotonic()
        return response

    @property
    def is_connected(self) -> bool:
        is_fresh = time.monotonic() - self._answered_at <= self.keepalive_s
        return is_fresh and super().is_connected  # type: ignore[misc]


class _LimitedAdapter(HTTPAdapter):
    """An adapter whose pools make watched connections."""

    def __init__(self, keepalive_s: float) -> None:
        attributes = {"keepalive_s": keepalive_s}
        plain = type("WatchedHTTPConnection", (_WatchedMixin, HTTPConnection), attributes)
        secure = type("WatchedHTTPSConnection", (_WatchedMixin, HTTPSConnection), attributes)
        self._pool_classes = {
            "http": type("WatchedHTTPPool", (HTTPConnectionPool,), {"ConnectionCls": plain}),
            "https": type("WatchedHTTPSPool", (HTTPSConnectionPool,), {"ConnectionCls": secure}),
        }
        super().__init__(pool_maxsize=32)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pool_classes

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **kwargs)
        manager.pool_classes_by_scheme = self._pool_classes
        return manager
