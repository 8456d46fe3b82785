"""Train a collection from a framework whose autograd is not torch's: lookups and gradients cross as arrays.

Shapes: B rows of the batch, F features, L keys of a feature in each row, K keys of a row in all, W columns of the
output.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.core.logging import get_logger
from viviane.embedding.base import Handover, TableCollection
from viviane.embedding.small_steps import SmallStep

_MOST_WAITING: Final = 64
_log = get_logger("embedding")


_P = ParamSpec("_P")
_R = TypeVar("_R")
_MOST_RAISED: Final = 8
_raised: deque[VivianeError] = deque(maxlen=_MOST_RAISED)
_numbers = itertools.count()
_Lookup: TypeAlias = tuple[Handover | SmallStep | None, torch.Size, torch.dtype]
"""What takes the gradient of a lookup, if anything does, and the shape and type that it has to have."""
_MOST_SHAPES: Final = 8
_RATES: Final = "a finite number from 0"


class LostUpdateError(VivianeError, RuntimeError):
    """Lookups in training got no gradient, so that their rows were not updated."""


class ExternalLookups:
    """Lookups of a collection whose gradients arrive later, from any thread.

    `begin` looks up and returns a number, `end` brings the gradient of that lookup. When no lookup waits any more the
    collection steps: gradients of all lookups of one training step are summed first.

    Args:
        collection: the tables.
        where: names the layer in errors.
        columns: how a matrix of keys becomes a batch, for callers that have one.
        most_waiting: lookups of a step; more that wait for their gradients raise.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
        >>> table = TableConfig(name="item", num_rows=4, dim=2, init={"type": "constant", "value": 1.0})
        >>> lookups = ExternalLookups(EmbeddingCollection([table], [FeatureConfig(name="seen", table="item")], SGD()))
        >>> number, rows = lookups.begin({"seen": torch.tensor([0, 3, 0])})
        >>> lookups.end(number, torch.ones(3, 2), lr=0.25)
        >>> lookups.read({"seen": torch.tensor([0, 1, 3])}).tolist()
        [[0.5, 0.5], [1.0, 1.0], [0.75, 0.75]]
    """

    def __init__(
        self,
        collection: TableCollection,
        where: str = "an embedding layer",
        columns: KeyColumns | None = None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self.collection = collection
        self.where = where
        self.columns = columns
        self.most_waiting = most_waiting
        self.number = next(_numbers)
        """Another one for each object of this process."""
        self.num_updates = 0
        """Steps of the collection so far."""
        self._lock = threading.RLock()
        self._dynamic = [one for part in collection.parts() for one in part.dynamic_storages()]
        self._waiting: dict[int, _Lookup] = {}
        self._small: dict[tuple[torch.Size, torch.dtype], SmallStep | None] = {}
        self._handed = 0
        self._next = 0

    @property
    def num_waiting(self) -> int:
        """Lookups whose gradients have not come."""
        return len(self._waiting)

    def read(self, keys: Batch | Mapping[str, Any]) -> Tensor:
        """Look up without training: (B, W).

        Raises:
            LostUpdateError: lookups in training before this one got no gradient.
        """
        with self._lock, torch.no_grad():
            self._raise_lost()
            return self.collection(keys).flat  # type: ignore[no-any-return]

    def begin(self, keys: Batch | Mapping[str, Any]) -> tuple[int, Tensor]:
        """Look up in training: the lookup's number, and the vectors (B, W).

        Raises:
            LostUpdateError: too many lookups wait for their gradients, or some of a step whose other gradients came.
        """
        with self._lock:
            if self._waiting and (self._handed or len(self._waiting) >= self.most_waiting):
                self._lost()
            small = self._small_step(keys) if isinstance(keys, Batch) and not self._waiting else None
            found = None if small is None else small.look_up(keys.one_hot)  # type: ignore[union-attr]
            take: Handover | SmallStep | None = small
            if found is None:
                found, take = self.collection.look_up_apart(keys)
                self._let_go()
            flat = found
            number, self._next = self._next, (self._next + 1) % 2**31
            self._waiting[number] = take, flat.shape, flat.dtype
            return number, flat

    def end(self, number: int, gradient: Tensor, lr: float, scale: float = 1.0) -> None:
        """Bring the gradient (B, W) of a lookup; the last one that is awaited makes the step.

        Args:
            number: from `begin`.
            gradient: of the loss.
            lr: rate of this step; tables whose optimizer has a rate of its own take that.
            scale: what gradients are multiplied by first. Where it is not finite, or the gradient is not while scale is
                not 1, the step is left out, as under loss scaling all steps with an overflow are.
        """
        with self._lock:
            found = self._waiting.pop(number, None)
            if found is None:
                raise LostUpdateError(
                    "a gradient came for a lookup that does not wait for one", where=self.where, value=number,
                    fix="differentiate each training step once",
                )  # fmt: skip
            take, shape, dtype = found
            usable = take is not None and self._usable(gradient, scale)
            if usable and isinstance(take, SmallStep) and not self._waiting and not self._handed and take.is_plain:
                self._check_shape(gradient, shape)
                take.step(gradient.to(dtype), lr, scale)
                self.num_updates += 1
                return
            if take is not None and usable:
                self._check_shape(gradient, shape)
                whole = gradient.to(dtype)
                if self._waiting:  # it is kept until the step, and may be memory of the caller
                    whole = whole.clone()
                (take.hand_over if isinstance(take, SmallStep) else take)(whole)
                self._handed += 1
            if not self._waiting:
                self._step(lr, scale)

    def _small_step(self, batch: Batch) -> SmallStep | None:
        """Return what serves a small batch of this shape with less than the collection does; None: the collection."""
        key = batch.one_hot.shape, batch.one_hot.dtype
        if key not in self._small:
            if len(self._small) >= _MOST_SHAPES:
                self._small.clear()
            self._small[key] = SmallStep.of(self.collection, batch)
        small = self._small[key]
        return small if small is not None and small.serves(batch) else None

    def _check_shape(self, gradient: Tensor, shape: torch.Size) -> None:
        if gradient.shape != shape:
            raise DataError(
                "a gradient does not fit its lookup", where=self.where, value=tuple(gradient.shape),
                allowed=str(tuple(shape)),
            )  # fmt: skip

    def discard(self) -> None:
        """Forget the lookups that wait, and the gradients that have come for the step not made yet."""
        with self._lock:
            self._waiting.clear()
            self._handed = 0
            self.collection.discard_gradients()

    def undifferentiated(self) -> LostUpdateError:
        """Return the error of a lookup in training that nothing differentiates."""
        return LostUpdateError(
            "in training nothing differentiates this layer: its rows would not be updated", where=self.where,
            fix="keep the layer trainable and its output in the loss, or call the model with training=False",
        )  # fmt: skip

    def check(self) -> None:
        """Raise where lookups in training got no gradient, before rows are saved.

        A single one may be a forward pass that was made to look at its result: of that the log tells.
        """
        with self._lock:
            self._raise_lost()
            if self._waiting:
                _log.warning("%s: a lookup in training got no gradient: its rows were not updated", self.where)

    def _raise_lost(self) -> None:
        if len(self._waiting) > 1 or (self._waiting and self._handed):
            self._lost()

    def not_in_training(self) -> LostUpdateError:
        """Return the error of a lookup outside of training that is differentiated."""
        return LostUpdateError(
            "a lookup that was not in training is differentiated: its rows would not be updated", where=self.where,
            fix="call the model with training=True, and pass `training` on to the layer in a `call` of your own",
        )  # fmt: skip

    def _usable(self, gradient: Tensor, scale: float) -> bool:
        return scale == 1.0 or (math.isfinite(scale) and bool(torch.isfinite(gradient).all()))

    def _step(self, lr: float, scale: float) -> None:
        handed, self._handed = self._handed, 0
        if handed:
            self.collection.step(lr, scale)
            self.num_updates += 1
        else:
            self.collection.discard_gradients()
        self._let_go()

    def _let_go(self) -> None:
        # Frameworks call from any of their threads; the lock above keeps lookups and steps in order.
        for storage in self._dynamic:
            storage.lock.free()

    def _lost(self) -> None:
        count, handed = len(self._waiting), self._handed
        self.discard()
        raise LostUpdateError(
            "lookups in training got no gradient: their rows were not updated", where=self.where,
            value=f"{count} without and {handed} with a gradient" if handed else count,
            fix="keep the layer trainable and its output in the loss, or call the layer with training=False",
        )  # fmt: skip


class KeyColumns:
    """The keys of all features in one matrix (B, K): which columns are whose.

    Args:
        lengths: by feature, the number of its keys in each row; None for one key that is not pooled. Those come first.
        padding: by feature, the key that means "nothing here", if any: it is left out of its bag.
        roots: features whose bags are divided by the root of their sum of squared weights ("sqrtn").

    Example:
        >>> columns = KeyColumns({"user": None, "seen": 2})
        >>> batch = columns.batch(torch.tensor([[7, 1, 2], [8, 3, 3]]))
        >>> batch.one_hot.tolist(), batch.bags["seen"].values.tolist()
        ([[7], [8]], [1, 2, 3, 3])
    """

    def __init__(
        self,
        lengths: Mapping[str, int | None],
        padding: Mapping[str, int] | None = None,
        roots: Sequence[str] = (),
    ) -> None:
        self.one_hot = tuple(name for name, length in lengths.items() if length is None)
        self.bags = {name: length for name, length in lengths.items() if length is not None}
        self.padding = dict(padding or {})
        self.roots = frozenset(roots)
        self.num_columns = len(self.one_hot) + sum(self.bags.values())
        self._layout = Layout((), (), self.one_hot, tuple(self.bags))
        self._nothing = torch.empty(0, 0)

    @property
    def order(self) -> tuple[str, ...]:
        """The features in the order of their columns."""
        return (*self.one_hot, *self.bags)

    def batch(self, keys: Tensor, weights: Tensor | None = None) -> Batch:
        """Return the batch that a collection looks up.

        Args:
            keys: (B, K), int32 or int64.
            weights: (B, K), float32, of all keys; those of one-hot features must be 1.

        Raises:
            DataError: the matrix has another number of columns.
        """
        if keys.dim() != 2 or keys.shape[1] != self.num_columns:
            raise DataError("keys are (B, K)", value=tuple(keys.shape), allowed=f"(B, {self.num_columns})")
        nothing = self._nothing
        if len(nothing) != len(keys) or nothing.device != keys.device:  # batches of one size follow one another
            nothing = self._nothing = torch.empty(len(keys), 0, device=keys.device)
        if not self.bags:
            return Batch(self._layout, nothing, nothing, keys.contiguous())
        start = len(self.one_hot)
        bags = {}
        for name, length in self.bags.items():
            own = None if weights is None else weights[:, start : start + length]
            bags[name] = self._bag(name, keys[:, start : start + length], own)
            start += length
        return Batch(self._layout, nothing, nothing, keys[:, : len(self.one_hot)].contiguous(), bags)

    def _bag(self, name: str, keys: Tensor, weights: Tensor | None) -> Bag:
        size, length = keys.shape
        padding = self.padding.get(name)
        counted = None if padding is None else keys != padding
        values, flat = keys.reshape(-1), None if weights is None else weights.reshape(-1).contiguous()
        if counted is None:
            offsets = torch.arange(size + 1, dtype=torch.int64, device=keys.device) * length
        else:
            kept = counted.reshape(-1)
            values = values[kept]
            flat = None if flat is None else flat[kept]
            offsets = torch.zeros(size + 1, dtype=torch.int64, device=keys.device)
            torch.cumsum(counted.sum(1), 0, out=offsets[1:])
        if name in self.roots:
            flat = root_weights(offsets, flat, len(values))
        return Bag(values, offsets, flat)


def root_weights(offsets: Tensor, weights: Tensor | None, num_keys: int) -> Tensor:
    """Return the weights of a "sqrtn" bag as those of a sum: w / sqrt(sum of w^2 over the bag), (N,), float32.

    Example:
        >>> root_weights(torch.tensor([0, 4]), None, 4).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    own = torch.ones(num_keys, device=offsets.device) if weights is None else weights.to(torch.float32)
    places = torch.arange(len(offsets) - 1, device=offsets.device)
    bags = torch.repeat_interleave(places, offsets.diff(), output_size=num_keys)
    totals = torch.zeros(len(offsets) - 1, device=offsets.device).index_add_(0, bags, own * own)
    return own * torch.where(totals == 0, 0.0, totals.rsqrt())[bags]


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return host memory of another framework as a tensor, which the caller keeps alive.

    Example:
        >>> numbers = (ctypes.c_float * 2)(1.0, 2.0)
        >>> tensor_at(ctypes.addressof(numbers), torch.float32, (2, 1)).tolist()
        [[1.0], [2.0]]
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def short_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let errors of ours leave a function without the frames below it, for frameworks that put those into their text.

    Example:
        >>> @short_traceback
        ... def call() -> None:
        ...     raise DataError("a null")
        >>> try:
        ...     call()
        ... except DataError as error:
        ...     frames = error.__traceback__
        >>> frames.tb_next.tb_frame.f_code.co_name, frames.tb_next.tb_next
        ('call', None)
    """

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        except VivianeError as error:
            own = error
        _raised.append(own)
        raise own.with_traceback(None)

    return call


def raised_in(text: str) -> VivianeError | None:
    """Return the error that left a function of `short_traceback` and is in the text of a framework's, or None.

    Example:
        >>> raised_in("a compiler failed") is None
        True
    """
    return next((one for one in reversed(_raised) if f"{type(one).__name__}: {one}" in text), None)


def checked_rate(value: Any, where: str) -> float:
    """Return a learning rate as a number.

    Raises:
        ConfigError: it is no single number, not finite, or negative.

    Example:
        >>> checked_rate([0.1, 0.2], "fit")
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: not a learning rate
          where:   fit
          value:   '[0.1, 0.2]'
          allowed: a finite number from 0
    """
    try:
        rate = float(value)
    except (TypeError, ValueError):
        raise ConfigError("not a learning rate", where=where, value=str(value)[:100], allowed=_RATES) from None
    if not math.isfinite(rate) or rate < 0:
        raise ConfigError("not a learning rate", where=where, value=rate, allowed=_RATES)
    return rate
