# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""How to reach an environment service, or several alike: addresses, limits, credentials, TLS and proxy.

Owns the settings of the client, their checks, and the look-up of secrets. Opens no connection and reads no process
environment unless a setting names the variable or sets `trust_env`.
"""

from __future__ import annotations

import math
import os
import ssl
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_POSITIVE_FIELDS = ("request_timeout_s", "connect_timeout_s", "close_timeout_s", "max_retry_after_s", "retry_wait_s")
_NON_NEGATIVE_FIELDS = ("keepalive_s", "late_answer_s", "retry_time_s", "busy_wait_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvClientConfig:
    """Settings of one client; checked at construction (`ValueError` names the field)."""

    endpoint: str | Sequence[str]
    """Root URL of the service, http or https; a trailing slash does not matter. Several: see `endpoints`."""
    request_timeout_s: float = 60.0
    """Longest wait for one complete answer, connecting and queueing for a connection included."""
    connect_timeout_s: float = 10.0
    """Longest wait for the TCP and TLS connection alone."""
    close_timeout_s: float = 10.0
    """Longest wait for the answer to `close`; shorter than other calls, since nobody needs its answer."""
    late_answer_s: float = 30.0
    """How much longer to listen for an `initialize` that timed out, so that a late environment is closed."""
    keepalive_s: float = 2.0
    """A pooled connection idle for longer is not used again: servers drop theirs after 5 s (uvicorn), unannounced."""
    max_retries: int = 8
    """How often one call is tried again after a failure that may pass; enough to fill `retry_time_s`."""
    retry_time_s: float = 30.0
    """No retry starts later than this after the first try."""
    retry_wait_s: float = 0.25
    """Wait before the first retry; doubles with each further one, with jitter."""
    retry_max_wait_s: float = 8.0
    """Upper bound of that doubling."""
    max_retry_after_s: float = 30.0
    """Upper bound of a wait that the service asks for with `Retry-After`."""
    busy_wait_s: float = 300.0
    """How long `initialize` queues at a full service (429, or 503 with `Retry-After`), instead of the retry limits."""
    max_concurrent_episodes: int = 256
    """Environments that one async client holds open at once; also bounds its connections. Further opens queue."""
    max_response_bytes: int = 64 * 1024 * 1024
    """An answer longer than this (decompressed) is refused, not read."""
    bearer_token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer ...`; at most one of the three token settings may be set."""
    bearer_token_file: str | None = None
    """File that holds the token, surrounding blanks ignored."""
    bearer_token_env: str | None = None
    """Name of the environment variable that holds the token."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Extra headers of every request."""
    verify_tls: bool = True
    """Whether the service's certificate is checked."""
    ca_file: str | None = None
    """PEM file with the authorities to trust instead of the system's."""
    client_cert_file: str | None = None
    """PEM file with our certificate, for services that ask for one."""
    client_key_file: str | None = None
    """PEM file with its key, where the certificate's file does not hold it."""
    proxy: str | None = field(default=None, repr=False)
    """URL of an HTTP proxy; None: connect directly, whatever the process environment says."""
    trust_env: bool = False
    """Whether the proxy variables of the process (HTTP_PROXY, NO_PROXY, ...) decide when `proxy` is None."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "endpoint", _checked_endpoints(self.endpoint))
        for name in _POSITIVE_FIELDS:
            _check_seconds(name, getattr(self, name), allow_zero=False)
        for name in _NON_NEGATIVE_FIELDS:
            _check_seconds(name, getattr(self, name), allow_zero=True)
        for name, least in (("max_retries", 0), ("max_concurrent_episodes", 1), ("max_response_bytes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.retry_max_wait_s < self.retry_wait_s:
            raise ValueError(f"retry_max_wait_s ({self.retry_max_wait_s}) is below retry_wait_s ({self.retry_wait_s})")
        tokens = [n for n in ("bearer_token", "bearer_token_file", "bearer_token_env") if getattr(self, n) is not None]
        if len(tokens) > 1:
            raise ValueError(f"set only one of {tokens}: each of them names the bearer token")
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file needs client_cert_file")
        for name, value in self.headers.items():
            if not isinstance(name, str) or not isinstance(value, str) or "\n" in name + value or "\r" in name + value:
                raise ValueError(f"headers: {name!r} must map one line of text to one line of text")
        if self.proxy is not None and urlsplit(self.proxy).scheme not in ("http", "https"):
            raise ValueError("proxy must be an http:// or https:// URL")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Root URLs of all services."""
        return (self.endpoint,) if isinstance(self.endpoint, str) else tuple(self.endpoint)

    def resolve_token(self) -> str | None:
        """Fetch the bearer token from wherever the settings say.

        Returns:
            The token, or None when no token is configured.

        Raises:
            ValueError: The file or variable is missing, empty, or holds more than one line; never shows the token.
        """
        token, source = self.bearer_token, "bearer_token"
        if self.bearer_token_file is not None:
            source = f"bearer_token_file {self.bearer_token_file!r}"
            try:
                token = Path(self.bearer_token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as exc:
                raise ValueError(f"{source} cannot be read: {type(exc).__name__}") from exc
        elif self.bearer_token_env is not None:
            source = f"bearer_token_env {self.bearer_token_env!r}"
            token = os.environ.get(self.bearer_token_env, "").strip()
        if token is None:
            return None
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"{source} must hold one non-empty word of printable ASCII")
        return token

    def resolve_headers(self) -> dict[str, str]:
        """Headers of every request: ours, the configured ones, and the token (which wins over a configured header)."""
        resolved = {"Accept": "application/json", "User-Agent": "verl-agent-env", **self.headers}
        token = self.resolve_token()
        if token is not None:
            resolved = {name: value for name, value in resolved.items() if name.lower() != "authorization"}
            resolved["Authorization"] = f"Bearer {token}"
        return resolved

    def resolve_proxy(self, endpoint: str) -> str | None:
        """The proxy on the way to `endpoint`: the configured one, else the process's own when `trust_env` allows it."""
        if self.proxy is not None or not self.trust_env:
            return self.proxy
        parts = urlsplit(endpoint)
        if parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
            return None
        proxies = urllib.request.getproxies()
        return proxies.get(parts.scheme) or proxies.get("all")

    def secrets(self) -> tuple[str, ...]:
        """Texts that no log line or error message may show."""
        proxies = [self.resolve_proxy(endpoint) for endpoint in self.endpoints]
        passwords = [urlsplit(proxy).password for proxy in proxies if proxy is not None]
        candidates = [self.resolve_token(), *passwords, *self.headers.values()]
        return tuple(text for text in candidates if text is not None and len(text) >= 4)

    def ssl_context(self) -> ssl.SSLContext:
        """TLS settings as a context.

        Raises:
            ValueError: A certificate or key file cannot be loaded.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.client_cert_file is not None:
                context.load_cert_chain(self.client_cert_file, self.client_key_file)
        except (OSError, ssl.SSLError) as exc:
            raise ValueError(
                f"TLS files (ca_file {self.ca_file!r}, client_cert_file {self.client_cert_file!r}, "
                f"client_key_file {self.client_key_file!r}) cannot be loaded: {exc}"
            ) from exc
        if not self.verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _checked_endpoints(endpoint: str | Sequence[str]) -> str | tuple[str, ...]:
    """Return the root URL, or all of several, without trailing slashes, or raise ValueError."""
    if isinstance(endpoint, (list, tuple)):
        endpoints = tuple(_checked_endpoint(one) for one in endpoint)
        if not endpoints or len(set(endpoints)) < len(endpoints):
            raise ValueError(f"endpoint must name one service or several different ones, not {list(endpoints)}")
        return endpoints
    return _checked_endpoint(endpoint)


def _checked_endpoint(endpoint: object) -> str:
    """Return the root URL without its trailing slash, or raise ValueError."""
    if not isinstance(endpoint, str):
        raise ValueError(f"endpoint must be a URL, not {type(endpoint).__name__}")
    try:
        parts = urlsplit(endpoint)
        has_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port)
    except ValueError as exc:
        raise ValueError(f"endpoint {endpoint!r} is no URL: {exc}") from exc
    if parts.username is not None or parts.password is not None:
        raise ValueError("endpoint must not hold credentials; use bearer_token, bearer_token_file or headers")
    if not has_address or parts.query or parts.fragment:
        raise ValueError(f"endpoint must look like http://host:port or https://host/path, not {endpoint!r}")
    return endpoint.rstrip("/")


def _check_seconds(name: str, value: float, *, allow_zero: bool) -> None:
    """Refuse what is no finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number of seconds, not {value!r}")
    if value < 0 or (value == 0 and not allow_zero):
        raise ValueError(f"{name} must be {'at least' if allow_zero else 'above'} 0 seconds, not {value!r}")
