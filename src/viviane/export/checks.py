"""Checks of an artifact's inputs before a program runs, with errors that name columns and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import DataError, ExportError, KeyRangeError
from viviane.export.manifest import KeyLimit
from viviane.export.program import ProgramInput
from viviane.training.checkpoint.manifest import TensorEntry


def limits_of(one: ProgramInput, limits: tuple[KeyLimit, ...]) -> list[tuple[int, KeyLimit]]:
    """Return the limits of an input's values, with the position of each column in it."""
    if one.kind not in ("one_hot", "values", "lengths"):
        return []
    return [(one.columns.index(limit.column), limit) for limit in limits if limit.column in one.columns]


def check_weights(one: ProgramInput, tensor: Tensor) -> None:
    """Refuse weights of ids that are not finite, as the model does.

    Raises:
        DataError: names the column.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise DataError("weights of ids must be finite", where=f"column {one.columns[0]!r}")


def check_limit(one: ProgramInput, tensors: Mapping[str, Tensor], place: int, limit: KeyLimit, origin: str) -> None:
    """Compare the keys of a column, or the lengths of its bags, with its limit.

    Args:
        one: the input.
        tensors: all inputs by name.
        place: position of the column in the input.
        limit: the limit of its values.
        origin: origin of the batch, for messages.

    Raises:
        KeyRangeError, DataError: names the column, its table, the row and the value.
    """
    tensor = tensors[one.name]
    where = f"column {limit.column!r}, table {limit.table!r}"
    if one.kind == "lengths":
        if limit.max_length is not None and bool((tensor > limit.max_length).any()):
            row = int((tensor > limit.max_length).nonzero()[0])
            raise DataError(
                "a bag is longer than its feature's max_length",
                value=int(tensor[row]),
                where=_place(where, row, origin),
                allowed=f"at most {limit.max_length} ids",
            )
        return
    if limit.num_rows is None:
        return
    keys = tensor[:, place] if one.kind == "one_hot" else tensor
    bad = (keys < 0) | (keys >= limit.num_rows)
    if not bool(bad.any()):
        return
    entry = int(bad.nonzero()[0])
    row = entry
    if one.kind == "values":
        ends = tensors[f"lengths/{limit.column}"].cumsum(0)
        row = int(torch.searchsorted(ends, entry, right=True))
    raise KeyRangeError(
        "key out of range",
        where=_place(where, row, origin),
        value=int(keys[entry]),
        allowed=f"0 <= key < {limit.num_rows}",
        fix="set the table's out_of_range to 'default', 'hash' or 'ignore', and export the model again",
    )


def _place(where: str, row: int, origin: str) -> str:
    return f"{where}, row {row} of the batch" + (f", {origin}" if origin else "")


def input_tensor(one: ProgramInput, given: Any) -> Tensor:
    """Return the value of an input as a tensor of its type.

    Raises:
        DataError: keys are not integers, or the shape differs.
    """
    tensor = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    whole = one.torch_dtype in (torch.int64, torch.int32)
    if whole and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise DataError("keys and lengths must be integers", where=f"input {one.name!r}", value=str(tensor.dtype))
    fits = tensor.dim() == len(one.shape) and all(
        isinstance(size, str) or size == own for size, own in zip(one.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise DataError(
            "an input's shape differs", where=f"input {one.name!r}", value=tuple(tensor.shape), allowed=str(one.shape)
        )
    return tensor.to(one.torch_dtype).contiguous()


def check_sizes(inputs: Mapping[str, ProgramInput], tensors: Mapping[str, Tensor]) -> None:
    """Refuse inputs whose common sizes differ, and lengths of bags that do not add up.

    Raises:
        DataError: names the inputs.
    """
    sizes: dict[str, tuple[str, int]] = {}
    for name, one in inputs.items():
        for size, own in zip(one.shape, tensors[name].shape, strict=True):
            if isinstance(size, str):
                first, known = sizes.setdefault(size, (name, own))
                if known != own:
                    raise DataError(
                        "inputs differ in size", where=f"inputs {first!r} and {name!r}", value=f"{known} and {own}"
                    )
        if one.kind == "lengths":
            lengths, values = tensors[name], tensors[f"values/{one.columns[0]}"]
            if bool((lengths < 0).any()) or int(lengths.sum()) != len(values):
                raise DataError(
                    "lengths must not be negative, and add up to the number of values",
                    where=f"input {name!r}",
                    value=int(lengths.sum()),
                    allowed=str(len(values)),
                )


def compare_weights(own: Mapping[str, TensorEntry], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that differ from the exported model in names, shapes or types.

    Raises:
        ExportError: a name is missing or new, or a shape or type differs.
    """
    names = sorted(own.keys() ^ weights.keys())
    if names:
        what = "missing" if names[0] in own else "not in the artifact"
        raise ExportError(f"the weights belong to another model: one is {what}", value=names[0])
    for name, entry in own.items():
        new = TensorEntry.of(weights[name])
        if new != entry:
            raise ExportError(
                "the shape or type of a weight differs", where=name, value=str(new), allowed=str(entry),
                fix="export the model again: dynamic tables have other keys now, or the model was changed",
            )  # fmt: skip
