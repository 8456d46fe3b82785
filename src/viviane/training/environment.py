"""Torch's global switches during a run, put back afterwards; and Ctrl-C as a request, not a blow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from viviane.config import Solver
from viviane.core.logging import get_logger

_log = get_logger("training")


@contextmanager
def torch_switches(solver: Solver, device: torch.device) -> Iterator[None]:
    """Apply the solver's `deterministic` and `num_threads`.

    Deterministic mode makes torch refuse the GPU operations that have no reproducible form; on the CPU it changes
    no result of ours. It does not fill fresh memory with NaN here, as torch does by default, since that costs time.
    """
    threads = torch.get_num_threads()
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    if solver.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    if solver.num_threads is not None:
        torch.set_num_threads(solver.num_threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        if solver.num_threads is not None:
            torch.set_num_threads(threads)


class Interrupt:
    """Whether Ctrl-C was pressed, or the process told to end (SIGTERM).

    The first time asks training to end after the step; a second Ctrl-C kills.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        """Catch the signals in the main thread; elsewhere Python allows no handler, and nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        _log.warning("interrupted: finishing this step and saving; press Ctrl-C again to stop at once")
