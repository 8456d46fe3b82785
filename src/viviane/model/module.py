"""A graph as a torch module: a batch in, logits out.

A `Concat` that is the only reader of a lookup's vectors, as they are or flattened to rows, is concatenated in place:
the lookup leaves margins beside its vectors, and the other inputs are copied there. Without margins at run time
`torch.cat` is used; the result is the same.

An interaction that is the only reader of a lookup's vectors looks the rows up itself where no gradient is needed and a
GPU's kernel can: its vectors are then never written to memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer, Solver
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, suggest
from viviane.core.seeds import derive_seed
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableCollection
from viviane.embedding.buffers import Margins, WideRows
from viviane.model.all_rows import AllRows
from viviane.model.fusion import FusedMLP, Step, fuse
from viviane.model.graph import GraphPlan
from viviane.model.ids import Ids
from viviane.model.nodes import DenseLayer, SparseEmbedding
from viviane.model.table_memory import table_memory
from viviane.nn.interaction import Interaction
from viviane.nn.linear import has_hooks
from viviane.nn.registry import Layer
from viviane.nn.rows import BATCH, rows_of
from viviane.nn.shape import Concat, ConcatParameters, Reshape, ReshapeParameters
from viviane.ops.capture import branch, is_capturing, join_ahead
from viviane.ops.packing_ahead import pack_ahead
from viviane.parallel import Group, ShardedCollection, Traffic, check_plan_names, choose_plan, make_tables
from viviane.parallel.automatic import GivenPlan, is_whole, own_kinds
from viviane.parallel.distributed_input import DistributedInput
from viviane.parallel.plan import AnyTable


class ConcatInPlace(nn.Module):
    """A `Concat` whose other inputs go beside a lookup's vectors; if it has hooks, it is called itself.

    Args:
        concat: the layer.
        place: of the input that the lookup wrote.
    """

    def __init__(self, concat: Concat, place: int) -> None:
        super().__init__()
        self._concat = (concat,)  # in a tuple nn.Module takes no notice of it: it is a submodule of the graph already
        self._place = place

    def begin(self, wide: WideRows, *inputs: Any) -> None:
        """Put the other inputs beside the lookup's vectors, which are in progress, where all of them are there.

        Args:
            wide: the lookup's rows.
            inputs: of the layer; None: not there yet, as the vectors.
        """
        front, behind = inputs[: self._place], inputs[self._place + 1 :]
        if all(isinstance(one, Tensor) for one in (*front, *behind)):
            wide.put(front, behind)

    def forward(self, *inputs: Any) -> Tensor:
        """Return the joined tensor.

        Args:
            inputs: of the layer, and the lookup's rows, or None if the lookup has no margins.
        """
        parts: tuple[Tensor, ...] = inputs[:-1]
        wide: WideRows | None = inputs[-1]
        [concat] = self._concat
        joined = None if wide is None or has_hooks([concat]) else wide.join(parts, self._place)
        return cast(Tensor, concat(*parts)) if joined is None else joined


@dataclass(frozen=True)
class WidenedLookup:
    """A lookup that leaves margins.

    Args:
        slot: of its rows, a new one.
        margins: the columns that it leaves free.
    """

    slot: int
    margins: Margins


def plan_in_place_concats(
    steps: Sequence[Step], outputs: Sequence[int], lookups: Sequence[int], num_slots: int
) -> tuple[list[Step], dict[int, WidenedLookup]]:
    """Return steps that join beside lookups where that gives the same; and those lookups, by the slot of their vectors.

    Args:
        steps: layer, slots it reads, slots it writes; in order.
        outputs: slots that are read in the end.
        lookups: slots of vectors.
        num_slots: the first slot that is free.
    """
    readers = Counter(slot for _, bottoms, _ in steps for slot in bottoms) + Counter(outputs)
    by_reader = {slot: i for i, (_, bottoms, _) in enumerate(steps) for slot in bottoms if readers[slot] == 1}
    found = list(steps)
    widest: dict[int, tuple[int, int, int]] = {}  # by Concat: a lookup has room for the others, not each for each
    for lookup in lookups:
        end = _concat_of(steps, by_reader, lookup)
        if end is not None:
            at, place = end
            width = math.prod(cast(Layer, steps[at][0]).in_shapes[place])
            widest[at] = max(widest.get(at, (0, 0, 0)), (width, place, lookup))
    joined: dict[int, WidenedLookup] = {}
    for number, (at, (_, place, lookup)) in enumerate(widest.items(), num_slots):
        concat, bottoms, tops = steps[at]
        assert isinstance(concat, Concat)
        widths = [math.prod(shape) for shape in concat.in_shapes]
        joined[lookup] = WidenedLookup(number, Margins(sum(widths[:place]), sum(widths[place + 1 :])))
        found[at] = (ConcatInPlace(concat, place), (*bottoms, number), tops)
    return found, joined


def _concat_of(steps: Sequence[Step], by_reader: Mapping[int, int], slot: int) -> tuple[int, int] | None:
    """Return the step that joins a lookup's vectors, and their place there; None where others read them too."""
    while slot in by_reader:
        layer, bottoms, tops = steps[by_reader[slot]]
        if type(layer) is Concat:
            is_flat = cast(ConcatParameters, layer.settings).axis == 1
            of_batch = all(rows_of(shape) == BATCH for shape in layer.in_shapes)
            return (by_reader[slot], bottoms.index(slot)) if is_flat and of_batch else None
        if type(layer) is not Reshape or cast(ReshapeParameters, layer.settings).slots is not None:
            return None
        if rows_of(layer.out_shapes[0]) != BATCH:
            return None
        [slot] = tops
    return None


