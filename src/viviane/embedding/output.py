"""What a collection returns: one matrix, and views of it by feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from viviane.core.errors import ConfigError, suggest
from viviane.embedding.buffers import WideRows


@dataclass(frozen=True)
class OutputColumns:
    """The columns of the output that a feature fills: start to start + num_places * dim."""

    start: int
    dim: int
    num_places: int
    is_concat: bool

    @property
    def stop(self) -> int:
        """The column after its last."""
        return self.start + self.num_places * self.dim


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vectors of a batch.

    Args:
        flat: all features side by side in the collection's order, (B, sum of widths); contiguous without `wide`.
        places: the columns of each feature.
        masks: (B, L), bool, of "concat" features: which places hold a vector.
        wide: the rows that `flat` is columns of, where the collection has margins.

    Example:
        >>> import torch
        >>> columns = {"a": OutputColumns(0, 1, 1, False), "b": OutputColumns(1, 2, 1, False)}
        >>> out = EmbeddingOutput(torch.eye(3), columns)
        >>> out.keys(), out.length_per_key(), out["b"].tolist()
        (['a', 'b'], [1, 2], [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    """

    flat: Tensor
    places: Mapping[str, OutputColumns]
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    wide: WideRows | None = None

    @property
    def stacked(self) -> Tensor:
        """A view (B, S, D) of all S features.

        Raises:
            ConfigError: features differ in width, or one of them is a "concat".
        """
        dims = {place.dim for place in self.places.values()}
        if len(dims) != 1 or any(place.is_concat for place in self.places.values()):
            widths = ", ".join(f"{name} {place.stop - place.start}" for name, place in self.places.items())
            raise ConfigError("features of different widths cannot be stacked", value=widths, fix="use .flat")
        return self.flat.view(self.flat.shape[0], len(self.places), dims.pop())

    def __getitem__(self, name: str) -> Tensor:
        """Return a feature's view: (B, D), or (B, L, D) of a "concat"."""
        place = self._place(name)
        part = self.flat[:, place.start : place.stop]
        return part.view(-1, place.num_places, place.dim) if place.is_concat else part

    def mask(self, name: str) -> Tensor:
        """Return which places of a "concat" feature hold a vector, (B, L), bool."""
        if not self._place(name).is_concat:
            raise ConfigError("only features with combiner 'concat' have a mask", value=name)
        return self.masks[name]

    # The names of a KeyedTensor of TorchRec, so that code written for one works on.

    def keys(self) -> list[str]:
        """Return the features in order."""
        return list(self.places)

    def values(self) -> Tensor:
        """Return `flat`: all features side by side."""
        return self.flat

    def to_dict(self) -> dict[str, Tensor]:
        """Return each feature's view by its name."""
        return {name: self[name] for name in self.places}

    def length_per_key(self) -> list[int]:
        """Return the columns that each feature takes."""
        return [place.stop - place.start for place in self.places.values()]

    def offset_per_key(self) -> list[int]:
        """Return the column where each feature begins, and the number of all columns at the end."""
        return [0, *(place.stop for place in self.places.values())]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def _place(self, name: str) -> OutputColumns:
        try:
            return self.places[name]
        except KeyError:
            raise ConfigError("no such feature in the output", value=name, fix=suggest(name, self.places)) from None
