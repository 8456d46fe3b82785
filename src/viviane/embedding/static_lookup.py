"""Lookups in tensors at fixed addresses: what a captured step reads where rows are found before its replay.

A cache of rows gives the rows of a batch their slots beside earlier steps, which no graph does. The graph then reads
slots, offsets, weights and masks from tensors of its own, which each replay fills from those of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from viviane.embedding.table_storage import StorageLookup

Resolved: TypeAlias = tuple[int, list[StorageLookup], dict[str, Tensor]]
"""Of a batch: its rows, what to look up, masks of "concat" features."""


def tensors_of(found: Resolved) -> list[Tensor]:
    """Return the tensors of a batch's lookups, in an order that depends on the batch's shape alone."""
    _, parts, masks = found
    every = [one for part in parts for one in (part.rows, part.offsets, part.weights)]
    return [one for one in [*every, *masks.values()] if one is not None]


def static_copy(found: Resolved) -> Resolved:
    """Return the same lookups in tensors of their own, without leases; rows of a storage follow one another in memory.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
        >>> table = TableConfig(name="item", num_rows=4, dim=2)
        >>> emb = EmbeddingCollection([table], [FeatureConfig(name="item", table="item")], SGD())
        >>> size, parts, masks = static_copy(emb.resolve({"item": torch.tensor([2, 0])}, training=True))
        >>> size, parts[0].rows.tolist(), masks
        (2, [[2], [0]], {})
    """
    size, parts, masks = found
    rows = _copied_rows(parts)
    copies = [
        replace(part, rows=own, offsets=_copied(part.offsets), weights=_copied(part.weights), lease=None)
        for part, own in zip(parts, rows, strict=True)
    ]
    return size, copies, {name: mask.clone() for name, mask in masks.items()}


def end_leases(found: Resolved) -> None:
    """Let the rows of a batch go: its step is queued."""
    for part in found[1]:
        if part.lease is not None:
            part.lease.end()


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _copied_rows(parts: Sequence[StorageLookup]) -> list[Tensor]:
    """Copy the rows of each part; the update joins those of one storage, without a copy where they are neighbours."""
    together: dict[int, list[int]] = {}
    for i, part in enumerate(parts):
        together.setdefault(id(part.storage), []).append(i)
    found: dict[int, Tensor] = {}
    for places in together.values():
        joined = torch.cat([parts[i].rows.reshape(-1) for i in places])
        split = torch.split(joined, [parts[i].rows.numel() for i in places])
        found |= {i: own.view(parts[i].rows.shape) for i, own in zip(places, split, strict=True)}
    return [found[i] for i in range(len(parts))]
