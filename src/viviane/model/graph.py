"""From nodes to a checked plan: every tensor has one source, a known shape, and its place in the order.

Shapes leave the batch dimension out: a tensor (B, S, D) has the shape (S, D).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from viviane.config.memory_sizes import MemorySize
from viviane.core.errors import ConfigError, SchemaError, VivianeError, suggest
from viviane.embedding import DynamicOptions, DynamicTableConfig, FeatureConfig, TableConfig
from viviane.model.ids import id_places
from viviane.model.losses import GraphLoss, in_order
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding
from viviane.nn import LAYERS, Layer, Loss, build_layer
from viviane.nn.rows import BATCH, Rows, Shape, rows_of, with_rows
from viviane.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema
from viviane.training.checkpoint.load import SavedSizes

AnyTable: TypeAlias = TableConfig | DynamicTableConfig


@dataclass
class Tables:
    """The tables and features of one embedding node."""

    node: SparseEmbedding
    tables: list[AnyTable]
    features: list[FeatureConfig]

    @property
    def shape(self) -> Shape:
        """(S, dim), S counting every place of a "concat"."""
        return (sum(feature.num_places for feature in self.features), self.node.dim)

    @property
    def memory(self) -> dict[str, MemorySize]:
        """Sizes of memory that single tables have as an option, by "<node>.<table>"."""
        given = {name: one.memory for name, one in self.node.tables.items()}
        return {f"{self.node.name}.{name}": size for name, size in given.items() if size is not None}


@dataclass
class GraphPlan:
    """A graph that was found right for a schema.

    Args:
        nodes: the nodes in order.
        label, dense, sparse: columns of each input tensor.
        dense_dims: width of each dense column.
        shapes: of every tensor but the groups of categorical columns.
        layers: a built layer for each `DenseLayer` that runs, by node name; losses are not among them.
        ids: for each group of columns whose ids a layer reads, its columns and the places of each.
        tables: for each `SparseEmbedding`, by node name.
        losses: in the schema's order of labels; the module's output is what they read, side by side.
        unused: tensors that nothing reads.
    """

    nodes: tuple[Node, ...]
    label: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dense: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sparse: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dense_dims: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    ids: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    tables: dict[str, Tables] = field(default_factory=dict)
    losses: list[GraphLoss] = field(default_factory=list)
    unused: tuple[str, ...] = ()

    @property
    def logits(self) -> dict[str, str]:
        """For each label, the tensor that predicts it."""
        return {label: loss.output for loss in self.losses for label in loss.labels}

    @property
    def embeddings(self) -> list[SparseEmbedding]:
        """The embedding nodes, in order."""
        return [node for node in self.nodes if isinstance(node, SparseEmbedding)]

    @property
    def table_memory(self) -> dict[str, MemorySize]:
        """Sizes of memory that single tables have as an option, by "<node>.<table>"."""
        return {name: size for own in self.tables.values() for name, size in own.memory.items()}


def plan_graph(nodes: Sequence[Node], schema: Schema, *, seed: int = 0, saved: SavedSizes | None = None) -> GraphPlan:
    """Check a graph against a schema, infer shapes, and build its layers; tables are not built yet.

    Args:
        nodes: an `Input` first, then the others, each after what it reads.
        schema: the data's columns.
        seed: of the layers' initial values, which depend besides on each layer's name and shape alone.
        saved: sizes of the weights that will be loaded; a graph that asks for more is refused before it takes memory.

    Raises:
        ConfigError: a name occurs twice, a bottom is unknown, the loss is missing or misplaced.
        SchemaError: a column is unknown, or a layer cannot take its inputs' shapes.
        CheckpointError: a table has another size in the saved weights.
    """
    plan = GraphPlan(tuple(nodes))
    if not nodes or not isinstance(nodes[0], Input):
        raise ConfigError(
            "a graph begins with an Input", fix="model.add(vv.Input(label='label', dense='dense', sparse='cats'))"
        )
    _add_input(plan, nodes[0], schema)
    users: dict[str, list[str]] = {name: [] for name in (*plan.label, *plan.dense, *plan.sparse)}
    names: set[str] = set()
    for node in nodes[1:]:
        if isinstance(node, Input):
            raise ConfigError("a graph has one Input", fix="name several tensors in one Input with mappings")
        if node.name in names:
            raise ConfigError("two nodes of one name", value=node.name, fix="choose another name")
        names.add(node.name)
        if isinstance(node, SparseEmbedding):
            _add_embedding(plan, node, schema)
            if saved is not None:
                _check_saved(plan.tables[node.name], saved)
            tops: tuple[str, ...] = node.top
            bottoms: tuple[str, ...] = (node.bottom,)
        else:
            tops, bottoms = _add_layer(plan, node, schema, seed, saved), node.bottom
        for bottom in bottoms:
            users[bottom].append(node.name)
        for top in tops:
            if top in users:
                raise ConfigError("two tensors of one name", where=f"node {node.name!r}", value=top)
            users[top] = []
    plan.losses = in_order(plan.losses, schema)
    plan.unused = tuple(
        name
        for name, readers in users.items()
        if not readers and plan.shapes.get(name) != (0,) and plan.sparse.get(name) != ()
    )
    return plan


def _add_input(plan: GraphPlan, node: Input, schema: Schema) -> None:
    plan.label = _groups("label", node.label, [one.name for one in schema.labels])
    plan.dense = _groups("dense", node.dense, [one.name for one in schema.dense])
    plan.sparse = _groups("sparse", node.sparse, [one.name for one in schema.categorical])
    names = [*plan.label, *plan.dense, *plan.sparse]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("two tensors of one name", where="Input", value=name)
    kinds = (
        (plan.label, LabelColumn, "label"),
        (plan.dense, DenseColumn, "dense"),
        (plan.sparse, CategoricalColumn, "categorical"),
    )
    for groups, kind, word in kinds:
        for name, columns in groups.items():
            for column in columns:
                if not isinstance(schema.column(column), kind):
                    raise SchemaError(f"not a {word} column", where=f"Input, tensor {name!r}", value=column)
    for name, columns in plan.label.items():
        plan.shapes[name] = (len(columns),)
    plan.dense_dims = {column.name: column.dim for column in schema.dense}
    for name, columns in plan.dense.items():
        plan.shapes[name] = (sum(plan.dense_dims[column] for column in columns),)


def _groups(kind: str, given: str | Mapping[str, tuple[str, ...]], everything: list[str]) -> dict[str, tuple[str, ...]]:
    if isinstance(given, str):
        return {given: tuple(everything)}
    for name, columns in given.items():
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice or not columns:
            what = "a column occurs twice in one tensor" if twice else "an input tensor needs at least one column"
            raise ConfigError(what, where=f"Input, {kind} {name!r}", value=", ".join(twice))
    return dict(given)


def _add_embedding(plan: GraphPlan, node: SparseEmbedding, schema: Schema) -> None:
    where = f"embedding {node.name!r}"
    if node.bottom not in plan.sparse:
        fix = suggest(node.bottom, plan.sparse)
        raise ConfigError("an embedding reads a group of categorical columns", where=where, value=node.bottom, fix=fix)
    if not plan.sparse[node.bottom]:
        raise SchemaError("the schema has no categorical columns to look up", where=where, value=node.bottom)
    columns = [schema.categorical_column(name) for name in plan.sparse[node.bottom]]
    known = {column.table: column for column in columns}
    for name in node.tables:
        if name not in known:
            raise ConfigError("options of a table that is not there", where=where, value=name, fix=suggest(name, known))
    tables = [_table(node, name, column, schema) for name, column in known.items()]
    features = [_feature(node, column) for column in columns]
    plan.tables[node.name] = Tables(node, tables, features)
    shapes = {node.name: plan.tables[node.name].shape, node.mask: plan.tables[node.name].shape[:1]}
    if node.all_rows is not None:
        shapes[node.all_rows] = _all_rows(tables, where)
    for top in node.top:
        shape = shapes[top]
        if top in plan.shapes or top in plan.sparse:
            raise ConfigError("two tensors of one name", where=where, value=top, fix="choose another name")
        plan.shapes[top] = shape


def _all_rows(tables: Sequence[AnyTable], where: str) -> Shape:
    """Return the shape of a table as a tensor."""
    if len(tables) > 1 or isinstance(tables[0], DynamicTableConfig):
        names = ", ".join(table.name for table in tables)
        fix = "give the columns one vocabulary and num_ids; for a dynamic table sample candidates instead"
        raise SchemaError("all_rows is for a group with one table of a known size", where=where, value=names, fix=fix)
    return with_rows((tables[0].dim,), Rows(tables[0].num_rows, of_batch=False))


def _table(node: SparseEmbedding, name: str, column: CategoricalColumn, schema: Schema) -> AnyTable:
    options = node.tables.get(name)
    fields = ("init", "dtype", "out_of_range", "trainable", "optimizer", "dynamic")
    values = {key: getattr(node, key) for key in fields}
    if options is not None:
        values |= {key: value for key in fields if (value := getattr(options, key)) is not None}
    policy, dynamic = values.pop("out_of_range"), values.pop("dynamic")
    padding = schema.reserved.padding
    if column.num_ids is not None and dynamic is None:
        default = schema.reserved.unknown if policy == "default" else None
        return TableConfig(
            name=name, num_rows=column.num_ids, dim=node.dim, out_of_range=policy, default_id=default,
            padding_id=padding, **values,
        )  # fmt: skip
    if options is not None and options.out_of_range is not None:
        where = f"embedding {node.name!r}, table {name!r}"
        raise ConfigError("a dynamic table takes every id", where=where, value=policy, fix="leave out_of_range out")
    coming = dynamic or DynamicOptions()
    rows = {key: getattr(coming, key) for key in DynamicOptions.model_fields if key in coming.model_fields_set}
    return DynamicTableConfig(
        name=name, dim=node.dim, padding_id=None if column.num_ids is None else padding, **rows, **values
    )


def _feature(node: SparseEmbedding, column: CategoricalColumn) -> FeatureConfig:
    length = column.max_length if node.combiner == "concat" else None
    if node.combiner == "concat" and column.kind != "one_hot" and length is None:
        raise SchemaError(
            "combiner 'concat' needs to know the longest bag",
            where=f"embedding {node.name!r}, column {column.name!r}",
            fix="set the column's max_length in the schema, or pool with 'sum' or 'mean'",
        )
    return FeatureConfig(name=column.name, table=column.table, combiner=node.combiner, max_length=length)


def _check_saved(own: Tables, saved: SavedSizes) -> None:
    for table in own.tables:
        if isinstance(table, TableConfig):
            saved.check_table(f"{own.node.name}.{table.name}", table.num_rows, table.dim)


def _add_layer(
    plan: GraphPlan, node: DenseLayer, schema: Schema, seed: int, saved: SavedSizes | None
) -> tuple[str, ...]:
    """Build the layer and note its outputs' shapes; a loss is only checked."""
    where = f"layer {node.name!r} ({node.type})"
    inputs: list[Shape] = []
    for place, bottom in enumerate(node.bottom):
        if place in LAYERS[node.type].id_inputs:
            plan.ids[bottom] = id_places(plan.sparse, bottom, schema, where)
            inputs.append((sum(length for _, length in plan.ids[bottom]),))
        else:
            _check_bottom(plan, bottom, where)
            inputs.append(plan.shapes[bottom])
    try:
        most_bytes = None if saved is None else saved.dense_bytes
        layer = build_layer(node.type, node.params, inputs, seed=seed, name=node.name, most_bytes=most_bytes)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # sizes that torch cannot have
        if isinstance(error, VivianeError):
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError("torch cannot make the layer", where=where, value=said, fix="give it other sizes") from error
    if isinstance(layer, Loss):
        _add_loss(plan, node, layer, where)
        return ()
    for bottom in node.bottom:
        if bottom in plan.label:
            raise ConfigError("only a loss reads labels: a layer would predict them from themselves", where=where,
                              value=bottom, fix="read the tensors of features")  # fmt: skip
    if len(node.top) != len(layer.out_shapes):
        raise ConfigError(
            "as many tops as the layer has outputs",
            where=where,
            value=", ".join(node.top),
            allowed=f"{len(layer.out_shapes)} name(s)",
        )
    for top, shape in zip(node.top, layer.out_shapes, strict=True):
        if top in plan.shapes or top in plan.sparse:
            raise ConfigError("two tensors of one name", where=where, value=top, fix="choose another name")
        plan.shapes[top] = shape
    plan.layers[node.name] = layer
    return node.top


