"""Torch's global switches during a run, put back afterwards; and Ctrl-C as a request, not a blow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Final

import torch

from viviane.config import Solver
from viviane.core.logging import get_logger

_log = get_logger("training")
_STDERR: Final = 2
_LAST_WORDS_S: Final = 10.0  # after that the error is history


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

    Where several processes train, who started them ends all as soon as one has died. One that is ending with an error
    then, and is told to end, says the error first.

    Args:
        rank, num_processes: this process, and how many train together.
    """

    def __init__(self, rank: int = 0, num_processes: int = 1) -> None:
        self.asked = False
        self._rank, self._num_processes = rank, num_processes
        self._last_words: str | None = None
        self._ended = 0.0

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
        except BaseException as error:
            if self._num_processes > 1 and _is_default(before[signal.SIGTERM]):
                self._last_words, self._ended = str(error), monotonic()
                before[signal.SIGTERM] = self._on_signal_at_the_end
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first, self.asked = not self.asked, True
        if is_first and self._rank == 0:  # one says it for all
            _log.warning("interrupted: ending after this step; press Ctrl-C again to stop at once")

    def _on_signal_at_the_end(self, number: int, frame: FrameType | None) -> None:
        """Die of the signal, but not before the error is said."""
        if monotonic() - self._ended < _LAST_WORDS_S:
            # Not to sys.stderr: while torch puts the rank before an error's lines, that is a buffer.
            os.write(_STDERR, f"error: {self._last_words}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _is_default(handler: object) -> bool:
    """Whether a signal kills: at once, or as an earlier run left it."""
    return handler == signal.SIG_DFL or getattr(handler, "__func__", None) is Interrupt._on_signal_at_the_end
