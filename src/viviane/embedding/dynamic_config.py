"""Settings of tables whose keys are not known in advance."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BeforeValidator, Field, model_validator

from viviane.config import OptimizerSettings
from viviane.config.base import Settings
from viviane.embedding.config import InitSettings, TableConfig, UniformInit
from viviane.embedding.initializers import Law, law_of

Eviction = Literal["lru", "lfu", "epoch_lru", "epoch_lfu", "custom"]


class CountAdmission(Settings):
    """A key gets a row when it was seen `count` times, counted exactly.

    Of the keys that wait, the `max_pending` that were seen last are remembered, 40 bytes each.
    """

    type: Literal["count"] = "count"
    count: int = Field(ge=2)
    max_pending: int = Field(default=1_000_000, ge=1)


class ProbabilityAdmission(Settings):
    """A key gets a row with a probability each time a batch has it."""

    type: Literal["probability"] = "probability"
    probability: float = Field(gt=0, lt=1)


class FilterAdmission(Settings):
    """A key gets a row when it was seen about `count` times, counted in fixed memory.

    A count-min sketch (Cormode and Muthukrishnan 2005) of `depth` rows with `width` counters, 4 bytes each: a key
    that shares all its counters with others comes in early, none comes in late.
    """

    type: Literal["filter"] = "filter"
    count: int = Field(ge=2)
    width: int = Field(default=1 << 20, ge=1)
    depth: int = Field(default=4, ge=1, le=16)


def _by_name(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


AdmissionSettings = Annotated[
    CountAdmission | ProbabilityAdmission | FilterAdmission, Field(discriminator="type"), BeforeValidator(_by_name)
]


class DynamicOptions(Settings):
    """How the rows of a dynamic table come and go.

    Args:
        initial_capacity: keys that fit before the table grows for the first time.
        max_capacity: most keys at a time; None: as many as memory holds.
        when_full: "raise" or "evict" when max_capacity keys are there and one more comes.
        eviction: which key is evicted:
            "lru"         the one used longest ago
            "lfu"         the one used least often
            "epoch_lru"   the one used longest ago; its score contains the epoch
            "epoch_lfu"   of the earliest epoch of last use, the one used least often
            "custom"      the one with the smallest score that you gave
            Among equals the smallest row goes. Keys of batches that wait for an update never go.
        admission: which keys get a row in training; None: all, at once.
        absent: what a key without a row reads: "zero", or the "initial" values that it would begin with.
        memory: where the rows and state of a table on a GPU lie: "device" in the GPU's memory, "host" in pinned memory
            of the host, which kernels read and write over the bus, "split": the first `device_rows` rows in the GPU's
            memory, the others in the host's. Keys are in the GPU's memory always. On the CPU, "file": rows and state
            lie in working files of `Solver.embedding_folder`, of which the system keeps the pages in use in memory;
            keys are in memory. Numbers and checkpoints are the same.
        device_rows: for "split", rounded up to whole pages of 2 MiB.
    """

    initial_capacity: int = Field(default=1024, ge=1)
    max_capacity: int | None = Field(default=None, ge=1)
    when_full: Literal["evict", "raise"] = "raise"
    eviction: Eviction = "lru"
    admission: AdmissionSettings | None = None
    absent: Literal["zero", "initial"] = "zero"
    memory: Literal["device", "file", "host", "split"] = "device"
    device_rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_capacity(self) -> DynamicOptions:
        if self.max_capacity is None and self.when_full == "evict":
            raise ValueError("when_full='evict' needs a max_capacity")
        if self.max_capacity is not None and self.initial_capacity > self.max_capacity:
            if "initial_capacity" in self.model_fields_set:
                raise ValueError(f"initial_capacity is above max_capacity {self.max_capacity}")
            object.__setattr__(self, "initial_capacity", self.max_capacity)
        if (self.memory == "split") != (self.device_rows is not None):
            raise ValueError("memory='split' and device_rows belong together")
        return self


class DynamicTableConfig(DynamicOptions):
    """An embedding table keyed by any whole number of 64 bits, whose rows come with their keys.

    Args:
        name: unique in its collection.
        dim: numbers a row.
        dtype: of the rows; optimizer state is float32.
        init: initial values, a function of seed, key and column (`viviane.ops.hash_table.initial_rows`). Where a
            law of `TableConfig` asks for num_rows, it is max_capacity, or initial_capacity where that is None.
        padding_id: a key that means "nothing here": never stored, reads zero. None: every key is ordinary.
        trainable: False keeps the rows as they are, without optimizer state.
        optimizer: this table's own rule; None takes the collection's.
        initial_capacity, max_capacity, when_full, eviction, admission, absent, memory, device_rows: see
            `DynamicOptions`.

    Example:
        >>> DynamicTableConfig(name="user", dim=16, max_capacity=10**6, when_full="evict").eviction
        'lru'
    """

    name: str = Field(min_length=1)
    dim: int = Field(ge=1)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    init: InitSettings = UniformInit()
    padding_id: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    trainable: bool = True
    optimizer: OptimizerSettings | None = None

    @model_validator(mode="after")
    def _check_rule(self) -> DynamicTableConfig:
        rule = self.optimizer
        if rule is not None and getattr(rule, "update", "local") == "global":
            raise ValueError(
                f"table {self.name!r}: update='global' would move rows that have no key; use 'local', "
                "or Adam's 'lazy_global'"
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """The rows' type."""
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[self.dtype]

    @property
    def law(self) -> Law:
        """The law of initial values and its two numbers, as `viviane.ops.hash_table.initial_rows` takes them."""
        return law_of(self.init, self.max_capacity or self.initial_capacity, self.dim)


AnyTable: TypeAlias = TableConfig | DynamicTableConfig
"""Settings of a table of either kind."""
