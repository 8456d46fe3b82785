"""What a model is made of: layers, tables, shapes, parameters and bytes, as data and as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from torch import nn

from viviane.config import AnyOptimizer
from viviane.core.html import html_table
from viviane.embedding import TableConfig, TableSummary
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.embedding.state import summarize as summarize_table
from viviane.model.graph import GraphPlan, Tables, unused_message
from viviane.model.losses import loss_options
from viviane.model.nodes import Input, Node, SparseEmbedding
from viviane.nn.rows import Shape, show_shape

if TYPE_CHECKING:
    from rich.table import Table

_BYTES_PER_NUMBER: Final = 4
_FILE_WIDTH: Final = 120  # where the output is a file or a pipe, which has no width


@dataclass(frozen=True)
class LayerSummary:
    """A line about a node, or about a submodule of a torch module.

    Args:
        names: the node's; of an Input, those of its tensors.
        shapes: of its outputs, without the batch; empty where they are not known.
        num_parameters: dense weights; those of tables are in the rows of the tables.
        options: weight and regularizer of a loss.
    """

    names: tuple[str, ...]
    type: str
    bottoms: tuple[str, ...]
    shapes: tuple[Shape, ...]
    num_parameters: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSummary:
    """Everything `Model.summary` prints."""

    name: str
    layers: tuple[LayerSummary, ...]
    tables: tuple[TableSummary, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def dense_parameters(self) -> int:
        """Number of dense weights."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def table_parameters(self) -> int:
        """Number of weights in tables."""
        return sum(table.num_parameters for table in self.tables)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return _BYTES_PER_NUMBER * self.dense_parameters + sum(table.weight_bytes for table in self.tables)

    @property
    def state_bytes(self) -> int:
        """Bytes of the tables' optimizer state."""
        return sum(table.state_bytes for table in self.tables)

    def print(self, width: int | None = None) -> None:
        """Print the summary as tables."""
        from rich.console import Console

        console = Console(width=width, highlight=False)
        if width is None and not console.is_terminal:
            console = Console(width=_FILE_WIDTH, highlight=False)
        console.print(_table(f"Model {self.name}", _LAYER_HEADINGS, _layer_rows(self), 4))
        if self.tables:
            console.print(_table("Tables", _TABLE_HEADINGS, _table_rows(self), 2))
        console.print(self._sizes())
        for note in self.notes:
            console.print(f"[yellow]note:[/yellow] {note}")

    def html(self) -> str:
        """Return the summary as HTML tables, for notebooks."""
        tables = html_table("Tables", _TABLE_HEADINGS, _table_rows(self)) if self.tables else ""
        layers = html_table(f"Model {self.name}", _LAYER_HEADINGS, _layer_rows(self), self._sizes())
        return layers + tables

    def _sizes(self) -> str:
        return (
            f"{self.dense_parameters + self.table_parameters:,} parameters: {self.dense_parameters:,} dense, "
            f"{self.table_parameters:,} in tables; {human_bytes(self.weight_bytes)} of weights, "
            f"{human_bytes(self.state_bytes)} of table optimizer state"
        )


def summarize(name: str, plan: GraphPlan | None, module: nn.Module | None, optimizer: AnyOptimizer) -> ModelSummary:
    """Describe a plan, whose tables need not exist yet, or a torch module.

    Args:
        optimizer: the rule of tables without their own, which decides the bytes of their state.
    """
    if plan is None:
        assert module is not None
        collections = collections_of(module)
        tables = [
            replace(line, name=f"{prefix}.{line.name}" if prefix else line.name)
            for prefix, one in collections.items()
            for line in one.summary()
        ]
        return ModelSummary(name, tuple(_submodules(module)), tuple(tables))
    layers = tuple(_node(plan, node) for node in plan.nodes)
    lines = [line for one in plan.tables.values() for line in _tables(one, optimizer)]
    notes = (unused_message(plan.unused) + "; it is not computed",) if plan.unused else ()
    return ModelSummary(name, layers, tuple(lines), notes)


def human_bytes(count: int) -> str:
    """Format a number of bytes with three digits.

    Example:
        >>> human_bytes(1536), human_bytes(12)
        ('1.50 KiB', '12 B')
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{size:.3g} {units[0]}" if size >= 10 else f"{size:.2f} {units[0]}"


def _node(plan: GraphPlan, node: Node) -> LayerSummary:
    if isinstance(node, Input):
        names = (*plan.label, *plan.dense, *plan.sparse)
        shapes = tuple(plan.shapes.get(name, (len(plan.sparse.get(name, ())),)) for name in names)
        return LayerSummary(names, "Input", (), shapes, 0)
    if isinstance(node, SparseEmbedding):
        shapes = tuple(plan.shapes[top] for top in node.top)
        return LayerSummary(node.top, "SparseEmbedding", (node.bottom,), shapes, 0)
    layer = plan.layers.get(node.name)
    count = 0 if layer is None else sum(one.numel() for one in layer.parameters())
    shapes = tuple(plan.shapes[top] for top in node.top) if layer is not None else ()
    options = () if layer is not None else tuple(loss_options(node))
    return LayerSummary((node.name,), node.type, node.bottom, shapes, count, options)


def _tables(one: Tables, optimizer: AnyOptimizer) -> list[TableSummary]:
    lines = []
    for table in one.tables:
        users = tuple(feature.name for feature in one.features if feature.table == table.name)
        num_rows = table.num_rows if isinstance(table, TableConfig) else 0
        line = summarize_table(table, optimizer, users, num_rows, table.trainable)
        lines.append(replace(line, name=f"{one.node.name}.{table.name}"))
    return lines


def _submodules(module: nn.Module) -> list[LayerSummary]:
    counts: dict[str, int] = {}
    for name, parameter in dense_parameters(module).items():
        head = name.split(".", maxsplit=1)[0] if "." in name else ""
        counts[head] = counts.get(head, 0) + parameter.numel()
    children: dict[str, nn.Module] = dict(module.named_children())
    lines = [LayerSummary((name,), type(one).__name__, (), (), counts.get(name, 0)) for name, one in children.items()]
    own = [LayerSummary(("(own)",), type(module).__name__, (), (), counts[""])] if "" in counts else []
    return own + lines


_LAYER_HEADINGS: Final = ("layer", "type", "reads", "output", "parameters", "bytes")
_TABLE_HEADINGS: Final = ("table", "columns", "rows", "dim", "optimizer", "bytes", "state")


def _layer_rows(summary: ModelSummary) -> list[tuple[str, ...]]:
    return [
        (
            "\n".join(layer.names),
            "\n".join([layer.type, *layer.options]),
            "\n".join(layer.bottoms),
            "\n".join(show_shape(shape) for shape in layer.shapes),
            f"{layer.num_parameters:,}" if layer.num_parameters else "",
            human_bytes(_BYTES_PER_NUMBER * layer.num_parameters) if layer.num_parameters else "",
        )
        for layer in summary.layers
    ]


def _table_rows(summary: ModelSummary) -> list[tuple[str, ...]]:
    return [
        (
            table.name,
            ", ".join(table.features),
            f"{table.num_rows:,} (dynamic)" if table.is_dynamic else f"{table.num_rows:,}",
            str(table.dim),
            table.optimizer,
            human_bytes(table.weight_bytes),
            human_bytes(table.state_bytes),
        )
        for table in summary.tables
    ]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        is_number = index >= first_number and heading != "optimizer"
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=heading not in ("type", "columns"),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table
