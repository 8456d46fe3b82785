"""Streams of copies: which there are, and that caches share them."""

from collections.abc import Iterator

import pytest
import torch

from viviane.store import streams


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices for which streams are made."""
    found: list[torch.device] = []

    def make(device: torch.device, priority: int) -> object:
        found.append(device)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    streams._streams_of.cache_clear()
    yield found
    streams._streams_of.cache_clear()


def test_all_caches_of_a_gpu_share_two_streams(made: list[torch.device]) -> None:
    # torch hands out 32 streams in turn: those of the seventeenth pair would be others', whose memory is used again.
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(20):
        streams.DeviceStreams(first)
    assert made == [first] * 2
    streams.DeviceStreams(second)
    assert made == [first] * 2 + [second] * 2
