"""Keras on torch: an autograd function whose backward updates the rows.

Shapes: B rows of the batch, K keys of a row, W columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.embedding.external import ExternalLookups, checked_rate
from viviane.embedding.whole_keys import whole_keys as plain_keys

_OUTPUTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def table_device(weight: Any) -> str:
    """Return the device of a weight of the layer."""
    return str(weight.value.device)


def eagerly(device: str) -> AbstractContextManager[Any]:
    """Compute on a device for a block, even where Keras traces on the device "meta".

    On the device of the tables a seed draws the rows of the stock layer.
    """
    return keras.device(device)  # type: ignore[no-any-return]


def joined_keys(parts: Sequence[Any], lengths: Sequence[int | None]) -> Tensor | None:
    """Return keys of several features, (B,) or (B, L) each, as a matrix (B, K) at once; None: one by one."""
    first = parts[0]
    if type(first) is not Tensor or first.dtype not in (torch.int32, torch.int64) or first.device.type == "meta":
        return None
    if any(type(one) is not Tensor or one.dtype != first.dtype for one in parts):
        return None
    matrices = [one.reshape(-1, length or 1) for one, length in zip(parts, lengths, strict=True)]
    if torch.compiler.is_compiling() or any(len(one) != len(matrices[0]) for one in matrices):
        return None
    return torch.cat(matrices, 1)


def split(flat: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """Split (B, W) by columns; `keras.ops.split` would slice."""
    if torch.compiler.is_compiling() or not flat.requires_grad:
        return torch.split(flat, list(widths), 1)
    return _Split.apply(flat, list(widths))  # type: ignore[no-any-return,no-untyped-call]


class _Split(torch.autograd.Function):
    """`torch.split` whose backward joins gradients without a copy where a concatenation has given them as columns."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, widths: list[int]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.widths, ctx.like = widths, flat.new_empty(0).expand(len(flat), 0)
        return torch.split(flat, widths, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        joined = None if torch.is_grad_enabled() else joined_columns(gradients)
        if joined is None:
            pairs = zip(gradients, ctx.widths, strict=True)
            parts = [ctx.like.new_zeros(len(ctx.like), width) if one is None else one for one, width in pairs]
            joined = torch.cat(parts, 1)
        return joined, None


def joined_columns(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return matrices (B, n) that are neighbouring columns of one in memory as that one; None: they are not.

    Example:
        >>> whole = torch.arange(8.0).view(2, 4)
        >>> joined_columns([whole[:, 1:2], whole[:, 2:]]).tolist()
        [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]
    """
    first = parts[0]
    if first is None or first.dim() != 2 or first.stride(1) != 1 or len(first) < 2:
        return None
    place, strides, memory, width = first.data_ptr(), first.stride(), first.untyped_storage().data_ptr(), 0
    for one in parts:
        if one is None or one.dtype != first.dtype or one.stride() != strides or one.data_ptr() != place:
            return None
        if one.untyped_storage().data_ptr() != memory:
            return None
        place += one.shape[1] * one.element_size()
        width += one.shape[1]
    return first.as_strided((len(first), width), strides) if strides[0] >= width else None


def is_traced(anchor: Any) -> bool:
    """Whether Keras traces a model, or runs a layer with gradients, outside of which rows may be looked at."""
    return _only_shapes() or (torch.is_grad_enabled() and _is_called())


def _is_called() -> bool:
    try:
        from keras.src.backend.common.global_state import get_global_attribute
    except ImportError:  # another version of Keras: a model that computes with rows is not noticed
        return False
    return get_global_attribute("call_context") is not None


def _only_shapes() -> bool:
    """Whether Keras computes shapes, possibly with any numbers for keys, as it does to build a subclassed model."""
    try:
        from keras.src.backend.common.symbolic_scope import in_symbolic_scope
    except ImportError:  # another version of Keras: a model that it builds while it trains raises
        return False
    return bool(in_symbolic_scope())


@torch.compiler.disable
def whole_keys(keys: Tensor, where: str) -> Tensor:
    """Return floats as int32 or int64, checked."""
    if keys.device.type == "meta" or _only_shapes():
        return torch.empty(keys.shape, dtype=torch.int64, device="meta")
    return plain_keys(keys.detach(), where)


class _Update(torch.autograd.Function):
    """The lookup; its backward gives the tables their gradient, and the anchor a zero."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookups: ExternalLookups, batch: Any, rate: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.number, flat = lookups.begin(batch)
        ctx.lookups, ctx.rate, ctx.shape = lookups, rate, flat.shape
        return flat, torch.zeros((), device=anchor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True; the mark costs microseconds in all other cases
            return _update_once(ctx, gradient, token)
        return _update(ctx, gradient, token)


def _update(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> Any:
    rate, lookups = ctx.rate, ctx.lookups
    zero = torch.zeros((), device=rate.device)
    if gradient is None:  # only the loss scale was differentiated
        gradient = zero.expand(ctx.shape)
    scale = (float(token) or 1.0) if token is not None else 1.0
    lookups.end(ctx.number, gradient, checked_rate(rate, lookups.where), 1.0 / scale)
    return zero, None, None, None


_update_once = once_differentiable(_update)


class _Guard(torch.autograd.Function):
    """Rows that were looked up outside of training; their backward is an error."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookups: ExternalLookups, flat: Tensor) -> Tensor:
        ctx.lookups = lookups
        return flat.view_as(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.lookups.not_in_training()


def look_up(layer: Any, keys: Tensor, weights: Tensor | None, rate: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    """Look up keys (B, K): the vectors (B, W), and a zero whose gradient is the loss scale."""
    if torch.compiler.is_compiling():
        return _outside_of_compiled_code(layer, keys, weights, rate, trains)  # type: ignore[no-any-return]
    dtype = _OUTPUTS[layer.compute_dtype]
    if keys.device.type == "meta":
        return torch.empty(len(keys), layer.width, dtype=dtype, device="meta"), torch.zeros((), device="meta")
    if not torch.is_grad_enabled() and _only_shapes():
        return keras.ops.zeros((len(keys), layer.width), layer.compute_dtype), keras.ops.zeros(())
    lookups: ExternalLookups = layer.lookups
    batch = layer.columns.batch(keys, weights)
    if not trains:
        flat = lookups.read(batch)
        if layer.trainable and torch.is_grad_enabled():
            flat = _Guard.apply(layer.anchor.value, lookups, flat)  # type: ignore[no-untyped-call]
        return flat.to(dtype), rate.new_zeros(())
    if not torch.is_grad_enabled():
        raise lookups.undifferentiated()
    flat, token = _Update.apply(layer.anchor.value, lookups, batch, rate)  # type: ignore[no-untyped-call]
    return flat.to(dtype), token


# Of itself the mark costs several microseconds a call, which only compiled code needs.
_outside_of_compiled_code: Any = torch.compiler.disable(look_up)  # type: ignore[no-untyped-call]
