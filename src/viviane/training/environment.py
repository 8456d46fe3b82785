"""Torch's global switches during a run, restored afterwards; and Ctrl-C as a request to stop after the step."""

from __future__ import annotations

import os
import signal
import sys
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
_LAST_ERROR_S: Final = 10.0  # seconds during which a signal prints the last error


@contextmanager
def torch_switches(solver: Solver, device: torch.device) -> Iterator[None]:
    """Apply the solver's `deterministic` and `num_threads`.

    In deterministic mode torch refuses GPU operations that have no deterministic implementation. On the CPU it changes
    no result of ours. Unlike torch's default, it does not fill new memory with NaN here, since that costs time.
    """
    threads = torch.get_num_threads()
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    if solver.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        _set_deterministic(True, False, device)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    if solver.num_threads is not None:
        torch.set_num_threads(solver.num_threads)
    try:
        yield
    finally:
        _set_deterministic(was_on, warned, device)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        if solver.num_threads is not None:
            torch.set_num_threads(threads)


def _set_deterministic(is_on: bool, warns: bool, device: torch.device) -> None:
    if device.type == "cpu" and "torch._dynamo" not in sys.modules:
        # `use_deterministic_algorithms` would load torch's compiler for its own switch: a second, and nothing compiles.
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if is_on else "default")
    else:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)


class Interrupt:
    """Whether Ctrl-C was pressed or the process received SIGTERM.

    The first signal requests training to end after the step; a second Ctrl-C kills the process.
    If several processes train, the launcher terminates all of them as soon as one has died. A process that is failing
    with an error when it receives the signal prints the error first.

    Args:
        rank, num_processes: rank of this process, and number of processes.
    """

    def __init__(self, rank: int = 0, num_processes: int = 1) -> None:
        self.asked = False
        self._rank, self._num_processes = rank, num_processes
        self._last_error: str | None = None
        self._ended = 0.0

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        """Catch the signals in the main thread; in other threads Python allows no handler, and this does nothing."""
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
                self._last_error, self._ended = str(error), monotonic()
                before[signal.SIGTERM] = self._on_signal_at_the_end
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first, self.asked = not self.asked, True
        if is_first and self._rank == 0:  # only rank 0 logs
            _log.warning("interrupted: ending after this step; press Ctrl-C again to stop at once")

    def _on_signal_at_the_end(self, number: int, frame: FrameType | None) -> None:
        """Print the last error, then die of the signal."""
        if monotonic() - self._ended < _LAST_ERROR_S:
            # Not to sys.stderr: while torch prefixes error lines with the rank, it is a buffer.
            os.write(_STDERR, f"error: {self._last_error}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _is_default(handler: object) -> bool:
    """Whether the handler kills the process: the default one, or one left by an earlier run."""
    return handler == signal.SIG_DFL or getattr(handler, "__func__", None) is Interrupt._on_signal_at_the_end
