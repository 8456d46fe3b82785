"""What every exchange offers to a sharded collection: input_dist of a batch's ids, and a lookup of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.embedding.batch_keys import Keys
from viviane.embedding.buffers import WideRows
from viviane.embedding.output import OutputColumns


class Exchange(Protocol):
    """The exchange of one kind of batch, built once and kept."""

    def input_dist(self, keys: Keys, *, ahead: bool = False) -> DistributedInput:
        """Resolve the keys of the local batch and send ids to the ranks that hold their rows. Collective.

        Args:
            keys: of the local batch.
            ahead: whether it is captured in a graph of its own, before the step of the batch.
        """


@dataclass(kw_only=True)
class DistributedInput(ABC):
    """The result of input_dist: what this rank looks up for all ranks, and the rest of its local batch.

    Args:
        masks: of "concat" features.
        ready: an event on the stream that computed it; None: the current stream.
        wide: after `lookup`, the wider rows that the output is columns of, if it has margins.
    """

    joins_replicas: ClassVar[bool] = False
    """Whether grad_dist sums the gradients of replicated tables over the ranks; otherwise the step does."""

    masks: Mapping[str, Tensor]
    ready: torch.cuda.Event | None = None
    wide: WideRows | None = field(default=None, init=False)

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors that input_dist made."""

    def take(self, device: torch.device) -> None:
        """Let the current stream wait for the stream that computed it, and keep its memory for the current stream."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.ready)
        for one in self.tensors():
            one.record_stream(stream)
        self.ready = None

    def begin(self, *, training: bool) -> None:  # noqa: B027 - most have nothing to start
        """Start the lookup and output_dist, where shapes are static; otherwise `lookup` does everything."""

    @property
    def wide_in_flight(self) -> WideRows | None:
        """The wider rows that a lookup in flight writes columns of, if the output has margins."""
        return None

    @abstractmethod
    def lookup(self, *, training: bool) -> Tensor:
        """Return the output (B, W); in training its gradient updates the tables. Collective."""


def batch_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch of ids."""
    found = [batch.one_hot]
    for bag in batch.bags.values():
        found += [bag.values, bag.offsets] + ([] if bag.weights is None else [bag.weights])
    return found


def scaled(flat: Tensor, scales: Mapping[str, Tensor], places: Mapping[str, OutputColumns]) -> Tensor:
    """Multiply the vectors of "concat" features by their factors.

    Args:
        flat: (B, W).
        scales: for each such feature, (B, L).
        places: the output columns of every feature.
    """
    if not scales:
        return flat
    factors = torch.ones_like(flat)
    for name, scale in scales.items():
        place = places[name]
        factors[:, place.start : place.stop] = scale.repeat_interleave(place.dim, 1)
    return flat * factors
