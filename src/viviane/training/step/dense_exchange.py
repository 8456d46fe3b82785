"""All-reduce of dense gradients in flat buckets, overlapped with backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from viviane.core.errors import VivianeError
from viviane.core.ranges import timed_as
from viviane.ops.capture import URGENT, branch
from viviane.ops.copies import copy_each, copy_large
from viviane.ops.finished_gradients import telling_of_gradients
from viviane.parallel import Group
from viviane.parallel.flat_sums import FlatSums
from viviane.parallel.peers import ineligible_reason

_BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 8 << 20}  # on the wire; smaller buckets are far below the bandwidth of NCCL
_PEER_BUCKET_BYTES = 3 << 20
"""Over peer memory: four H200 take 3.23 ms for DLRM-DCNv2 at 32,768 rows where 6 MB take 3.27 and 12 MB 3.30."""
_LEAST_BUCKETS = 3  # for a small model: the last bucket starts after backward, so it should not hold all gradients
_SMALLEST_BUCKET = 1 << 20
_MATRIX = 2
_Place: TypeAlias = tuple[int, int]
"""Of a parameter: its bucket, and its number there."""
_ALIGNED = 8  # elements: a GPU thread can access each gradient in units of 16 bytes


NUM_SIGNALS = 1
"""Number of values summed with the loss in every step; the first is the number of ranks that were asked to stop."""


class _Bucket:
    """Gradients of some parameters in one flat tensor: values, then a 1 for each gradient that exists.

    Args:
        parameters: parameters of one type and device.
        flat: zeros, of the type on the wire; see `size_of`.
        extra: number of further values at the end that are summed as well.
        wire_gradients: see `DenseExchange`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        flat: Tensor,
        extra: int,
        wire_gradients: dict[Tensor, Tensor] | None,
    ) -> None:
        self.parameters = list(parameters)
        sizes = [_padded(one) for one in parameters]
        self.flat, dtype, device = flat, flat.dtype, flat.device
        parts = torch.split(self.flat, [*sizes, len(sizes), extra])
        self.views = [part[: one.numel()].view(one.shape) for part, one in zip(parts, parameters, strict=False)]
        self.numbers = self.flat[: sum(sizes)]
        self.present, self.extra = parts[-2], parts[-1]
        own = parameters[0].dtype if parameters else dtype
        self.wire_gradients = None if own == dtype else wire_gradients
        fits = own == dtype or wire_gradients is not None
        self.wide = None if fits else torch.zeros(sum(sizes), dtype=own, device=device)
        self.sums = self.views
        if self.wide is not None:
            cuts = torch.split(self.wide, sizes)
            self.sums = [cut[: one.numel()].view(one.shape) for cut, one in zip(cuts, parameters, strict=True)]
        self.filled: set[int] = set()
        self.early: dict[int, Tensor] = {}
        """Gradients that were taken before autograd had them."""
        self.wait: Callable[[], None] | None = None

    @staticmethod
    def size_of(parameters: Sequence[nn.Parameter], extra: int) -> int:
        """Return the number of elements of the flat tensor."""
        return sum(map(_padded, parameters)) + len(parameters) + extra

    def gradients(self) -> dict[int, Tensor]:
        """Return this rank's gradients, by the number of their parameter."""
        found = {i: self.early.get(i, self.parameters[i].grad) for i in self.filled}
        return {i: one for i, one in found.items() if one is not None}

    def complete(self) -> None:
        """Copy the gradients into the bucket; zeros for parameters without a gradient on this rank."""
        found = self.gradients()
        copy_each([self.views[i] for i in found], list(found.values()))
        self.present.fill_(1.0)
        for i in range(len(self.parameters)):
            if i not in self.filled:
                self.views[i].zero_()
                self.present[i].zero_()

    def set_gradients(self, present: Sequence[bool]) -> None:
        """Set the gradients of parameters to the sums; parameters without a gradient on any rank keep None.

        Args:
            present: for each parameter, whether any rank has a gradient.
        """
        if self.wide is not None:
            copy_large(self.wide, self.numbers)
        for parameter, view, is_there in zip(self.parameters, self.sums, present, strict=True):
            if not is_there:
                continue
            if self.wire_gradients is None:
                parameter.grad = view
            else:  # in the wire type: a cast back would be one more pass over memory and one more copy
                self.wire_gradients[parameter], parameter.grad = view, None
        self.drop()

    def drop(self) -> None:
        """Forget this rank's gradients."""
        self.filled.clear()
        self.early.clear()


