"""What a request can be refused for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, SupportsInt

from viviane.core.errors import DataError, VivianeError

_MOST_TEXT: Final = 200


@dataclass(frozen=True)
class RowProblem:
    """Why one row of a request has no prediction.

    Args:
        row: its number in the request, from 0.
        column: the column, or "" where the problem is of no single column.
        value: the offending value as text.
        problem: what is wrong with it.
    """

    row: int
    column: str
    value: str
    problem: str

    @classmethod
    def of(cls, row: SupportsInt, column: str, value: Any, problem: str) -> RowProblem:
        """Show the value as text, at most 200 characters of it.

        Example:
            >>> RowProblem.of(3, "age", [1, 2], "not a number").value
            '[1, 2]'
        """
        try:
            shown = value if isinstance(value, str) else repr(value)
        except Exception:  # an object of the request's that cannot even be shown
            shown = type(value).__name__
        shown = shown.encode("utf-8", "backslashreplace").decode()
        return cls(int(row), column, shown if len(shown) <= _MOST_TEXT else shown[:_MOST_TEXT] + "...", problem)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a reply."""
        return asdict(self)


class RowsError(DataError):
    """Rows of a request cannot be used. `problems` has the first problem of each such row, in order of rows."""

    problems: tuple[RowProblem, ...]

    @classmethod
    def of(cls, problems: Sequence[RowProblem]) -> RowsError:
        """Describe the first problem and count the others."""
        first, others = problems[0], len(problems) - 1
        more = f" ({others} more row(s) cannot be used)" if others else ""
        place = f"row {first.row}" + (f", column {first.column!r}" if first.column else "")
        error = cls(f"a malformed row: {first.problem}{more}", where=place, value=first.value)
        error.problems = tuple(problems)
        return error


class ModelNotFoundError(VivianeError, LookupError):
    """No model of this name or version is loaded."""


class SessionClosedError(VivianeError, RuntimeError):
    """The session was closed; it takes no more requests."""