def readers_of_rows(steps: Sequence[Step], outputs: Sequence[int]) -> dict[int, Interaction]:
    """Return the interactions that are the only readers of a tensor, by the slot of its embeddings.

    Example:
        >>> from viviane.nn.interaction import Interaction
        >>> list(readers_of_rows([(Interaction([(2,), (1, 2)]), (0, 1), (2,))], [2]))
        [1]
    """
    readers = Counter(slot for _, bottoms, _ in steps for slot in bottoms) + Counter(outputs)
    found: dict[int, Interaction] = {}
    for layer, bottoms, _ in steps:
        pairs = layer.pairs if isinstance(layer, FusedMLP) else layer if type(layer) is Interaction else None
        if pairs is not None and readers[bottoms[-1]] == 1:
            found[bottoms[-1]] = pairs
    return found


TableMaker: TypeAlias = Callable[..., TableCollection]


@dataclass(frozen=True)
class Structure:
    """The parts of a graph's module; tensors are known by the numbers of their slots.

    Args:
        lookups: slot of the vectors (B, S, D), and the collection.
        dense: slot, and the names and widths of its columns.
        num_others: other sources: masks and ids.
        steps: layer, slots it reads, slots it writes; in order.
        outputs: slots of the logits.
    """

    lookups: list[tuple[int, TableCollection]]
    dense: list[tuple[int, tuple[tuple[str, int], ...]]]
    num_others: int
    steps: list[Step]
    outputs: tuple[int, ...]


class Source(Protocol):
    """Makes tensors from a batch."""

    columns: tuple[str, ...]
    """The columns that it reads."""

    def __call__(self, batch: Batch) -> Any:
        """Return them: a tensor, or a tuple."""
        ...


