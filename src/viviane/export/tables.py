"""The embedding collection of an exported model: read-only, without Python state, traced with any batch size.

Shapes: B rows of the batch, F one-hot features, N entries of bags, L slots of a "concat", D the width of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError
from viviane.embedding import (
    DynamicStorage,
    DynamicTableConfig,
    EmbeddingBag,
    EmbeddingOutput,
    FeatureConfig,
    Storage,
    TableConfig,
)
from viviane.embedding.base import TableCollection
from viviane.embedding.batch_keys import Keys, as_bag
from viviane.embedding.keys import column_rule
from viviane.embedding.lookup import place_features
from viviane.export import operators, plain
from viviane.export.frozen_keys import FrozenKeys, freeze_keys
from viviane.ops.int8_rows import is_int8, parts_of
from viviane.ops.key_rows import ColumnRule

Outside: TypeAlias = Mapping[str, Tensor]
FrozenTables: TypeAlias = dict[int, tuple[FrozenKeys, Tensor]]
"""Copies of dynamic tables, so that several programs of one model share them."""
_outside: ContextVar[Outside] = ContextVar("viviane_export_outside")


@contextmanager
def given(tensors: Outside) -> Iterator[None]:
    """Make frozen parts read inputs of the program instead of their own tensors, by full name."""
    token = _outside.set(tensors)
    try:
        yield
    finally:
        _outside.reset(token)


class _Part(nn.Module):
    """Tables of one lookup: rows, then two rows of zeros.

    Args:
        name: full name, the prefix of its tensors among inputs.
        kernels: look up with the operators of `viviane.export.operators`.
    """

    null_row: int
    reads_keys = False
    """Whether vectors depend on keys that have no row."""
    is_int8 = False
    """Whether rows are of 8 bits a number."""

    def __init__(self, name: str, kernels: bool) -> None:
        super().__init__()
        self.full_name = name
        self.kernels = kernels
        self.is_outside = False

    def input_name(self, name: str) -> str:
        """Return the name of the input from which a tensor is read if tables are outside."""
        return f"table/{self.full_name}.{name}"

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: its own, or the input of the program."""
        if self.is_outside:
            return _outside.get()[self.input_name(name)]
        found: Tensor = getattr(self, name)
        return found

    def rows(self, keys: Tensor, tables: Sequence[str]) -> Tensor:
        """Return the rows of keys (N, F), one column per table name."""
        raise NotImplementedError

    def vectors(self, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors of rows and keys (N, F): (N, F, D)."""
        if self.kernels and dtype == torch.float32:
            found: Tensor = operators.serving_gather(self.tensor("weight"), rows)
            return found
        return plain.gather(self.tensor("weight"), rows, dtype)

    def pooled(self, rows: Tensor, keys: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sums of rows (N,) by bag: (B, D)."""
        if self.kernels and dtype == torch.float32 and not self.reads_keys and not self.is_int8:
            found: Tensor = operators.serving_pool(self.tensor("weight"), rows, offsets, weights)
            return found
        vectors = self.vectors(rows.unsqueeze(1), keys.unsqueeze(1), dtype).squeeze(1)
        if weights is not None:
            vectors = vectors * weights.unsqueeze(1)
        return plain.pool(vectors, plain.bag_of_entries(offsets, rows.shape[0]), offsets.shape[0] - 1)


class FixedPart(_Part):
    """Tables with a fixed number of rows, of one width and type, that share the model's memory.

    Args:
        storage: storage of the model.
        name, kernels: see `_Part`.
    """

    weight: Tensor
    tails: Tensor

    def __init__(self, storage: Storage, name: str, kernels: bool) -> None:
        super().__init__(name, kernels)
        self.null_row = storage.null_row
        self.bases = dict(storage.bases)
        self.rules = {
            table: column_rule(config, self.bases[table], self.null_row) for table, config in storage.tables.items()
        }
        self.is_int8 = is_int8(storage.weight)
        if self.is_int8:  # standard operators: the numbers of a row apart from its scale and offset
            numbers, tails = parts_of(storage.weight, storage.dim)
            self.register_buffer("weight", numbers)
            self.register_buffer("tails", tails)
        else:
            self.register_buffer("weight", storage.weight.detach())

    def vectors(self, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors of rows and keys (N, F): (N, F, D)."""
        if not self.is_int8:
            return super().vectors(rows, keys, dtype)
        numbers = plain.gather(self.tensor("weight"), rows, dtype)
        tails = plain.gather(self.tensor("tails"), rows, dtype)
        return numbers * tails[..., :1] + tails[..., 1:]

    def rows(self, keys: Tensor, tables: Sequence[str]) -> Tensor:
        """Return the rows of keys by the policies of their tables."""
        rules: list[ColumnRule] = [self.rules[table] for table in tables]
        if self.kernels:
            found: Tensor = operators.serving_rows(keys, operators.flat_rules(rules), self.null_row)
            return found
        return plain.key_rows(keys, rules, self.null_row)


class DynamicPart(_Part):
    """A dynamic table with its current keys.

    Args:
        storage: storage of the model.
        name, kernels: see `_Part`.
        frozen: tables that are already frozen; this table's copy is added.
    """

    weight: Tensor
    keys: Tensor
    starts: Tensor

    def __init__(self, storage: DynamicStorage, name: str, kernels: bool, frozen: FrozenTables) -> None:
        super().__init__(name, kernels)
        table = storage.table
        if id(storage) not in frozen:
            frozen[id(storage)] = _freeze(storage)
        keys, weight = frozen[id(storage)]
        self.config = table.table
        self.null_row, self.seed, self.width = len(keys.keys), keys.seed, keys.width
        self.initial_seed = table.initial_seed
        self.reads_keys = self.config.absent == "initial"
        self.register_buffer("weight", weight)
        self.register_buffer("keys", keys.keys.to(weight.device))
        self.register_buffer("starts", keys.starts.to(weight.device))

    def rows(self, keys: Tensor, tables: Sequence[str]) -> Tensor:
        """Return the rows of keys; absent ones read the second row of zeros, which counts in a mean."""
        keys = keys.to(torch.int64)
        absent = self.null_row + 1
        if not self.null_row:
            rows = torch.full_like(keys, absent)
        elif self.kernels:
            frozen, starts = self.tensor("keys"), self.tensor("starts")
            rows = operators.serving_find(keys, frozen, starts, self.seed, self.width, absent)
        else:
            places, there = plain.find_keys(keys, self.tensor("keys"), self.tensor("starts"), self.seed, self.width)
            rows = torch.where(there, places, absent)
        padding = self.config.padding_id
        return rows if padding is None else torch.where(torch.eq(keys, padding), self.null_row, rows)

    def vectors(self, rows: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return vectors; for absent keys initial values if the table is configured so."""
        found = super().vectors(rows, keys, dtype)
        if not self.reads_keys:
            return found
        drawn = plain.initial_values(
            keys.to(torch.int64), self.config.dim, *self.config.law, self.initial_seed, self.config.torch_dtype
        )
        return torch.where(torch.eq(rows, self.null_row + 1).unsqueeze(-1), drawn.to(dtype), found)


def _freeze(storage: DynamicStorage) -> tuple[FrozenKeys, Tensor]:
    """Copy a dynamic table's keys and rows, in order of the keys, followed by two rows of zeros."""
    table = storage.table
    own = table.index.rows_in_use()
    keys = freeze_keys(table.index.keys[own].cpu())
    order = own[keys.order.to(own.device)]
    weight = table.weight.new_zeros(len(order) + 2, table.table.dim)
    torch.index_select(table.weight, 0, order, out=weight[: len(order)])
    return keys, weight


class FrozenCollection(nn.Module):
    """Replaces an `EmbeddingCollection` in an exported model, with the same output.

    Args:
        collection: a collection of the model.
        name: its name in the model.
        kernels: look up with the operators of `viviane.export.operators`; False: with torch's operators.
        frozen: copies of dynamic tables that already exist.

    Raises:
        ConfigError: the collection's tables are sharded over several processes.
    """

    margins: Any = None  # a graph may request margins next to the output; there are none
    gradient_watch: Any = None

    def __init__(self, collection: TableCollection, name: str, kernels: bool, frozen: FrozenTables) -> None:
        super().__init__()
        parts = collection.parts()
        if len(parts) != 1 or parts[0] is not collection:
            raise ConfigError(
                "tables that are sharded over processes cannot be exported",
                where=f"embedding {name!r}",
                fix="save the model, and export the saved folder in one process",
            )
        self.name = name
        self.tables: dict[str, TableConfig | DynamicTableConfig] = dict(collection.tables)
        self.features: dict[str, FeatureConfig] = dict(collection.features)
        self.places = place_features(list(self.features.values()), self.tables)
        self.output_dtype = parts[0].output_dtype
        self.device, self.width = collection.device, collection.width
        for storage in collection.all_storages():
            if storage.in_tiers:
                raise ConfigError(
                    "an exported model needs its tables completely in memory", where=f"embedding {name!r}",
                    fix="save the model, and export the saved folder",
                )  # fmt: skip
        fixed = [FixedPart(one, f"{name}.{i}", kernels) for i, one in enumerate(parts[0].fixed_storages())]
        dynamic = [
            DynamicPart(one, f"{name}.{i}", kernels, frozen)
            for i, one in enumerate(parts[0].dynamic_storages(), len(fixed))
        ]
        self.parts = nn.ModuleList([*fixed, *dynamic])
        self._part_of = {t: i for i, storage in enumerate(collection.all_storages()) for t in storage.tables}

    def move_outside(self) -> dict[str, Tensor]:
        """Read the tables from the program's inputs from now on; return them by input name."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            assert isinstance(part, _Part)
            part.is_outside = True
            for name, tensor in list(part.named_buffers()):
                found[part.input_name(name)] = tensor
                setattr(part, name, None)
        return found

    def forward(self, batch: Any) -> EmbeddingOutput:
        """Look a batch up; see `EmbeddingCollection.forward`."""
        keys = _read(batch, self.features)
        index = {name: i for i, name in enumerate(keys.one_hot_names)}
        found: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        for i, part in enumerate(self.parts):
            assert isinstance(part, _Part)
            own = [f for f in self.features.values() if self._part_of[f.table] == i]
            singles = [f for f in own if f.name in index and f.combiner != "concat"]
            if singles:
                found |= self._one_hot(part, singles, [index[f.name] for f in singles], keys.one_hot)
            for feature in own:
                if feature.combiner == "concat":
                    found[feature.name], masks[feature.name] = self._concat(part, feature, keys.bags[feature.name])
                elif feature.name not in index:
                    found[feature.name] = self._sum(part, feature, keys.bags[feature.name])
        return EmbeddingOutput(self._side_by_side(found), self.places, masks)

    def all_rows(self, table: str) -> Tensor:
        """Return all rows of a table that is not dynamic; see `EmbeddingCollection.all_rows`."""
        part = self.parts[self._part_of[table]]
        assert isinstance(part, FixedPart)
        config = self.tables[table]
        assert isinstance(config, TableConfig)
        rows = torch.arange(config.num_rows, device=self.device).unsqueeze(1) + part.bases[table]
        return part.vectors(rows, rows, self.output_dtype).squeeze(1)

    def _side_by_side(self, found: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the features' vectors in order; adjacent vectors of one lookup are not copied."""
        whole = found.get("")
        if whole is not None:
            return whole
        return torch.cat([found[name] for name in self.features], 1)

    def _one_hot(
        self, part: _Part, features: Sequence[FeatureConfig], columns: Sequence[int], ids: Tensor
    ) -> dict[str, Tensor]:
        """Look up all one-hot features of a part together: the vectors of each, or all under ""."""
        if list(columns) != list(range(ids.shape[1])):
            ids = torch.stack([ids[:, i] for i in columns], 1)
        rows = part.rows(ids, [feature.table for feature in features])
        vectors = part.vectors(rows, ids, self.output_dtype)
        names = [feature.name for feature in features]
        if names == list(self.features):
            return {"": vectors.flatten(1)}
        return dict(zip(names, vectors.unbind(1), strict=True))

    def _sum(self, part: _Part, feature: FeatureConfig, bag: Bag) -> Tensor:
        keys = bag.values
        rows = part.rows(keys.unsqueeze(1), [feature.table]).squeeze(1)
        weights = bag.weights
        if feature.combiner == "mean":
            bags = plain.bag_of_entries(bag.offsets, keys.shape[0])
            counted = rows != part.null_row if self._skips(feature) else None
            wide = torch.float64 if self.output_dtype == torch.float64 else torch.float32
            weights = plain.mean_weights(bags, bag.offsets.shape[0] - 1, counted, weights, wide)
        return part.pooled(rows, keys, bag.offsets, weights, self.output_dtype)

    def _skips(self, feature: FeatureConfig) -> bool:
        """Return whether entries may be padding, which does not count in a mean."""
        table = self.tables[feature.table]
        return table.padding_id is not None or (isinstance(table, TableConfig) and table.out_of_range == "ignore")

    def _concat(self, part: _Part, feature: FeatureConfig, bag: Bag) -> tuple[Tensor, Tensor]:
        keys, length = bag.values.to(torch.int64), feature.num_places
        rows = part.rows(keys.unsqueeze(1), [feature.table]).squeeze(1).to(torch.int64)
        laid = plain.spread(rows, bag.offsets, length, part.null_row, part.null_row + plain.BEYOND)
        laid_keys = plain.spread(keys, bag.offsets, length, 0, None) if part.reads_keys else laid
        vectors = part.vectors(laid, laid_keys, self.output_dtype)
        if bag.weights is not None:
            weights = plain.spread(bag.weights, bag.offsets, length, 0.0, None)
            vectors = vectors * weights.unsqueeze(-1).to(vectors.dtype)
        return vectors.flatten(1), laid != part.null_row


def _read(batch: Any, features: Mapping[str, FeatureConfig]) -> Keys:
    """Extract the features' keys from the arguments of a collection; no value is read, so that it can be traced."""
    if isinstance(batch, Batch):
        bags = {name: batch.bag(name) for name, f in features.items() if name in batch.bags or f.combiner == "concat"}
        bags = {name: Bag(bag.values, bag.offsets.to(torch.int64), bag.weights) for name, bag in bags.items()}
        return Keys(batch.layout.one_hot, batch.one_hot, bags, batch.size, "")
    if not isinstance(batch, Mapping):
        raise ConfigError(
            "an exported collection reads a Batch, or keys by feature", value=type(batch).__name__,
            fix="pass the collection Bags instead of a KeyedJaggedTensor",
        )  # fmt: skip
    singles: dict[str, Tensor] = {}
    bags = {}
    for name, feature in features.items():
        keys = batch[name]
        if isinstance(keys, Bag):
            bags[name] = Bag(keys.values, keys.offsets.to(torch.int64), keys.weights)
        elif keys.dim() == 1 and feature.combiner != "concat":
            singles[name] = keys.to(torch.int64)
        else:
            bags[name] = as_bag(keys, name)
    first = next(iter(singles.values()), None)
    size = len(next(iter(bags.values())).offsets) - 1 if first is None else first.shape[0]
    ids = torch.stack(list(singles.values()), 1) if singles else torch.empty(0, 0, dtype=torch.int64)
    return Keys(tuple(singles), ids, bags, size, "")


class FrozenEmbeddingBag(EmbeddingBag):
    """An `EmbeddingBag` around a frozen collection; its state is that of a plain module."""

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


class GivenCollection(nn.Module):
    """Replaces an `EmbeddingCollection` in a dense-only export: vectors are inputs of the program.

    Args:
        collection: a collection of the model.
        name: its name in the model; the inputs are "vectors/<name>", and "mask/<name>" if it has "concat" features.
    """

    margins: Any = None
    gradient_watch: Any = None

    def __init__(self, collection: TableCollection, name: str) -> None:
        super().__init__()
        self.name = name
        self.tables = dict(collection.tables)
        self.features: dict[str, FeatureConfig] = dict(collection.features)
        self.places = place_features(list(self.features.values()), self.tables)
        self.width, self.device = collection.width, collection.device

    def all_rows(self, table: str) -> Tensor:
        """Return no numbers in the shape of a table, which is no input: predictions do not read it, or become wrong.

        The comparison with the model, without which no artifact is written, finds the latter.
        """
        config = self.tables[table]
        assert isinstance(config, TableConfig)
        return torch.full((1, 1), torch.nan, device=self.device).expand(config.num_rows, config.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its vectors, without the batch: (S, D) if all features have one width, else (W,)."""
        dims = {place.dim for place in self.places.values()}
        if len(dims) > 1:
            return (self.width,)
        [dim] = dims
        return (self.width // dim, dim)

    @property
    def num_masked(self) -> int:
        """Total number of slots of all "concat" features."""
        return sum(place.num_places for place in self.places.values() if place.is_concat)

    def forward(self, batch: Any) -> EmbeddingOutput:
        """Return the input vectors of the program."""
        tensors = _outside.get()
        masks, start = {}, 0
        for name, place in self.places.items():
            if place.is_concat:
                masks[name] = tensors[f"mask/{self.name}"][:, start : start + place.num_places]
                start += place.num_places
        return EmbeddingOutput(tensors[f"vectors/{self.name}"].flatten(1), self.places, masks)


def flat_vectors(out: EmbeddingOutput, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return the output of a lookup as inputs of a dense-only program: vectors (B, *shape), and masks or None."""
    masks = [out.mask(name) for name, place in out.places.items() if place.is_concat]
    return out.flat.view(-1, *shape), torch.cat(masks, 1) if masks else None
