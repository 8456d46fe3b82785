"""Settings of tables and of the features that look them up."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator

from viviane.config import OptimizerSettings
from viviane.config.base import Settings

OutOfRange = Literal["raise", "default", "hash", "ignore"]
RowType = Literal["float32", "float16", "bfloat16"]
Combiner = Literal["sum", "mean", "concat"]


class UniformInit(Settings):
    """Even draws from [low, high); by default from -b to b with b = min(0.05, sqrt(1 / num_rows))."""

    type: Literal["uniform"] = "uniform"
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _check(self) -> UniformInit:
        if (self.low is None) != (self.high is None):
            raise ValueError("uniform init takes both low and high, or neither")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"uniform init needs low < high, got {self.low} and {self.high}")
        return self


class NormalInit(Settings):
    """Draws from a normal distribution."""

    type: Literal["normal"] = "normal"
    mean: float = 0.0
    std: float = Field(default=0.01, gt=0)


class XavierInit(Settings):
    """Even draws from -b to b with b = sqrt(6 / (num_rows + dim)) (Glorot and Bengio 2010)."""

    type: Literal["xavier"] = "xavier"


class ZeroInit(Settings):
    """All zeros."""

    type: Literal["zero"] = "zero"


class ConstantInit(Settings):
    """All the same value."""

    type: Literal["constant"] = "constant"
    value: float


def _by_name(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


InitSettings = Annotated[
    UniformInit | NormalInit | XavierInit | ZeroInit | ConstantInit,
    Field(discriminator="type"),
    BeforeValidator(_by_name),
]


class TableConfig(Settings):
    """An embedding table: num_rows vectors of dim numbers, looked up by keys 0 <= key < num_rows.

    Args:
        name: unique in its collection.
        num_rows, dim: its shape.
        dtype: of the rows. Those of 16 bits take half the memory and traffic; updates round them stochastically.
            Optimizer state is float32.
        init: initial values; the name of a kind ("uniform", "normal", "xavier", "zero") or settings of one. They are a
            function of seed, name and key (`viviane.ops.hash_table.initial_rows`), the same on every device.
        out_of_range: what a key outside 0 <= key < num_rows does:
            "raise"    KeyRangeError that names feature, table, key and row of the batch;
            "default"  the row `default_id`, or zeros if that is None; it counts in a mean;
            "hash"     it is mapped into the table by `viviane.embedding.hash_keys`; keys in range keep their row;
            "ignore"   it is left out: zeros for one id, not counted in a mean, masked in a concat.
        default_id: the row that "default" reads and trains, such as the schema's id of unknown values.
        padding_id: an id that means "nothing here": its row is zero and stays zero, and it never counts in
            pooling. None: every id is ordinary.
        trainable: False keeps the rows as they are, without optimizer state.
        optimizer: this table's own rule; None takes the collection's.

    Example:
        >>> TableConfig(name="item", num_rows=1000, dim=16, init="normal").init.std
        0.01
    """

    name: str = Field(min_length=1)
    num_rows: int = Field(ge=1)
    dim: int = Field(ge=1)
    dtype: RowType = "float32"
    init: InitSettings = UniformInit()
    out_of_range: OutOfRange = "raise"
    default_id: int | None = Field(default=None, ge=0)
    padding_id: int | None = Field(default=None, ge=0)
    trainable: bool = True
    optimizer: OptimizerSettings | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The rows' type."""
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[self.dtype]

    @model_validator(mode="after")
    def _check(self) -> TableConfig:
        for field in ("default_id", "padding_id"):
            value = getattr(self, field)
            if value is not None and value >= self.num_rows:
                raise ValueError(f"table {self.name!r}: {field} {value} is not below num_rows {self.num_rows}")
        if self.default_id is not None and self.out_of_range != "default":
            raise ValueError(f"table {self.name!r}: default_id needs out_of_range='default'")
        if self.out_of_range == "hash" and self.num_rows == 1 and self.padding_id is not None:
            raise ValueError(f"table {self.name!r}: no row is left to hash into beside the padding row")
        return self


class FeatureConfig(Settings):
    """A feature: whose keys look up which table, and how the vectors of one row of the batch combine.

    Args:
        name: the column of the batch; unique in its collection.
        table: name of its table; several features may share one.
        combiner: "sum"; "mean", weighted where the bag has weights (sum of w x / sum of w); "concat", the
            vectors side by side in order, zeros after the last. A feature with one id a row gives its vector.
        max_length: number of places of a "concat"; a longer bag is an error. None takes 1.

    Example:
        >>> FeatureConfig(name="clicked", table="item", combiner="mean").max_length is None
        True
    """

    name: str = Field(min_length=1)
    table: str = Field(min_length=1)
    combiner: Combiner = "sum"
    max_length: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> FeatureConfig:
        if self.max_length is not None and self.combiner != "concat":
            raise ValueError(f"feature {self.name!r}: max_length needs combiner='concat'")
        return self

    @property
    def num_places(self) -> int:
        """Vectors that a row of the batch gives: max_length of a "concat", else 1."""
        return (self.max_length or 1) if self.combiner == "concat" else 1