class GraphModule(nn.Module):
    """Runs the layers of a plan in order; a submodule, and its weights in the state dict, carry the node's name.

    What no loss needs is not computed.

    Args:
        plan: a checked graph; its layers become part of the module.
        optimizer: the rule of embedding tables that have none of their own.
        device: where the weights go.
        seed: of the tables' initial values.
        make: builds the collections, called as `viviane.parallel.make_tables` with (tables, features, optimizer,
            device=, seed=, name=); it decides whether they are spread over processes.
    """

    def __init__(
        self,
        plan: GraphPlan,
        optimizer: AnyOptimizer,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        make: TableMaker = make_tables,
    ) -> None:
        super().__init__()
        needed = _needed(plan)
        slots: dict[str, int] = {}
        self._sources: list[tuple[tuple[int, ...], Source]] = []
        self._steps: list[Step] = []
        for name, columns in plan.dense.items():
            if name in needed:
                widths = [(column, plan.dense_dims[column]) for column in columns]
                self._sources.append(((_slot(slots, name),), _Dense(widths)))
        for name, places in plan.ids.items():
            if name in needed:
                self._sources.append(((_slot(slots, name),), Ids(places)))
        for node in plan.nodes:
            if isinstance(node, SparseEmbedding):
                tables = plan.tables[node.name]
                own = derive_seed(seed, "embedding", node.name)  # nodes with equal tables start apart
                collection = make(
                    tables.tables, tables.features, optimizer, device=device, seed=own, name=node.name
                )  # fmt: skip
                self._keep(node.name, collection)
                if needed.intersection(node.top):
                    self._sources.append(_lookup(slots, node, collection, tables.shape))
                if node.all_rows in needed:
                    whole = AllRows(node.name, collection, tables.tables[0].name)
                    self._sources.append(((_slot(slots, node.all_rows),), whole))
            elif isinstance(node, DenseLayer) and node.name in plan.layers:
                layer = plan.layers[node.name].to(device)
                self._keep(node.name, layer)
                if needed.intersection(node.top):
                    bottoms = tuple(slots[bottom] for bottom in node.bottom)
                    self._steps.append((layer, bottoms, tuple(_slot(slots, top) for top in node.top)))
        self._slots = slots
        self._outputs = tuple(slots[loss.output] for loss in plan.losses)
        self._fused = self._use_margins(fuse(self._steps, self._outputs))
        self._in_turn = self._split(self._sources, self._fused)
        self._readers_of_rows = readers_of_rows(self._fused, self._outputs)

    def _use_margins(self, steps: Sequence[Step]) -> list[Step]:
        """Give lookups margins for inputs that are only joined with their vectors; return the steps that use them."""
        lookups = [tops[0] for tops, source in self._sources if isinstance(source, _Stack)]
        steps, joined = plan_in_place_concats(steps, self._outputs, lookups, len(self._slots))
        for i, (tops, source) in enumerate(self._sources):
            if isinstance(source, _Stack) and tops[0] in joined:
                own = joined[tops[0]]
                source.leave_margins(own.margins)
                self._sources[i] = ((*tops, own.slot), source)
        self._num_values = len(self._slots) + len(joined)
        return steps

    def _keep(self, name: str, module: nn.Module) -> None:
        # Not add_module: it refuses names that nn.Module uses itself, such as "type" or "train".
        self._modules[name] = module

    def forward(self, batch: Batch) -> Tensor:
        """Return what the losses read side by side: the logits, (B, L), where there is one for each label."""
        records = _records(batch)
        if records:
            self._pack_ahead()
        values = self._run(batch, self._sources, self._in_turn, self._readers_of_rows)
        if records:
            join_ahead(batch.dense.device)
        logits = [values[slot] for slot in self._outputs]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)

    def _pack_ahead(self) -> None:
        """Begin to bring dense weights to 16 bits, which is done by the time that lookups are."""
        for layer, _, _ in (*self._in_turn[0], *self._in_turn[1]):
            weights = layer.weights_to_pack() if isinstance(layer, Layer | FusedMLP) else []
            if weights:
                pack_ahead(weights)

    def tensor(self, name: str, batch: Batch) -> Tensor:
        """Return one tensor of the graph for a batch that has the columns which it depends on.

        Raises:
            ConfigError: no loss depends on a tensor of this name.
        """
        sources, steps = self._path(name)
        result: Tensor = self._run(batch, sources, self._split(sources, steps))[self._slots[name]]
        return result

    @property
    def structure(self) -> Structure:
        """What it is made of, for those who compute the same another way."""
        lookups, dense, others = [], [], 0
        for tops, source in self._sources:
            if type(source) is _Stack:
                lookups.append((tops[0], source.collection))
            elif isinstance(source, _Dense):
                dense.append((tops[0], source.widths))
            else:
                others += 1
        return Structure(lookups, dense, others, list(self._steps), self._outputs)

    @property
    def id_columns(self) -> set[str]:
        """The columns of the data whose ids layers read."""
        return {column for _, source in self._sources if isinstance(source, Ids) for column in source.columns}

    def columns_of(self, name: str) -> set[str]:
        """Return the columns of the data that a tensor of the graph depends on."""
        return {column for _, source in self._path(name)[0] for column in source.columns}

    def _path(self, name: str) -> tuple[list[tuple[tuple[int, ...], Source]], list[Step]]:
        """Return the sources and the steps that make one tensor."""
        if name not in self._slots:
            what = "no tensor of this name that a loss depends on"
            raise ConfigError(what, value=name, fix=suggest(name, self._slots))
        wanted, steps = {self._slots[name]}, []
        for step in reversed(self._steps):
            if wanted.intersection(step[2]):
                wanted.update(step[1])
                steps.append(step)
        return [one for one in self._sources if wanted.intersection(one[0])], steps[::-1]

    def _split(
        self, sources: Sequence[tuple[tuple[int, ...], Source]], steps: Sequence[Step]
    ) -> tuple[list[Step], list[Step]]:
        """Return the steps that need no vectors of tables, and those that do, each in order."""
        waiting = {slot for tops, source in sources if isinstance(source, _Stack) for slot in tops}
        early: list[Step] = []
        late: list[Step] = []
        for step in steps:
            if waiting.intersection(step[1]):
                waiting.update(step[2])
                late.append(step)
            else:
                early.append(step)
        return early, late

    def _run(
        self,
        batch: Batch,
        sources: Sequence[tuple[tuple[int, ...], Source]],
        steps: tuple[Sequence[Step], Sequence[Step]],
        readers_of_rows: Mapping[int, Interaction] = MappingProxyType({}),
    ) -> list[Any]:
        """Begin lookups, run what needs none of their vectors beside them, then the rest.

        Backward goes the other way: their gradients are on the wire before those of the early layers are taken. The
        order is one everywhere, so that layers draw the same random numbers in a graph and over processes.
        """
        values: list[Any] = [None] * self._num_values
        begun: list[tuple[tuple[int, ...], Callable[[], Any]]] = []
        wide_rows: dict[int, WideRows | None] = {}
        for tops, source in sources:
            if isinstance(source, _Stack):
                reader = readers_of_rows.get(tops[-1])
                rows_suffice = reader is not None and not torch.is_grad_enabled() and not has_hooks([reader])
                finish, wide_rows[tops[-1]] = source.begin(batch, rows_suffice)
                begun.append((tops, finish))
            else:
                _keep_results(values, tops, source(batch))
        early, late = steps
        _compute(values, early)
        for layer, bottoms, _ in late:
            if isinstance(layer, ConcatInPlace) and (wide := wide_rows.get(bottoms[-1])) is not None:
                layer.begin(wide, *(values[slot] for slot in bottoms[:-1]))
        for tops, finish in begun:
            _keep_results(values, tops, finish())
        _compute(values, late)
        return values


