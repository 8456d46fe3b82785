"""The nodes of a model's graph: plain settings, the same from Python and from JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from viviane.config import OptimizerSettings
from viviane.config.base import Settings
from viviane.config.memory_sizes import num_bytes
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicOptions, UniformInit
from viviane.embedding.config import Combiner, InitSettings, OutOfRange, RowType
from viviane.nn import LAYERS
from viviane.schema import Schema

NAME_PATTERN = r"^[A-Za-z0-9_\-]+$"
Name: TypeAlias = Annotated[str, Field(pattern=NAME_PATTERN)]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names: TypeAlias = Annotated[tuple[Name, ...], BeforeValidator(_listed)]
Columns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Input(Settings):
    """Names the tensors that come from the data.

    Each argument is a tensor's name, which then means all columns of that kind, or a mapping from
    tensor names to columns. The tensors are labels (B, L), dense numbers (B, N), and groups of categorical
    columns, which only a `SparseEmbedding` reads.

    Args:
        label: labels.
        dense: dense numbers, side by side in the given order.
        sparse: categorical columns.

    Example:
        >>> Input(label="label", dense="dense", sparse={"cats": ["city", "device"], "hist": "clicked"}).sparse
        {'cats': ('city', 'device'), 'hist': ('clicked',)}
    """

    node: Literal["Input"] = "Input"
    label: Name | dict[Name, Columns] = "label"
    dense: Name | dict[Name, Columns] = "dense"
    sparse: Name | dict[Name, Columns] = "cats"


class TableOptions(Settings):
    """What one table of a `SparseEmbedding` does otherwise than the others; None keeps the node's value.

    Args:
        dynamic: makes the table dynamic, see `SparseEmbedding`.
        memory: of rows and optimizer state in training, per process: bytes, or text such as "2 GiB"; rows that do not
            fit lie in tiers, or elsewhere as those of dynamic tables, see `Solver.embedding_memory`, which goes first
            where it names the table.
    """

    init: InitSettings | None = None
    dtype: RowType | None = None
    out_of_range: OutOfRange | None = None
    trainable: bool | None = None
    optimizer: OptimizerSettings | None = None
    dynamic: DynamicOptions | None = None
    memory: int | str | None = None

    @model_validator(mode="after")
    def _check_memory(self) -> TableOptions:
        if self.memory is not None:
            num_bytes(self.memory, "memory of a table")
        return self


class SparseEmbedding(Settings):
    """Looks up a group of categorical columns: (B, S, dim), one vector for each of the S columns.

    Columns that share a vocabulary share a table; a table has the schema's num_ids rows, and the schema's
    padding id stays zero. Two nodes never share a table. A column of raw ids (num_ids null in the schema) has a dynamic
    table, whose rows come with their ids.

    Args:
        name: the node and its output.
        bottom: a group of categorical columns, named by `Input`.
        dim: width of a vector.
        combiner: how the vectors of a bag join: "sum", "mean", or "concat", which keeps them apart: a column
            of max_length L then gives L vectors, zeros after its last.
        mask: name of a second output, (B, S): 1 where a place holds a vector, 0 where it is empty or padding; for
            "concat".
        all_rows: name of another output, (num_ids, dim) for every batch: the rows of the group's one table, for a
            softmax over all items. Its gradient moves every row in every step, so it is for tables that one process
            holds, up to some 100,000 rows.
        init: initial values: "uniform", "normal", "xavier", "zero", or settings of one.
        dtype: of the rows: "float32", or "float16" or "bfloat16", which take half the memory; the output is float32.
        out_of_range: what a key outside the table does: "raise", "default" (the schema's id of unknown
            values), "hash" or "ignore"; a dynamic table has no range.
        trainable: False keeps the rows as they are.
        optimizer: the rule of these tables; None takes the model's.
        dynamic: how rows of dynamic tables come and go; where it is given, all tables of the node are dynamic. None:
            those of raw ids are, by the defaults of `viviane.embedding.DynamicOptions`.
        tables: options of single tables, by table name.

    Example:
        >>> SparseEmbedding("emb", bottom="cats", dim=16).combiner
        'sum'
    """

    node: Literal["SparseEmbedding"] = "SparseEmbedding"
    name: Name
    bottom: Name
    dim: int = Field(ge=1)
    combiner: Combiner = "sum"
    mask: Name | None = None
    all_rows: Name | None = None
    init: InitSettings = UniformInit()
    dtype: RowType = "float32"
    out_of_range: OutOfRange = "raise"
    trainable: bool = True
    optimizer: OptimizerSettings | None = None
    dynamic: DynamicOptions | None = None
    tables: dict[str, TableOptions] = Field(default_factory=dict)

    def __init__(self, name: str, bottom: str, dim: int, **options: Any) -> None:
        super().__init__(name=name, bottom=bottom, dim=dim, **options)

    @property
    def top(self) -> tuple[str, ...]:
        """Names of its outputs: the vectors; the mask and the whole table where they are requested."""
        return tuple(name for name in (self.name, self.mask, self.all_rows) if name is not None)

    @model_validator(mode="after")
    def _check(self) -> SparseEmbedding:
        if self.mask is not None and self.combiner != "concat":
            raise ValueError("only the combiner 'concat' keeps places apart and has a mask")
        return self

    # JSON goes straight to the fields, so that a missing or unknown key is named.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class DenseLayer(Settings):
    """A layer of `viviane.nn`: reads tensors by name, gives its output a name.

    Args:
        name: the node; prefix of its weights in the state dict.
        type: a registered layer, such as "InnerProduct", "MLP", "MultiCross", "Concat".
        bottom: the tensor or tensors it reads.
        top: names of its outputs; None is the node's own name, which fits layers with one output.
        params: the layer's parameters; in Python, write them as keyword arguments.

    Example:
        >>> layer = DenseLayer("deep", "MLP", bottom="x", num_outputs=[64, 1])
        >>> layer.bottom, layer.top, layer.params
        (('x',), ('deep',), {'num_outputs': [64, 1]})
    """

    node: Literal["DenseLayer"] = "DenseLayer"
    name: Name
    type: str
    bottom: Names = Field(min_length=1)
    top: Names = Field(default=(), validate_default=True)
    params: dict[str, Any] = Field(default_factory=dict)

    def __init__(
        self,
        name: str,
        type: str,  # noqa: A002 - the word of HugeCTR and of the JSON
        bottom: str | Sequence[str] = (),
        top: str | Sequence[str] | None = None,
        params: Mapping[str, Any] | None = None,
        node: str = "DenseLayer",
        **more: Any,
    ) -> None:
        both = sorted((params or {}).keys() & more.keys())
        if both:
            raise ConfigError("a layer parameter is given twice", where=f"layer {name!r}", value=", ".join(both))
        given = {**(params or {}), **more}
        super().__init__(node=node, name=name, type=type, bottom=bottom, top=top or (), params=given)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _name_the_output(cls, data: Any) -> Any:
        return {**data, "top": data.get("top") or data["name"]} if isinstance(data, dict) and "name" in data else data

    @model_validator(mode="after")
    def _check(self) -> DenseLayer:
        try:
            LAYERS[self.type].Parameters(**self.params)
        except ConfigError as error:
            place = f"layer {self.name!r}" + (f", {error.where}" if error.where else "")
            value = {} if error.value is None else {"value": error.value}
            raise ConfigError(error.what, where=place, allowed=error.allowed, fix=error.fix, **value) from None
        return self


Node: TypeAlias = Annotated[Input | SparseEmbedding | DenseLayer, Field(discriminator="node")]


class Recipe(Protocol):
    """Something that writes a graph for a schema, such as the models of `viviane.zoo`."""

    def nodes(self, schema: Schema) -> Sequence[Node]:
        """Return the nodes."""
