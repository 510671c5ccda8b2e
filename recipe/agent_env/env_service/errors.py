# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The one exception that becomes an answer to the client.

Owns: status code, error word and short text of a refusal. Refuses to know: what caused it.
"""

from typing import Any

_MAX_TEXT = 300


class ServiceError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status code.
        kind: One word of the documented set, e.g. `unknown_environment`.
        text: What was expected and what came, for the caller. Cut to one short line; never a stack trace.
        retry_after_s: Whole seconds after which a retry makes sense, sent as `Retry-After`.
        **details: Further JSON fields of the answer.
    """

    def __init__(self, status: int, kind: str, text: str, retry_after_s: int | None = None, **details: Any) -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind
        self.text = one_line(text)
        self.retry_after_s = retry_after_s
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, for the way from a worker process to the front."""
        return _rebuild, (self.status, self.kind, self.text, self.retry_after_s, self.details)

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": self.kind, "message": self.text, **self.details}


def _rebuild(status: int, kind: str, text: str, retry_after_s: int | None, details: dict[str, Any]) -> ServiceError:
    return ServiceError(status, kind, text, retry_after_s, **details)


def one_line(text: str, limit: int = _MAX_TEXT) -> str:
    """The first non-empty line of `text`, cut to `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def describe_exception(error: BaseException) -> str:
    """Type and first line of an exception, without its trace."""
    text = one_line(str(error), 200)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