class DenseExchange:
    """Sums gradients of parameters over a group.

    The all-reduce of a bucket starts when backward has finished all its gradients, in the same order on all ranks. The
    first bucket holds the last matrices, whose gradients are finished first; vectors come last, as they are small, and
    operators of several layers tell of their gradients late. Of matrices they tell at once. A captured step believes
    them where eager steps have shown that what they told of is what autograd got.

    Args:
        parameters: dense parameters, in the order in which they are used; see `in_order_of_use`.
        group: the ranks.
        wire_dtype: type of the gradients sent; None: the type of each parameter.
        wire_gradients: receives, by parameter, sums whose type differs from the parameter's; None: they are cast
            and become its `grad`.
        uses_peers: whether captured steps sum over the memory of other GPUs where these write to each other's.

    Attributes:
        signals: (NUM_SIGNALS,), float32, of this rank; summed over all ranks with the loss.
        is_static: whether the set of parameters with a gradient on any rank is the same in every step, so that it is
            read from the GPU only once.
        look: called with the sums of each bucket, overlapped with backward in a captured step; `finish` then does not
            check that this rank's gradients are finite, which saves a pass over them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        wire_dtype: torch.dtype | None = None,
        wire_gradients: dict[Tensor, Tensor] | None = None,
        *,
        uses_peers: bool = True,
    ) -> None:
        self.group = group
        self.wire_dtype = wire_dtype
        self.wire_gradients = wire_gradients
        self.is_static = False
        self.look: Callable[[Tensor], None] | None = None
        group.open_second_group()
        self.signals = torch.zeros(NUM_SIGNALS, device=parameters[0].device) if parameters else torch.zeros(NUM_SIGNALS)
        self.buckets: list[_Bucket] = []
        self._sums: FlatSums | None = None
        self._present: dict[tuple[int, frozenset[int]], list[bool]] = {}
        self._unfinished: list[Callable[[], None]] = []  # sums of a dropped pass, which still write to the buckets
        if parameters:
            self._make_buckets(parameters, uses_peers)
        self._place = {id(p): (b, i) for b, one in enumerate(self.buckets) for i, p in enumerate(one.parameters)}
        self._place_in_memory = {p.data_ptr(): self._place[id(p)] for p in parameters}
        self._told: dict[_Place, tuple[Tensor, int]] = {}
        self._proven: set[_Place] = set()
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._is_on = False
        self._next = 0
        self._finite = torch.zeros(())
        weakref.finalize(self, _remove, self._handles)

    def _make_buckets(self, parameters: Sequence[nn.Parameter], uses_peers: bool) -> None:
        device = parameters[0].device
        filled: list[list[nn.Parameter]] = []
        uses_peers = uses_peers and ineligible_reason(self.group, device) is None
        limit = self._choose_bucket(parameters, uses_peers)
        last_first = list(reversed(parameters))
        for parameter in sorted(last_first, key=lambda one: one.dim() < _MATRIX):
            waiting = filled[-1] if filled else []
            alike = waiting and parameter.dtype == waiting[0].dtype
            if not alike or self._wire_bytes(waiting) >= limit:
                filled.append([])
            filled[-1].append(parameter)
        wires = [self.wire_dtype or some[0].dtype for some in filled]
        if wires[0] != torch.float32:  # the loss and the signals are not rounded to 16 bits
            filled.insert(0, [])
            wires.insert(0, torch.float32)
        extras = [1 + NUM_SIGNALS, *(0 for _ in filled[1:])]
        sizes = [(_Bucket.size_of(some, extra), wire) for some, extra, wire in zip(filled, extras, wires, strict=True)]
        self._sums = FlatSums(self.group, sizes, device, uses_peers=uses_peers)
        self.buckets = [
            _Bucket(some, flat, extra, self.wire_gradients)
            for some, flat, extra in zip(filled, self._sums.tensors, extras, strict=True)
        ]

    def _choose_bucket(self, parameters: Sequence[nn.Parameter], uses_peers: bool) -> int:
        """Return the size of a full bucket in bytes."""
        if not parameters[0].is_cuda:
            return _BUCKET_BYTES["cpu"]
        most = _PEER_BUCKET_BYTES if uses_peers else _BUCKET_BYTES["cuda"]
        return min(most, max(_SMALLEST_BUCKET, self._wire_bytes(parameters) // _LEAST_BUCKETS))

    def _wire_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return sum((self.wire_dtype or one.dtype).itemsize * one.numel() for one in parameters)

    def begin(self, loss: Tensor) -> None:
        """Prepare for a backward pass.

        Args:
            loss: this rank's share of the loss, 0-dim; it is summed as well.
        """
        self._hook()
        for wait in self._unfinished:
            wait()
        self._unfinished.clear()
        if self.wire_gradients is not None:
            self.wire_gradients.clear()  # left by a pass whose gradients were not dropped
        self._is_on, self._next = True, 0
        self._told.clear()
        self._finite = torch.zeros((), device=loss.device)
        self._loss = loss.detach().clone()
        if not self.buckets:
            self.signals = self.signals.to(loss.device)
            self.buckets.append(_Bucket([], torch.zeros(1 + NUM_SIGNALS, device=loss.device), 1 + NUM_SIGNALS, None))
        self.received[:1].copy_(self._loss)
        self.received[1:].copy_(self.signals)
        self._start_full()

    def _hook(self) -> None:
        """Register hooks on trained parameters that have none; a frozen parameter accepts no hook."""
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

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Take gradients that operators tell of, in a block that runs backward."""
        with telling_of_gradients(self.signals.device, self._take_early):
            yield

    def _take_early(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient that an operator has finished, if it is one that autograd is known to leave as it is."""
        place = self._place_in_memory.get(parameter.data_ptr())
        if place is None or not self._is_on:
            return
        if place in self._told:  # two uses of the parameter: autograd adds their gradients
            self._proven.discard(place)
        self._told[place] = gradient, gradient._version
        if self.look is None or place not in self._proven:
            return
        bucket = self.buckets[place[0]]
        bucket.early[place[1]] = gradient
        bucket.filled.add(place[1])
        self._start_full()

    def _take(self, parameter: Tensor) -> None:
        place = number, index = self._place[id(parameter)]
        bucket, told = self.buckets[number], self._told.get(place)
        gradient = parameter.grad
        if told is not None and gradient is not None:
            same = told[0].data_ptr() == gradient.data_ptr() and told[0]._version == told[1]
            (self._proven.add if same else self._proven.discard)(place)
        if index not in bucket.early:
            bucket.filled.add(index)
            self._start_full()
        elif place not in self._proven:
            raise VivianeError(
                "a gradient was summed over the processes before it was complete", value=tuple(parameter.shape),
                fix="set cuda_graph=False, and report the model: its parameters are used in another way than before",
            )  # fmt: skip

    def _start_full(self) -> None:
        """Start the all-reduce of the next buckets whose gradients are complete."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.filled) < len(bucket.parameters):
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        number, self._next = self._next, self._next + 1
        if self.look is None:
            bucket.complete()
            self._finite = self._finite + bucket.numbers.sum(dtype=torch.float32)
            bucket.wait = self._start_sum(number, through_peers=False)
            return
        device = bucket.flat.device
        gradients = list(bucket.gradients().values())
        with branch(device, "buckets", gradients, priority=URGENT):  # the casts overlap backward
            bucket.complete()
            bucket.wait = self._start_sum(number, through_peers=True)
        if bucket.numbers.numel():
            with branch(device, "sums"):
                bucket.wait()
                self.look(bucket.numbers)

    def _start_sum(self, number: int, *, through_peers: bool) -> Callable[[], None]:
        if self._sums is None:  # the loss and the signals of a model without dense parameters
            return self.group.start_all_reduce(self.buckets[number].flat)
        return self._sums.start(number, through_peers=through_peers)

    @timed_as("dense exchange")
    def finish(self) -> tuple[Tensor, Tensor]:
        """Wait for all sums; return the global loss, and a value that is finite if this rank's gradients are.

        Both are 0-dim.
        """
        self._is_on = False
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        for bucket in self.buckets:
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None
        for i, bucket in enumerate(self.buckets):
            bucket.set_gradients(self._presence(i, bucket))
        self._told.clear()  # or gradients of the step would stay in memory
        return self.received[0].clone(), self._finite

    @property
    def received(self) -> Tensor:
        """The sums of the last step over all ranks: the loss, then the signals; float32."""
        return self.buckets[0].extra

    def _presence(self, number: int, bucket: _Bucket) -> list[bool]:
        """Return which gradients of a bucket exist on any rank."""
        count = len(bucket.parameters)
        if len(bucket.filled) == count:
            return [True] * count
        key = (number, frozenset(bucket.filled))
        if not self.is_static or key not in self._present:
            self._present[key] = [one > 0 for one in bucket.present.tolist()]
        return self._present[key]

    def drop(self) -> None:
        """Abort a failed pass: nothing more is summed.

        All-reduces that have started continue, perhaps until other ranks join; the next pass waits for them.
        """
        self._is_on = False
        self._told.clear()
        for bucket in self.buckets:
            bucket.drop()
            if bucket.wait is not None:
                self._unfinished.append(bucket.wait)
            bucket.wait = None


def in_order_of_use(named: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters in the order in which a forward pass likely uses them: lists of one module item by item.

    Example:
        >>> names = ["first.weights.0", "first.weights.1", "first.biases.0", "first.biases.1", "last.weight"]
        >>> named = {name: nn.Parameter(torch.full((1,), float(i))) for i, name in enumerate(names)}
        >>> [int(one) for one in in_order_of_use(named)]
        [0, 2, 1, 3, 4]
    """
    firsts: dict[str, int] = {}
    places = []
    for number, name in enumerate(named):
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            module = parent.rpartition(".")[0]
            places.append((firsts.setdefault(module, number), int(last), number))
        else:
            places.append((number, 0, number))
    parameters = list(named.values())
    return [parameters[number] for *_, number in sorted(places)]


def _padded(parameter: Tensor) -> int:
    """Return the number of elements that a gradient takes in a bucket."""
    return -(-parameter.numel() // _ALIGNED) * _ALIGNED


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
