"""Conditions on a column: which rows to keep, which of them count."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from viviane.config.base import Settings


class Filter(Settings):
    """Keep rows whose column compares so; others are counted and left out. A missing value satisfies only "missing"."""

    column: str
    keep: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in", "present", "missing"]
    value: float | str | tuple[float | str, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Filter:
        many, none = self.keep in ("in", "not in"), self.keep in ("present", "missing")
        if none != (self.value is None) or many != isinstance(self.value, tuple):
            raise ValueError(f"filter {self.keep!r} takes {'no value' if none else 'a list' if many else 'one value'}")
        return self
