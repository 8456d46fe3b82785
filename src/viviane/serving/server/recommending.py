"""Recommendations over HTTP: candidates and their ranking behind one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from viviane.serving.server.status import invalid

MOST_ITEMS: Final = 1000
"""Recommendations of one row."""
_DEFAULT_ITEMS: Final = 10


class RowRecommender(Protocol):
    """What a server asks for recommendations; any number of threads may call it."""

    def columns(self) -> dict[str, Any]:
        """Describe the columns of rows, as plain data."""
        ...

    def recommend(self, rows: list[Any], k: int, *, keep_seen: bool) -> list[dict[str, Any]]:
        """Return `items`, `scores`, and `values` where they are known, of each row, best first."""
        ...


@dataclass(frozen=True)
class RecommendRequest:
    """A request for recommendations.

    Args:
        rows: dicts from column to value.
        k: items of each row.
        keep_seen: items of the history may be recommended again.
    """

    rows: list[Any]
    k: int
    keep_seen: bool

    @classmethod
    def of(cls, content: Any) -> RecommendRequest:
        """Check what the JSON of a request holds.

        Raises:
            RequestError: it is not of this form; says what is wrong.

        Example:
            >>> RecommendRequest.of({"instances": [{"hist": [3, 4]}], "k": 5}).k
            5
        """
        example = '{"instances": [{"column": value, ...}, ...], "k": 10}'
        if not isinstance(content, dict) or not isinstance(content.get("instances"), list):
            raise invalid("a request has a list of rows", where="instances", fix=f"send {example}")
        for key in content:
            if key not in ("instances", "k", "keep_seen"):
                allowed = "instances, k, keep_seen"
                raise invalid("unknown key", where="the request", value=key[:200], allowed=allowed)
        k, keep_seen = content.get("k", _DEFAULT_ITEMS), content.get("keep_seen", False)
        if type(k) is not int or not 1 <= k <= MOST_ITEMS:
            raise invalid("a wrong number of items", where="k", value=repr(k)[:100], allowed=f"1 to {MOST_ITEMS}")
        if not isinstance(keep_seen, bool):
            raise invalid("keep_seen is true or false", where="keep_seen", value=repr(keep_seen)[:100])
        for number, row in enumerate(content["instances"]):
            if not isinstance(row, dict):
                what = "a row is an object from column to value"
                raise invalid(what, where=f"row {number}", value=repr(row)[:100])
        return cls(content["instances"], k, keep_seen)
