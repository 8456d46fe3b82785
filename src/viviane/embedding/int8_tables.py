"""Tables of 8 bits a number, for lookups alone: a quarter of float32's memory, and no training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from viviane.core.errors import ConfigError, VivianeError
from viviane.embedding.base import TableCollection
from viviane.embedding.module_parts import collections_of
from viviane.embedding.table_storage import StorageLookup
from viviane.ops.int8_rows import gather_rows, pool_rows, quantize


def quantize_tables(collections: Iterable[TableCollection]) -> None:
    """Turn the rows of all tables into 8-bit ones, with a scale and an offset of each row.

    What was looked up before must not wait for gradients. Afterwards the tables can be looked up, and nothing else.

    Raises:
        ConfigError: a table is dynamic or in tiers, or a row has a number that is not finite.

    Example:
        >>> import torch
        >>> from viviane.config import SGD
        >>> from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
        >>> table = TableConfig(name="item", num_rows=4, dim=2, init={"type": "constant", "value": 0.5})
        >>> emb = EmbeddingCollection([table], [FeatureConfig(name="seen", table="item")], SGD())
        >>> quantize_tables([emb])
        >>> emb({"seen": torch.tensor([3, 0])}).flat.tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    storages = {id(one): one for collection in collections for one in collection.all_storages()}
    for storage in storages.values():
        where = "table " + ", ".join(map(repr, storage.tables))
        if storage.is_dynamic or storage.in_tiers:
            raise ConfigError(
                "only tables of fixed size in memory have an 8-bit form", where=where,
                value="dynamic" if storage.is_dynamic else "in tiers", allowed="tables with num_rows",
                fix="leave table_dtype out",
            )  # fmt: skip
    for storage in storages.values():
        try:
            storage.weight = quantize(storage.weight)
        except VivianeError as error:
            where = "table " + ", ".join(map(repr, storage.tables))
            raise ConfigError(f"a table has no 8-bit form: {error.what}", where=f"{where}, {error.where}",
                              fix="train it without numbers that overflow") from error  # fmt: skip


@contextmanager
def int8_tables(module: nn.Module) -> Iterator[None]:
    """Let a module have 8-bit tables inside the block, and its own rows again after it.

    Raises:
        ConfigError: see `quantize_tables`.
    """
    collections = list(collections_of(module).values())
    before = [(storage, storage.weight) for one in collections for storage in one.all_storages()]
    quantize_tables(collections)
    try:
        yield
    finally:
        for storage, weight in before:
            storage.weight = weight


def gather_int8(part: StorageLookup, weight: Tensor, out: Tensor) -> None:
    """Look a part up in 8-bit rows."""
    dim = part.storage.dim
    if part.offsets is None:
        gather_rows(weight, dim, part.rows, out, part.columns, part.weights)
    else:
        pool_rows(weight, dim, part.rows, part.offsets, out, part.columns, part.weights)