def _compute(values: list[Any], steps: Sequence[Step]) -> None:
    for layer, bottoms, tops in steps:
        result = layer(*[values[slot] for slot in bottoms])
        if len(tops) == 1:
            values[tops[0]] = result
        else:
            _keep_results(values, tops, result)


def _records(batch: Batch) -> bool:
    """Whether a CUDA graph is recorded."""
    return batch.dense.is_cuda and not torch.compiler.is_compiling() and is_capturing(batch.dense.device)


def _keep_results(values: list[Any], tops: tuple[int, ...], result: Any) -> None:
    if len(tops) == 1:
        values[tops[0]] = result
    else:
        for slot, part in zip(tops, result, strict=True):
            values[slot] = part


def build_module(
    plan: GraphPlan, optimizer: AnyOptimizer, solver: Solver, group: Group, statistics: Mapping[str, Any] | None = None
) -> GraphModule:
    """Make the layers and tables of a plan; tables are spread over the processes as the solver sets.

    Args:
        statistics: `info` of the training data, for the automatic plan.

    Raises:
        ConfigError: the solver's plan names a table that is not there, or is for another number of processes.
    """
    pairs = [(node, table.name) for node, one in plan.tables.items() for table in one.tables]
    check_plan_names(solver.plan, [name for node, table in pairs for name in (table, f"{node}.{table}")])
    given: GivenPlan = solver.plan
    if group.size > 1 and pairs and not is_whole(given):
        tables, features = joined_tables(plan)  # all nodes' tables share the devices, so they are planned together
        kinds = {
            f"{node}.{table}": kind
            for node, one in plan.tables.items()
            for table, kind in own_kinds(given, one.tables, node).items()
        }
        given = choose_plan(
            tables, features, optimizer, group, device=str(resolve_device(solver.device)), kinds=kinds,
            batch_size=solver.batch_size, wire_dtype=solver.wire_dtype, traffic=Traffic.of(statistics or {}),
            tiers=True,
        ).plan.to_dict()  # fmt: skip
    device = resolve_device(solver.device)
    memory = table_memory(
        {node: one.tables for node, one in plan.tables.items()}, optimizer, solver, device, group.size,
        plan.table_memory,
    )  # fmt: skip

    def make(*args: Any, name: str, **options: Any) -> TableCollection:
        return make_tables(
            *args, name=name, cache=memory.get(name), group=group, plan=given, wire_dtype=solver.wire_dtype,
            deduplicate_ids=solver.deduplicate_ids, **options,
        )  # fmt: skip

    return GraphModule(plan, optimizer, device=device, seed=solver.seed, make=make)