def _check_bottom(plan: GraphPlan, bottom: str, where: str) -> None:
    if bottom in plan.sparse:
        fix = f"look them up first: SparseEmbedding('emb', bottom={bottom!r}, dim=16)"
        raise ConfigError("a layer cannot read categorical columns", where=where, value=bottom, fix=fix)
    if bottom not in plan.shapes:
        what = "no tensor of this name is defined before the layer"
        raise ConfigError(what, where=where, value=bottom, fix=suggest(bottom, plan.shapes))
    if plan.shapes[bottom] == (0,):
        kind = "label" if bottom in plan.label else "dense"
        raise SchemaError(f"the schema has no {kind} columns, so the tensor is empty", where=where, value=bottom)


def _add_loss(plan: GraphPlan, node: DenseLayer, layer: Loss, where: str) -> None:
    output, label = node.bottom
    if label not in plan.label:
        fix = suggest(label, plan.label)
        raise ConfigError("a loss reads a logit, then a label of the Input", where=where, value=label, fix=fix)
    if output in plan.label:
        raise ConfigError("a loss reads a logit, then a label of the Input", where=where, value=output)
    shape = plan.shapes[output]
    if rows_of(shape) != BATCH:
        raise layer.refuse("outputs with one row for each sample")
    if node.type == "CrossEntropyLoss" and shape != (2,):
        raise layer.refuse("a logit (B, 2): the labels of a model are binary")
    plan.losses.append(GraphLoss(node.name, layer, output, shape[0], plan.label[label]))


def unused_message(names: Iterable[str]) -> str:
    """List the tensors that no layer reads."""
    return "nothing reads the tensor(s) " + ", ".join(repr(name) for name in names)
