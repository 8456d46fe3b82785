"""Training batches that look alike in all processes: when they do, and who says so beforehand.

A process that knows how many rows and ids the others have need not ask them, and no GPU waits for an answer. Every
process decides by what all of them know alike (settings, schema, the data set's number of rows), so nobody asks either
whether sizes are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding import TableConfig
from viviane.schema import Schema
from viviane.training.feed import DeviceFeed

if TYPE_CHECKING:
    from viviane.training.step import TrainStep

_log = get_logger("training.sizes")


class FixedSizes:
    """Says a fit's sizes before its whole batches, and frees them before a shorter one.

    Args:
        step: whose batches they are.
        schema: of the data; tells which bags have one number of ids.
        feed: of the batches.

    Raises:
        ConfigError: `solver.fixed_sizes` or `solver.cuda_graph` is True, and sizes cannot be said.

    Attributes:
        reason: why sizes are exchanged in every step; None where they are said, or one process trains.
    """

    def __init__(self, step: TrainStep, schema: Schema, feed: DeviceFeed) -> None:
        self.step, self.feed = step, feed
        self.rows = feed.share_of_whole
        self.hotness = hotness_of(schema)
        self.reason = None if step.sync is None else self._reason(schema)
        if step.sync is None:
            return
        step.sync.stop_agreed = False  # of an earlier fit
        self.end()
        step.dynamic_shape_reason = self.reason
        if self.reason is None:
            _log.info("sizes of batches are known beforehand: %d rows in each process", self.rows)
            return
        _log.info("processes tell each other the sizes of every batch: %s", self.reason)
        for setting in ("fixed_sizes", "cuda_graph"):
            if getattr(step.solver, setting) is True:
                raise ConfigError(
                    "sizes of batches cannot be said beforehand", where=f"solver.{setting}", value=self.reason,
                    fix=f"set {setting}='auto', which trains the same without, or change what prevents it",
                )  # fmt: skip

    def _reason(self, schema: Schema) -> str | None:
        solver = self.step.solver
        if solver.fixed_sizes is False:
            return "solver.fixed_sizes is False"
        if solver.fixed_sizes == "auto" and self.step.device.type == "cpu":
            return "on CPUs solver.fixed_sizes=True does it"
        if not self.feed.has_length:
            return "batches of a stream have any number of rows"
        if self.rows is None:
            return f"a batch of {solver.batch_size} rows does not divide by {self.step.group.size} processes"
        return find_dynamic_shape(self.step, schema, self.hotness)

    def follow(self) -> None:
        """Say or free sizes for the batch that was handed out last; all processes call it before its step."""
        sync = self.step.sync
        if sync is None:
            return
        wanted = self.reason is None and self.feed.is_whole
        if wanted != sync.is_static:
            self.step.fix_sizes(self.rows if wanted else None, self.hotness)

    def end(self) -> None:
        """Let batches differ again: after the last step of a fit."""
        if self.step.sync is not None and self.step.sync.is_static:
            self.step.fix_sizes(None)


def hotness_of(schema: Schema) -> dict[str, int]:
    """Return the ids of every row, by column with bags of one length.

    Example:
        >>> tags = {"name": "tags", "num_ids": 9, "kind": "multi_hot", "hotness": 3}
        >>> hotness_of(Schema(categorical=[tags, {"name": "item", "num_ids": 9}]))
        {'tags': 3}
    """
    return {column.name: column.hotness for column in schema.bags if column.hotness is not None}


def find_dynamic_shape(step: TrainStep, schema: Schema, hotness: Mapping[str, int]) -> str | None:
    """Say why the shapes of what is looked up do not follow from a batch's size; None where they do.

    Args:
        step: whose tables are looked up.
        schema: of the batches.
        hotness: ids of every row, by column with bags.
    """
    for collection in step.collections.values():
        if getattr(collection, "deduplicate_ids", False):
            return "deduplicate_ids is on: how many ids differ is not known beforehand"
        for name, feature in collection.features.items():
            if not isinstance(collection.tables[feature.table], TableConfig):
                return f"table {feature.table!r} is dynamic: its keys get rows on the host"
            column = schema.categorical_column(name)
            if column.weights is not None:
                return f"the ids of {name!r} have weights"
            if column.kind != "one_hot" and name not in hotness:
                return f"bags of {name!r} have any number of ids (a column's `hotness` says how many)"
    return None


def set_static_sizes(
    step: TrainStep, schema: Schema, batch_size: int | None, hotness: Mapping[str, int] | None
) -> None:
    """Say sizes for a loop of one's own; see `Trainer.fix_sizes`.

    Raises:
        ConfigError: the batch does not divide by the processes, or ids of a column have no fixed number.
    """
    if step.sync is None:
        return
    found = hotness_of(schema) if hotness is None else dict(hotness)
    if batch_size is not None:
        reason = find_dynamic_shape(step, schema, found)
        if batch_size % step.group.size:
            reason = f"a batch of {batch_size} rows does not divide by {step.group.size} processes"
        if reason is not None:
            raise ConfigError(
                "sizes of batches cannot be said beforehand", where="Trainer.fix_sizes", value=reason,
                fix="leave the call out: processes then tell each other the sizes of every batch",
            )  # fmt: skip
    step.fix_sizes(None if batch_size is None else batch_size // step.group.size, found)
