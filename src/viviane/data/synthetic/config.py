"""Settings of synthetic data."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.schema import RESERVED, Schema

MAX_CARDINALITY = 2**31 - 1 - RESERVED.first


class SyntheticBag(Settings):
    """A multi-hot or sequence column.

    Args:
        name: the Parquet column; weights are in `<name>_weight`.
        cardinality: number of distinct values.
        hotness: lengths are uniform between the two numbers, inclusive; 0 allows empty bags.
        kind: "multi_hot" or "sequence".
        weighted: give each id of a multi-hot column a weight in (0.5, 1.5).
    """

    name: str = Field(min_length=1)
    cardinality: int = Field(default=1000, ge=1, le=MAX_CARDINALITY)
    hotness: tuple[int, int] = (0, 5)
    kind: Literal["multi_hot", "sequence"] = "multi_hot"
    weighted: bool = False

    @model_validator(mode="after")
    def _check(self) -> SyntheticBag:
        low, high = self.hotness
        if not 0 <= low <= high or high < 1:
            raise ValueError(
                f"hotness of {self.name!r} must be two ascending numbers, the second at least 1: {low}, {high}"
            )
        if self.weighted and self.kind == "sequence":
            raise ValueError(f"the sequence column {self.name!r} takes no weights; make it multi_hot")
        return self

    @property
    def weights(self) -> str | None:
        """Name of the column of weights, if any."""
        return f"{self.name}_weight" if self.weighted else None


class SyntheticConfig(Settings):
    """Columns, frequencies and the planted model of synthetic click data.

    Args:
        rows: number of rows.
        num_dense: dense columns I1, I2, ...: logarithms of heavy-tailed counts.
        num_categorical: one-hot columns C1, C2, ...; None: the number of cardinalities, or 26 without them.
        cardinalities: distinct values of each one-hot column.
        cardinality_range: without cardinalities, they are spaced logarithmically over this range.
        alpha: exponent of the power law of key frequencies, p(rank) ~ rank^-alpha; 0 is uniform.
        bags: multi-hot and sequence columns.
        click_rate: fraction of positive labels.
        signal: standard deviation of the planted logit; with 0 labels are pure noise (best AUC 0.5).
        missing_dense, missing_categorical: fraction of missing values.
        seed: seed of the planted model and the rows.

    Example:
        >>> SyntheticConfig(num_categorical=3, cardinality_range=(10, 1000)).sizes
        (10, 100, 1000)
    """

    rows: int = Field(default=1_000_000, ge=0)
    num_dense: int = Field(default=13, ge=0, le=1_000_000)
    num_categorical: int | None = Field(default=None, ge=0, le=1_000_000)
    cardinalities: tuple[int, ...] | None = None
    cardinality_range: tuple[int, int] = (4, 100_000)
    alpha: float = Field(default=1.1, ge=0, le=10)
    bags: tuple[SyntheticBag, ...] = ()
    click_rate: float = Field(default=0.25, gt=0, lt=1)
    signal: float = Field(default=1.5, ge=0, le=20)
    missing_dense: float = Field(default=0.05, ge=0, le=1)
    missing_categorical: float = Field(default=0.02, ge=0, le=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> SyntheticConfig:
        given = self.cardinalities
        if given is not None and self.num_categorical not in (None, len(given)):
            raise ValueError(f"{len(given)} cardinalities for {self.num_categorical} categorical columns")
        low, high = self.cardinality_range
        bounds = (low, high) if given is None else given
        if any(not 1 <= size <= MAX_CARDINALITY for size in bounds) or low > high:
            raise ValueError(f"cardinalities must be between 1 and {MAX_CARDINALITY}, ranges ascending")
        if self.num_dense + len(self.sizes) + len(self.bags) == 0:
            raise ValueError("at least one dense or categorical column is needed")
        self.to_schema()  # refuses a bag whose name is taken
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Distinct values of each one-hot column."""
        if self.cardinalities is not None:
            return self.cardinalities
        count = 26 if self.num_categorical is None else self.num_categorical
        low, high = self.cardinality_range
        return tuple(round(float(size)) for size in np.geomspace(low, high, count))

    def to_schema(self) -> Schema:
        """Return the schema of the Parquet files."""
        one_hot = [{"name": f"C{i}", "num_ids": size + RESERVED.first} for i, size in enumerate(self.sizes, 1)]
        bags = [
            {
                "name": bag.name,
                "num_ids": bag.cardinality + RESERVED.first,
                "kind": bag.kind,
                "max_length": bag.hotness[1],
                "hotness": bag.hotness[0] or None if bag.hotness[0] == bag.hotness[1] else None,
                "weights": bag.weights,
            }
            for bag in self.bags
        ]
        return Schema.from_dict(
            {
                "labels": [{"name": "label"}],
                "dense": [{"name": f"I{i}"} for i in range(1, self.num_dense + 1)],
                "categorical": one_hot + bags,
            }
        )
