"""Lookups that are resolved before the step of their batch, so that rows of tables in tiers are fetched meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from viviane.embedding.batch_keys import AnyKeys
from viviane.embedding.keys import Violation
from viviane.embedding.lookup import TablesOf
from viviane.embedding.static_lookup import Resolved


@dataclass(frozen=True)
class ResolvedAhead:
    """A batch whose lookup comes later: what was resolved, for which tables, and the records of its keys.

    Args:
        batch: the object that will be looked up.
        found: its lookups.
        violations: records of keys out of range, for the check of the batch's own step.
        of: "fixed": dynamic tables are resolved when the batch is looked up.
    """

    batch: AnyKeys
    found: Resolved
    violations: list[Violation]
    of: TablesOf = "all"


def both(fixed: Resolved, dynamic: Resolved) -> Resolved:
    """Return a batch's lookups in tables of fixed size and in dynamic ones together."""
    size, parts, masks = fixed
    return size, parts + dynamic[1], masks | dynamic[2]
