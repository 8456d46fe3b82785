"""Prefetch of table rows in tiers over several processes: keys are exchanged before the step of their batch."""

from __future__ import annotations

from dataclasses import dataclass

from viviane.batch import Batch
from viviane.embedding.keys import Violation
from viviane.parallel.exchanges import Exchanges
from viviane.parallel.jagged_exchange import JaggedInput
from viviane.parallel.sharded_tables import ShardedTables


@dataclass(frozen=True)
class _Exchanged:
    """What stands for a batch, its input_dist, and the records of its keys; no input_dist: a rank has no such batch."""

    batch: object
    inputs: JaggedInput | None
    violations: list[Violation]


class BatchesAhead:
    """The batches of a sharded collection that wait for their step.

    `exchange` is collective: all ranks pass the same batches in the same order, whether or not their own shards are in
    tiers. `fetch` concerns this rank alone: its cache may have no room yet while others have.

    Args:
        sharded: the collection.
        exchanges: of the collection.
    """

    def __init__(self, sharded: ShardedTables, exchanges: Exchanges) -> None:
        self._sharded, self._exchanges = sharded, exchanges
        self._exchanged: dict[int, _Exchanged] = {}

    def is_needed(self) -> bool:
        """Return whether a rank can fetch rows ahead. Collective."""
        return any(one[0] for one in self._sharded.group.gather_numbers([int(self._fetches)]))

    @property
    def _fetches(self) -> bool:
        return self._sharded.own is not None and self._sharded.own.looks_ahead

    def exchange(self, batch: object) -> None:
        """Run the input_dist of a batch, once. Collective.

        Where a rank cannot, no rank keeps the batch, and its lookup raises the error in the rank that has it.

        Args:
            batch: the local batch; anything else stands for one that could not be read.
        """
        if id(batch) in self._exchanged:
            return
        own = batch if isinstance(batch, Batch) else None
        if own is not None:
            own.wait()
        with self._sharded.violations.apart() as violations:
            inputs = self._exchanges.input_dist_ahead(own)
        self._exchanged[id(batch)] = _Exchanged(batch, inputs, violations)

    def fetch(self, batch: Batch) -> bool:
        """Begin to fetch the rows of this rank's shards for a batch that was exchanged.

        Returns:
            False where that is not possible: its lookup has the reason, or other batches fill the cache.
        """
        inputs, own = self._exchanged[id(batch)].inputs, self._sharded.own
        if inputs is None:
            return False
        if own is None or not self._fetches:
            return True
        on_host = own.plans_on_host and own.device.type != "cpu"
        return own.resolve_ahead(inputs.inputs, inputs.inputs.to("cpu") if on_host else None)

    def take(self, batch: object) -> JaggedInput | None:
        """Return the input_dist of a batch whose lookup has come; None if it was not exchanged."""
        kept = self._exchanged.pop(id(batch), None)
        if kept is None or kept.inputs is None:
            return None
        self._sharded.violations.extend(kept.violations)
        return kept.inputs

    def forget(self, batch: Batch) -> None:
        """Release a batch whose step has finished or was never run."""
        kept = self._exchanged.pop(id(batch), None)
        if kept is not None and kept.inputs is not None and self._sharded.own is not None:
            self._sharded.own.forget_ahead(kept.inputs.inputs)

    def end(self) -> None:
        """Release all batches."""
        self._exchanged.clear()
        if self._sharded.own is not None:
            self._sharded.own.end_ahead()