def joined_tables(plan: GraphPlan) -> tuple[list[AnyTable], list[FeatureConfig]]:
    """Return tables and features of all embedding nodes, as "<node>.<table>" and "<node>.<feature>"."""
    tables: list[AnyTable] = []
    features: list[FeatureConfig] = []
    for node, own in plan.tables.items():
        tables += [table.model_copy(update={"name": f"{node}.{table.name}"}) for table in own.tables]
        for feature in own.features:
            changes = {"name": f"{node}.{feature.name}", "table": f"{node}.{feature.table}"}
            features.append(feature.model_copy(update=changes))
    return tables, features


class _Stack:
    """Looks a batch up and returns (B, S, D)."""

    has_mask = False

    def __init__(self, collection: TableCollection, shape: tuple[int, ...]) -> None:
        self.collection = collection
        self.shape = shape
        self.columns = tuple(collection.features)
        self._leaves_margins = False

    def begin(self, batch: Batch, rows_suffice: bool) -> tuple[Callable[[], Any], WideRows | None]:
        """Begin a lookup: over processes, else in a branch of the graph.

        Args:
            rows_suffice: the reader takes `TableRows` as well.

        Returns:
            what waits for it; and the wider rows, if the lookup has margins.
        """
        if isinstance(self.collection, ShardedCollection):
            inputs = self.collection.begin(batch)
            return lambda: self(inputs), self.collection.wide_rows_of(inputs) if self._leaves_margins else None
        look_up = self._rows_or_vectors if rows_suffice else self
        if not _records(batch):
            looked_up = look_up(batch)
            return lambda: looked_up, None
        with branch(batch.dense.device, "lookup") as join:  # bound by memory: overlaps with matrix products
            found = look_up(batch)

        def finish() -> Any:
            join()
            return found

        return finish, found[-1] if self._leaves_margins else None

    def leave_margins(self, margins: Margins) -> None:
        """From now on return the rows that the vectors are part of, too: None if the lookup has no margins."""
        self.collection.margins, self._leaves_margins = margins, True

    def _rows_or_vectors(self, batch: Batch) -> Any:
        fits = isinstance(self.collection, EmbeddingCollection) and not has_hooks([self.collection])
        rows = cast(EmbeddingCollection, self.collection).lookup_rows(batch) if fits else None
        return self(batch) if rows is None else rows

    def __call__(self, batch: Batch | DistributedInput) -> Any:
        out = self.collection(batch)
        found = [out.flat.view(out.flat.shape[0], *self.shape)]
        if self.has_mask:
            found.append(torch.cat([out.mask(name) for name in out.places], 1).to(out.flat.dtype))
        if self._leaves_margins:
            found.append(out.wide)
        return found[0] if len(found) == 1 else tuple(found)


class _StackAndMask(_Stack):
    """Looks a batch up and returns (B, S, D), and the mask (B, S) as ones and zeros."""

    has_mask = True


class _Dense:
    """Returns dense columns side by side, (B, N); without a copy where they are all there are, in order."""

    def __init__(self, columns: Sequence[tuple[str, int]]) -> None:
        self.widths = tuple(columns)
        self.columns = tuple(name for name, _ in columns)

    def __call__(self, batch: Batch) -> Tensor:
        if batch.layout.dense == self.widths:
            return batch.dense
        return torch.cat([batch.dense_feature(name) for name in self.columns], 1)


def _lookup(
    slots: dict[str, int], node: SparseEmbedding, collection: TableCollection, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Source]:
    make = _Stack if node.mask is None else _StackAndMask
    tops = [node.name] if node.mask is None else [node.name, node.mask]
    return tuple(_slot(slots, top) for top in tops), make(collection, shape)


def _slot(slots: dict[str, int], name: str) -> int:
    slots[name] = len(slots)
    return slots[name]


def _needed(plan: GraphPlan) -> set[str]:
    """Return the tensors that some logit depends on."""
    needed = {loss.output for loss in plan.losses}
    for node in reversed(plan.nodes):
        if isinstance(node, DenseLayer) and needed.intersection(node.top) and node.name in plan.layers:
            needed.update(node.bottom)
    return needed
