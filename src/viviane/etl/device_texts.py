"""Text on a device: bytes, and where each text begins; compared and hashed eight bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from viviane.ops.key_rows import mix

_WORD: Final = 8
_STRIDE: Final = -7_046_029_254_386_353_131  # an odd number, 2^64 over the golden ratio


@dataclass(frozen=True)
class Texts:
    """N texts.

    Args:
        starts: (N,), int64: the byte at which each begins.
        lengths: (N,), int64: its bytes.
        data: one dimension, uint8; eight more bytes than the texts have, so that a word may be read anywhere.

    Example:
        >>> texts = Texts.of_arrow(pa.array(["pen", "", "pencil case"]), torch.device("cpu"))
        >>> texts.take(torch.tensor([2, 0])).to_arrow().to_pylist()
        ['pencil case', 'pen']
    """

    starts: Tensor
    lengths: Tensor
    data: Tensor

    @classmethod
    def of_arrow(cls, column: Any, device: torch.device) -> Self:
        """Copy an Arrow array of strings to a device; the content at missing ones is irrelevant."""
        _, offsets, data = column.buffers()
        count, first = len(column), column.offset
        ends = np.zeros(1, np.int64)
        if offsets is not None and count:
            ends = np.frombuffer(offsets, np.int32)[first : first + count + 1].astype(np.int64)
        num_bytes = int(ends[-1] - ends[0])
        copy = np.zeros(num_bytes + _WORD, np.uint8)
        if num_bytes:
            copy[:num_bytes] = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
        places = torch.from_numpy(ends - ends[0]).to(device)
        return cls(places[:-1], places.diff(), torch.from_numpy(copy).to(device))

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Self:
        """Put texts after one another."""
        ends = np.cumsum([0, *(len(part.data) - _WORD for part in parts)]).tolist()
        return cls(
            torch.cat([part.starts + end for part, end in zip(parts, ends, strict=False)]),
            torch.cat([part.lengths for part in parts]),
            torch.cat([*(part.data[:-_WORD] for part in parts), parts[0].data.new_zeros(_WORD)]),
        )

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, places: Tensor) -> Texts:
        """Return copies of some, (M,), with no other bytes."""
        lengths = self.lengths[places]
        ends = lengths.cumsum(0)
        starts = ends - lengths
        num_bytes = int(ends[-1]) if len(ends) else 0
        inside = torch.arange(num_bytes, device=self.data.device)
        data = self.data[inside + (self.starts[places] - starts).repeat_interleave(lengths)]
        return Texts(starts, lengths, torch.cat([data, data.new_zeros(_WORD)]))

    def to_arrow(self) -> Any:
        """Copy to the host, as an Arrow array of strings."""
        packed = self.take(torch.arange(len(self), device=self.data.device))
        offsets = torch.cat([packed.starts, packed.lengths.sum().view(1)]).cpu().numpy().tobytes()
        data = packed.data[:-_WORD].cpu().numpy().tobytes()
        column = pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(data))
        return column.cast(pa.string())

    def hashes(self, seed: int) -> Tensor:
        """Return 63 bits for each, (N,), int64: h = mix(length + seed g), then h = mix(h g + w) for each word w.

        g is 2^64 over the golden ratio, arithmetic is modulo 2^64, a last word that is not full has zeros at its end.
        """
        found = mix(self.lengths + (seed * _STRIDE) % 2**62)
        places = self.lengths.nonzero().squeeze(1)
        at = 0
        while len(places):
            found[places] = mix(found[places] * _STRIDE + self._words(places, at))
            at += _WORD
            places = places[self.lengths[places] > at]
        return found

    def equal(self, places: Tensor, others: Texts, other_places: Tensor) -> Tensor:
        """Compare text places[n] with text other_places[n] of others, byte by byte: (M,), bool."""
        lengths = self.lengths[places]
        same = lengths == others.lengths[other_places]
        left = (same & (lengths > 0)).nonzero().squeeze(1)
        at = 0
        while len(left):
            agree = self._words(places[left], at) == others._words(other_places[left], at)
            same[left[~agree]] = False
            at += _WORD
            left = left[agree & (lengths[left] > at)]
        return same

    def _words(self, places: Tensor, at: int) -> Tensor:
        """Eight bytes of each from byte `at` on, which must be there; bytes after its end count as zeros."""
        inside = torch.arange(_WORD, device=self.data.device)
        words = self.data[(self.starts[places] + at).unsqueeze(1) + inside].view(torch.int64).squeeze(1)
        return words & self._masks[(self.lengths[places] - at).clamp_(max=_WORD)]

    @cached_property
    def _masks(self) -> Tensor:
        """By the number of bytes that count, from 0 to 8."""
        masks = [(1 << (8 * count)) - 1 for count in range(_WORD)]
        return torch.tensor([*masks, -1], dtype=torch.int64, device=self.data.device)
