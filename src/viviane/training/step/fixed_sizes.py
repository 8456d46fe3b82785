"""Static batch shapes: when all ranks train on batches of the same shapes.

If shapes are static, ranks do not exchange sizes and no GPU waits for the host. Each rank decides from values that all
ranks share (settings, schema, number of rows of the data set), so this decision needs no communication either.
"""

from __future__ import annotations

from collections.abc import Mapping

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding import TableConfig
from viviane.schema import Schema
from viviane.training.feed import DeviceFeed
from viviane.training.passes import PassFeed
from viviane.training.step.state import StepState

_log = get_logger("training.sizes")


class FixedSizes:
    """Makes the shapes of a fit's full batches static, and dynamic again before a shorter batch.

    Args:
        step: the training step.
        schema: schema of the data, with the hotness of bags.
        feed: feed of the batches.

    Raises:
        ConfigError: `solver.fixed_sizes` or `solver.cuda_graph` is True, and batch shapes are not static.

    Attributes:
        reason: why shapes are dynamic; None if they are static, or one process trains.
    """

    def __init__(self, step: StepState, schema: Schema, feed: DeviceFeed | PassFeed) -> None:
        self.step, self.feed = step, feed
        self.rows = feed.share_of_whole
        self.hotness = hotness_of(schema)
        self.reason = None if step.sync is None else self._reason(schema)
        if step.sync is None:
            return
        step.sync.stop_agreed = False  # left by an earlier `fit`
        self.end()
        step.dynamic_shape_reason = self.reason
        if self.reason is None:
            _log.info("batch shapes are static: %d rows per rank", self.rows)
            return
        _log.info("batch shapes are dynamic, ranks exchange them in every step: %s", self.reason)
        for setting in ("fixed_sizes", "cuda_graph"):
            if getattr(step.solver, setting) is True:
                raise ConfigError(
                    "batch shapes are not static", where=f"solver.{setting}", value=self.reason,
                    fix=f"set {setting}='auto', which gives the same results with dynamic shapes, or remove the cause",
                )  # fmt: skip

    def _reason(self, schema: Schema) -> str | None:
        solver = self.step.solver
        if solver.fixed_sizes is False:
            return "solver.fixed_sizes is False"
        if solver.fixed_sizes == "auto" and self.step.device.type == "cpu":
            return "on CPUs only solver.fixed_sizes=True makes them static"
        if not self.feed.has_length:
            return "the length of a stream is unknown"
        if self.rows is None:
            return f"batch_size {solver.batch_size} is not divisible by {self.step.group.size} processes"
        return find_dynamic_shape(self.step, schema, self.hotness)

    def follow(self) -> None:
        """Switch to static or dynamic shapes for the next step; all ranks call it before the step."""
        sync = self.step.sync
        if sync is None:
            return
        wanted = self.reason is None and self.feed.is_whole
        if wanted != sync.is_static:
            self.step.fix_sizes(self.rows if wanted else None, self.hotness)

    def end(self) -> None:
        """Return to dynamic shapes after the last step of a fit."""
        if self.step.sync is not None and self.step.sync.is_static:
            self.step.fix_sizes(None)


def hotness_of(schema: Schema) -> dict[str, int]:
    """Return the hotness of every bag column that has one.

    Example:
        >>> tags = {"name": "tags", "num_ids": 9, "kind": "multi_hot", "hotness": 3}
        >>> hotness_of(Schema(categorical=[tags, {"name": "item", "num_ids": 9}]))
        {'tags': 3}
    """
    return {column.name: column.hotness for column in schema.bags if column.hotness is not None}


def find_dynamic_shape(step: StepState, schema: Schema, hotness: Mapping[str, int]) -> str | None:
    """Return why the shapes of lookups depend on more than the batch size; None if they do not.

    Args:
        step: the training step.
        schema: of the batches.
        hotness: ids per row, by bag column.
    """
    for collection in step.collections.values():
        if getattr(collection, "deduplicate_ids", False):
            return "deduplicate_ids is on: the number of distinct ids varies"
        if any(part.has_tiers for part in collection.parts()):
            return "tables are in tiers: the host fetches their rows"
        for name, feature in collection.features.items():
            if not isinstance(collection.tables[feature.table], TableConfig):
                return f"table {feature.table!r} is dynamic: the host assigns rows to its keys"
            column = schema.categorical_column(name)
            if column.weights is not None:
                return f"the ids of {name!r} have weights"
            if column.kind != "one_hot" and name not in hotness:
                return f"bags of {name!r} have no fixed hotness (set the column's `hotness`)"
    return None


def set_static_sizes(
    step: StepState, schema: Schema, batch_size: int | None, hotness: Mapping[str, int] | None
) -> None:
    """Set static shapes in a custom training loop; see `Trainer.fix_sizes`.

    Raises:
        ConfigError: the batch size is not divisible by the number of processes, or a bag column has no hotness.
    """
    if step.sync is None:
        return
    found = hotness_of(schema) if hotness is None else dict(hotness)
    if batch_size is not None:
        reason = find_dynamic_shape(step, schema, found)
        if batch_size % step.group.size:
            reason = f"batch_size {batch_size} is not divisible by {step.group.size} processes"
        if reason is not None:
            raise ConfigError(
                "batch shapes are not static", where="Trainer.fix_sizes", value=reason,
                fix="remove the call: ranks then exchange the shapes of every batch",
            )  # fmt: skip
    step.fix_sizes(None if batch_size is None else batch_size // step.group.size, found)
