"""What a failed request is answered with, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from viviane.core.errors import ConfigError, DataError, KeyRangeError, SchemaError, VivianeError
from viviane.core.logging import get_logger
from viviane.serving.errors import ModelNotFoundError, RowProblem, RowsError, SessionClosedError

_log = get_logger("serving.server")
_MOST_PROBLEMS: Final = 100
_MOST_TEXT: Final = 4000  # a message may list all columns of a row, and a row may have thousands
_MOST_PROBLEM_TEXT: Final = 300


class Status(Enum):
    """HTTP status, and the name of gRPC's code."""

    INVALID = (400, "INVALID_ARGUMENT")
    FORBIDDEN = (403, "PERMISSION_DENIED")
    NOT_FOUND = (404, "NOT_FOUND")
    TIMEOUT = (408, "DEADLINE_EXCEEDED")
    TOO_LARGE = (413, "RESOURCE_EXHAUSTED")
    MEDIA_TYPE = (415, "INVALID_ARGUMENT")
    OVERLOADED = (429, "UNAVAILABLE")
    INTERNAL = (500, "INTERNAL")
    UNAVAILABLE = (503, "UNAVAILABLE")

    @property
    def http(self) -> int:
        """The HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> str:
        """The name of gRPC's code."""
        return self.value[1]


class RequestError(VivianeError):
    """A request that the server refuses, with the status of its answer."""

    def __init__(self, status: Status, what: str, **details: Any) -> None:
        super().__init__(what, **details)
        self.status = status


def invalid(what: str, **details: Any) -> RequestError:
    """Return the error of a malformed request."""
    return RequestError(Status.INVALID, what, **details)


def status_of(error: BaseException) -> Status:
    """Return how an error is answered; one that is not the request's fault is INTERNAL.

    Example:
        >>> status_of(SchemaError("a column is missing")).http
        400
    """
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ModelNotFoundError):
        return Status.NOT_FOUND
    if isinstance(error, SessionClosedError):
        return Status.UNAVAILABLE
    if isinstance(error, DataError | SchemaError | ConfigError | KeyRangeError):
        return Status.INVALID
    return Status.INTERNAL


def describe(error: BaseException) -> dict[str, Any]:
    """Return the body of an error's answer; the message of an internal error stays in the log."""
    if status_of(error) is Status.INTERNAL and not isinstance(error, RequestError):
        _log.error("a request failed", exc_info=error)
        return {"error": f"internal error ({type(error).__name__}); see the server's log"}
    body: dict[str, Any] = {"error": _short(str(error), _MOST_TEXT)}
    if isinstance(error, RowsError):
        body["problems"] = listed(error.problems[:_MOST_PROBLEMS])
        body["num_problems"] = len(error.problems)
    return body


def listed(problems: Sequence[RowProblem]) -> list[dict[str, Any]]:
    """Return problems as plain data, with texts of a limited length."""
    return [{**one.to_dict(), "problem": _short(one.problem, _MOST_PROBLEM_TEXT)} for one in problems]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
