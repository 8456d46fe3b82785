"""Operators on numbers, each one a formula over an ibis expression, so that any engine can run it.

x is a column of numbers, some of which may be missing; operators keep missing values unless documented otherwise.
`column` is the same formula over an Arrow array of float64, with the bits of the engines: numbers that are in memory
need no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import pyarrow.compute as pc
from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.etl.arrays import scalar_of

_ALL_WHOLE: Final = 2.0**53  # float64 has no fractions from here on
State: TypeAlias = dict[str, float]
"""What an operator learned from training data, such as {"mean": 3.5, "std": 2.0}."""


class _Operator(Settings):
    """Base of the operators; `learns` names the statistics that fitting must supply."""

    learns: ClassVar[tuple[str, ...]] = ()

    def wanted(self) -> tuple[str, ...]:
        """Statistics of the training data that this operator needs: of mean, std, min, max, median."""
        return self.learns


class Fill(_Operator):
    """Replace missing values by a number, or by the training data's mean or (upper) median."""

    type: Literal["fill"] = "fill"
    value: float | Literal["mean", "median"] = 0.0

    def wanted(self) -> tuple[str, ...]:
        """The named statistic, or none."""
        return (self.value,) if isinstance(self.value, str) else ()

    def expression(self, x: Any, state: State) -> Any:
        """x where present, else the value."""
        return x.fill_null(state[self.value] if isinstance(self.value, str) else self.value)

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        value = state[self.value] if isinstance(self.value, str) else self.value
        return pc.fill_null(x, scalar_of(value)) if x.null_count else x


class Clip(_Operator):
    """min(max(x, min), max); either bound may be left out."""

    type: Literal["clip"] = "clip"
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Clip:
        if self.min is None and self.max is None:
            raise ValueError("clip needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"clip has min {self.min} above max {self.max}")
        return self

    def expression(self, x: Any, state: State) -> Any:
        """The clipped value."""
        return x.clip(lower=self.min, upper=self.max)

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        return _clipped(x, self.min, self.max)


class Log(_Operator):
    """ln(1 + max(x, 0)): negative numbers, such as Criteo's -1 and -2, become 0."""

    type: Literal["log"] = "log"

    def expression(self, x: Any, state: State) -> Any:
        """The logarithm."""
        return (x.clip(lower=0.0) + 1.0).ln()

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        return pc.ln(pc.add(_clipped(x, 0.0, None), scalar_of(1.0)))


class LogSquare(_Operator):
    """floor(ln(x)^2) where x > 2, else floor(x): the discretisation known from the Criteo contest.

    Meant in front of `categorify`. Small and large numbers share whole numbers (3 gives 1, as 1 does).
    """

    type: Literal["log_square"] = "log_square"

    def expression(self, x: Any, state: State) -> Any:
        """The discretised value, a whole number as float64."""
        import ibis

        root = x.clip(lower=2.0).ln()  # the logarithm is taken of every row: keep its argument positive
        large = (root * root).floor().cast("float64")
        small = x.clip(lower=-_ALL_WHOLE, upper=_ALL_WHOLE).floor().cast("float64")  # floor gives 64-bit integers
        return ibis.cases((x.isnull(), ibis.null("float64")), (x > 2.0, large), (x < -_ALL_WHOLE, x), else_=small)

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        root = pc.ln(_clipped(x, 2.0, None))
        small = pc.if_else(pc.less(x, scalar_of(-_ALL_WHOLE)), x, pc.floor(_clipped(x, -_ALL_WHOLE, _ALL_WHOLE)))
        return pc.if_else(pc.greater(x, scalar_of(2.0)), pc.floor(pc.multiply(root, root)), small)


class Standardize(_Operator):
    """(x - mean) / std over the training data (population std); a constant column becomes 0."""

    type: Literal["standardize"] = "standardize"
    learns: ClassVar[tuple[str, ...]] = ("mean", "std")

    def expression(self, x: Any, state: State) -> Any:
        """The standard score."""
        return (x - state["mean"]) / (state["std"] or 1.0)

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        return pc.divide(pc.subtract(x, scalar_of(state["mean"])), scalar_of(state["std"] or 1.0))


class MinMax(_Operator):
    """(x - min) / (max - min) over the training data, so 0..1 there; values outside later are clipped to it."""

    type: Literal["min_max"] = "min_max"
    learns: ClassVar[tuple[str, ...]] = ("min", "max")

    def expression(self, x: Any, state: State) -> Any:
        """The scaled value; 0 for a constant column."""
        low, span = state["min"], (state["max"] - state["min"]) or 1.0
        return ((x - low) / span).clip(lower=0.0, upper=1.0)

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        low, span = state["min"], (state["max"] - state["min"]) or 1.0
        return _clipped(pc.divide(pc.subtract(x, scalar_of(low)), scalar_of(span)), 0.0, 1.0)


class Threshold(_Operator):
    """1 where x >= at, else 0: turns a rating into a binary label."""

    type: Literal["threshold"] = "threshold"
    at: float

    def expression(self, x: Any, state: State) -> Any:
        """0.0 or 1.0."""
        return (x >= self.at).cast("float64")

    def column(self, x: Any, state: State) -> Any:
        """`expression` of an Arrow array."""
        return pc.greater_equal(x, scalar_of(self.at)).cast("float64")


Operator: TypeAlias = Annotated[
    Fill | Clip | Log | LogSquare | Standardize | MinMax | Threshold, Field(discriminator="type")
]


def _clipped(x: Any, low: float | None, high: float | None) -> Any:
    if low is not None:
        x = pc.max_element_wise(x, scalar_of(low), skip_nulls=False)
    return x if high is None else pc.min_element_wise(x, scalar_of(high), skip_nulls=False)


def chain_column(x: Any, operators: tuple[Operator, ...], states: dict[int, State]) -> Any:
    """Apply operators one after another to an Arrow array of numbers; see `chain`.

    Example:
        >>> import pyarrow as pa
        >>> chain_column(pa.array([7, None]), (Fill(value=2), Clip(max=5)), {}).to_pylist()
        [5.0, 2.0]
    """
    x = x.cast("float64", safe=False)
    for position, operator in enumerate(operators):
        x = operator.column(x, states.get(position, {}))
    return x


def chain(x: Any, operators: tuple[Operator, ...], states: dict[int, State]) -> Any:
    """Apply operators one after another to an ibis column; `states` by position holds what each learned.

    Example:
        >>> import ibis
        >>> column = ibis.table({"x": "float64"}, name="t").x
        >>> chain(column, (Fill(value=2), Log()), {}).type()
        Float64(nullable=True)
    """
    x = x.cast("float64")
    for position, operator in enumerate(operators):
        x = operator.expression(x, states.get(position, {}))
    return x
