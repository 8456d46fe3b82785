"""Seconds per stage of a run; reading the clock takes about 50 ns, so it is always on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

STAGES = ("data_wait", "forward", "backward", "update", "replay", "evaluate", "checkpoint")


class StageTimes:
    """Sums seconds by stage.

    On a GPU these are seconds of the host: a stage that only submits work looks short, and the stage that waits for
    the device includes its time.

    Example:
        >>> times = StageTimes({"forward": 1.0})
        >>> times.add("forward", 0.5)
        >>> times.seconds["forward"]
        1.5
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0) | dict(seconds or {})

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage."""
        self.seconds[stage] += seconds

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Time a block."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(stage, perf_counter() - start)
