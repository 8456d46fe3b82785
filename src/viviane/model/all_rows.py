"""A whole table as a tensor of a graph: what a softmax over all items reads."""

from __future__ import annotations

from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.embedding import EmbeddingCollection, TableCollection


class AllRows:
    """Returns the rows of a table, (num_rows, dim), for every batch.

    Args:
        name: of the node, for the message.
        collection: that has the table.
        table: its name.

    Raises:
        ConfigError: the table is spread over several processes.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, name: str, collection: TableCollection, table: str) -> None:
        if not isinstance(collection, EmbeddingCollection):
            fix = "train in one process, serve without `tables`, or sample candidates: softmax='sampled'"
            raise ConfigError("all_rows needs a table that one process holds", where=f"embedding {name!r}", fix=fix)
        self.collection = collection
        self.table = table

    def __call__(self, batch: Batch) -> Tensor:
        """Return the rows; backward gives the table their gradients."""
        return self.collection.all_rows(self.table)
