"""Operators on numbers, each one a formula over an ibis expression, so that any engine can run it.

x is a column of numbers, some of which may be missing; operators keep missing values unless documented otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from viviane.config.base import Settings

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


class Log(_Operator):
    """ln(1 + max(x, 0)): negative numbers, such as Criteo's -1 and -2, become 0."""

    type: Literal["log"] = "log"

    def expression(self, x: Any, state: State) -> Any:
        """The logarithm."""
        return (x.clip(lower=0.0) + 1.0).ln()


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


class Standardize(_Operator):
    """(x - mean) / std over the training data (population std); a constant column becomes 0."""

    type: Literal["standardize"] = "standardize"
    learns: ClassVar[tuple[str, ...]] = ("mean", "std")

    def expression(self, x: Any, state: State) -> Any:
        """The standard score."""
        return (x - state["mean"]) / (state["std"] or 1.0)


class MinMax(_Operator):
    """(x - min) / (max - min) over the training data, so 0..1 there; values outside later are clipped to it."""

    type: Literal["min_max"] = "min_max"
    learns: ClassVar[tuple[str, ...]] = ("min", "max")

    def expression(self, x: Any, state: State) -> Any:
        """The scaled value; 0 for a constant column."""
        low, span = state["min"], (state["max"] - state["min"]) or 1.0
        return ((x - low) / span).clip(lower=0.0, upper=1.0)


class Threshold(_Operator):
    """1 where x >= at, else 0: turns a rating into a binary label."""

    type: Literal["threshold"] = "threshold"
    at: float

    def expression(self, x: Any, state: State) -> Any:
        """0.0 or 1.0."""
        return (x >= self.at).cast("float64")


Operator: TypeAlias = Annotated[
    Fill | Clip | Log | LogSquare | Standardize | MinMax | Threshold, Field(discriminator="type")
]


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
