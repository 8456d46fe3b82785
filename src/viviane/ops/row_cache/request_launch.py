"""The launch of a request's lookup, prepared once for each form of request and output, then recorded.

A lookup takes some tens of microseconds, in which a processor with cold caches runs little of Python and of CUDA: so
whatever depends on the form alone, and Triton's look at each argument, is done at the first lookup of a form. A lookup
that comes again with the same memory for keys and rows is a CUDA graph, started by one call of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.ops.cuda_driver import RecordedLaunch, attach
from viviane.ops.row_cache.gpu_kernels import find_request_kernel, keys_a_program
from viviane.ops.row_cache.request import LookupRequest
from viviane.ops.triton_parts.launch import ceil_div, find_columns, on_device, power_of_two

_NUM_WARPS: Final = 4
_MOST_FORMS: Final = 512
_MOST_RECORDED: Final = 64  # of each request's memory; a graph takes some 10 KB


class _Form(NamedTuple):
    """What lookups of one form share; tensors and numbers are in the order of the kernel's arguments."""

    run: Callable[..., None]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    constants: tuple[int, ...]


class RequestLaunch:
    """Launches `find_request_kernel` over one cache.

    Triton compiles a kernel for the types of its arguments, and for which pointers and numbers 16 divides: the form
    names all of that. The first lookup of a form is Triton's own launch; later ones run the kernel that it compiled,
    with addresses for tensors. Under the interpreter every launch is Triton's own.

    Args:
        index: lines, records of places, and their rows.
        words: of a row, 4 bytes each.
    """

    def __init__(self, index: Sequence[Tensor], words: int) -> None:
        self._index, self._words, self._device = tuple(index), words, index[0].device
        self._forms: dict[Hashable, _Form] = {}

    def __call__(
        self, request: LookupRequest, out: Tensor, columns: Sequence[int], tables: Sequence[int], now: int,
        stream: int | None,
    ) -> None:  # fmt: skip
        """Launch a lookup on the current stream of the cache's device.

        Args:
            request, out, columns, tables: see `DeviceRowCache.find_for`.
            now: the time of use.
            stream: the current stream's handle; None under the interpreter.

        Raises:
            ConfigError: the output has another form than the request and its columns need.
        """
        request.set_time(now)
        address = out.data_ptr()
        key = address, out.shape, out.stride(), out.dtype, request.shape, request.skips, tuple(columns), tuple(tables)
        recorded = request.recorded.get(key)
        if recorded is not None and stream is not None:
            attach(self._device)
            recorded.start(stream)
            return
        form_key = address % 16, out.device, *key[1:]
        form = self._forms.get(form_key)
        with on_device(self._index[0]):
            if form is None or stream is None:
                self._launch_first(form_key, request, out, tuple(columns), tuple(tables))
            else:
                _launch_again(form, key, request, address, stream)

    def _launch_first(
        self, key: Hashable, request: LookupRequest, out: Tensor, columns: tuple[int, ...], tables: tuple[int, ...]
    ) -> None:
        """Launch by Triton, and keep what later lookups of this form need."""
        features, rows = request.shape
        _check_features(columns, tables, features)
        _check_output(out, rows, max(columns) + self._words, self._device)
        at = find_columns(columns, out.shape[1], out.device)
        block = keys_a_program(self._words)
        programs = ceil_div(features * rows, block)
        numbers = features * rows, rows, len(self._index[0]), out.stride(0), at.first, at.step
        constants = {"aligned": at.aligned, "words": self._words, "width": power_of_two(self._words), "block": block}
        given = at.places, torch.tensor(tables, dtype=torch.int32).to(self._device), *self._index
        compiled = find_request_kernel[(programs,)](
            *request.tensors(), *given, out, *numbers, **constants, num_warps=_NUM_WARPS
        )
        if compiled is None:
            return
        if len(self._forms) >= _MOST_FORMS:  # sizes of requests vary; a form is found again within a millisecond
            self._forms.clear()
        self._forms[key] = _Form(compiled[(programs, 1, 1)], given, numbers, tuple(constants.values()))


def _launch_again(form: _Form, key: Hashable, request: LookupRequest, address: int, stream: int) -> None:
    """Launch the compiled kernel; the second time with the same memory, record it as a graph."""
    addresses = [None if one is None else one.data_ptr() for one in (*request.tensors(), *form.tensors)]
    launch = partial(form.run, *addresses, address, *form.numbers, *form.constants)
    if key not in request.recorded:
        if len(request.recorded) >= _MOST_RECORDED:
            request.recorded.clear()
        request.recorded[key] = None
        launch(stream=stream)
        return
    recorded = request.recorded[key] = RecordedLaunch(lambda handle: launch(stream=handle), form.tensors)
    recorded.start(stream)


def _check_features(columns: tuple[int, ...], tables: tuple[int, ...], features: int) -> None:
    if len(columns) != features or min(columns) < 0:
        raise ConfigError("columns are not those of the request", value=columns, allowed=f"{features} of 0 and above")
    if len(tables) != features:
        raise ConfigError("tables are not those of the request", value=tables, allowed=f"{features} numbers")


def _check_output(out: Tensor, rows: int, width: int, device: torch.device) -> None:
    is_right = out.element_size() == 4 and out.dim() == 2 and len(out) == rows and out.shape[1] >= width
    if not is_right or out.stride(1) != 1 or out.device != device:
        raise ConfigError(
            "the output has another form", value=f"{out.dtype} {tuple(out.shape)} on {out.device}",
            allowed=f"4-byte numbers ({rows}, {width} or more) on {device}",
        )  # fmt: skip
