"""Caches whose slots lie on a "device" that is another part of host memory, with streams that take their time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from viviane.store.streams import Moment, StreamName, ThreadStreams


class SlowStreams(ThreadStreams):
    """Streams whose jobs begin late and by chance, so that work that no moment orders meets in every order.

    Args:
        seed: of the delays.
        longest: seconds.
        maps_memory: whether the "device" plans slots and moves rows itself.
    """

    def __init__(self, seed: int = 0, longest: float = 0.002, maps_memory: bool = False) -> None:
        super().__init__()
        self.maps_memory = maps_memory
        self._chance, self._longest = random.Random(seed), longest
        self.num_jobs = 0

    def issue(self, stream: StreamName, after: Sequence[Moment], work: Callable[[], None]) -> Moment:
        self.num_jobs += 1
        delay = self._chance.random() * self._longest if self._chance.random() < 0.5 else 0.0

        def late() -> None:
            time.sleep(delay)
            work()

        return super().issue(stream, after, late)


def use_staged(
    monkeypatch: pytest.MonkeyPatch, *, piece_bytes: int = 200, longest: float = 0.002, maps_memory: bool = False
) -> list[Any]:
    """Let collections with a cache move rows as on a GPU; return the streams that they make.

    Args:
        piece_bytes: that threads move at a time.
        longest: seconds that a stream waits before a job.
        maps_memory: the device moves the rows itself, instead of threads.
    """
    made: list[Any] = []

    def streams(device: torch.device) -> SlowStreams:
        made.append(SlowStreams(len(made), longest, maps_memory))
        return made[-1]

    monkeypatch.setattr("viviane.embedding.construction.transfer_streams", streams)
    monkeypatch.setattr("viviane.embedding.staged_moves.PIECE_BYTES", piece_bytes)
    return made
