"""Dense gradients summed over processes in a few flat buckets, while backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from viviane.parallel import Group

_BUCKET_BYTES = 4 << 20


class _Bucket:
    """Gradients of some parameters in one flat tensor: numbers, then a 1 for each gradient that is there.

    Args:
        parameters: of one type and device.
        extra: numbers at the end that are summed along with them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], extra: int) -> None:
        self.parameters = list(parameters)
        sizes = [one.numel() for one in parameters]
        like = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes) + extra, dtype=like.dtype, device=like.device)
        parts = torch.split(self.flat, [*sizes, len(sizes), extra])
        self.views = [part.view(one.shape) for part, one in zip(parts, parameters, strict=False)]
        self.numbers = self.flat[: sum(sizes)]
        self.present, self.extra = parts[-2], parts[-1]
        self.filled: set[int] = set()
        self.wait: Callable[[], None] | None = None

    def fill(self, index: int) -> None:
        """Take over a gradient that backward has finished."""
        parameter = self.parameters[index]
        assert parameter.grad is not None
        self.views[index].copy_(parameter.grad)
        parameter.grad = self.views[index]
        self.filled.add(index)

    def complete(self) -> None:
        """Put zeros where this process has no gradient."""
        missing = [i for i in range(len(self.parameters)) if i not in self.filled]
        self.present.fill_(1.0)
        for i in missing:
            self.views[i].zero_()
            self.present[i] = 0.0

    def hand_out(self) -> None:
        """Give parameters that have a gradient on another process alone the sum; those without any stay without."""
        for i, parameter in enumerate(self.parameters):
            if i not in self.filled and float(self.present[i]) > 0:
                parameter.grad = self.views[i]
        self.filled.clear()


class DenseExchange:
    """Sums gradients of parameters over a group.

    A bucket starts over the wire when backward has finished all its gradients, in the order of the buckets on every
    process; the last parameters, whose gradients come first, are in the first one.

    Args:
        parameters: dense ones.
        group: the processes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.group = group
        group.open_beside()
        self.buckets: list[_Bucket] = []
        waiting: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            alike = waiting and (parameter.dtype, parameter.device) == (waiting[0].dtype, waiting[0].device)
            if waiting and (not alike or sum(p.nbytes for p in waiting) >= _BUCKET_BYTES):
                self._add(waiting)
                waiting = []
            waiting.append(parameter)
        if waiting:
            self._add(waiting)
        self._place = {id(p): (b, i) for b, one in enumerate(self.buckets) for i, p in enumerate(one.parameters)}
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._is_on = False
        self._next = 0
        self._finite = torch.zeros(())
        weakref.finalize(self, _remove, self._handles)

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        self.buckets.append(_Bucket(parameters, extra=0 if self.buckets else 1))

    def begin(self, loss: Tensor) -> None:
        """Prepare for a backward pass.

        Args:
            loss: this process's share, 0-dim; summed along.
        """
        self._hook()
        self._is_on, self._next = True, 0
        self._finite = torch.zeros((), device=loss.device)
        self._loss = loss.detach().clone()
        if self.buckets:
            self.buckets[0].extra[0] = self._loss

    def _hook(self) -> None:
        """Hook parameters that are trained and were not so far: frozen ones take no hook."""
        me = weakref.ref(self)

        def ready(parameter: Tensor) -> None:
            exchange = me()
            if exchange is not None and exchange._is_on:
                exchange._take(parameter)

        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked.add(id(parameter))
                    handle: Any = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)

    def _take(self, parameter: Tensor) -> None:
        number, index = self._place[id(parameter)]
        self.buckets[number].fill(index)
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.filled) < len(bucket.parameters):
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.complete()
        self._finite = self._finite + bucket.numbers.sum()
        bucket.wait = self.group.start_all_reduce(bucket.flat)
        self._next += 1

    def finish(self) -> tuple[Tensor, Tensor]:
        """Wait for all sums; returns the loss of all processes, and a number that is finite where gradients here were.

        Both 0-dim.
        """
        self._is_on = False
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        for bucket in self.buckets:
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None
        loss = self.buckets[0].extra[0].clone() if self.buckets else self.group.all_reduce(self._loss)
        for bucket in self.buckets:
            if len(bucket.filled) < len(bucket.parameters):
                bucket.hand_out()
            bucket.filled.clear()
        return loss, self._finite

    def drop(self) -> None:
        """End a pass that failed: nothing is summed any more."""
        self._is_on = False
        for bucket in self.buckets:
            bucket.filled.clear()
            bucket.wait = None


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
