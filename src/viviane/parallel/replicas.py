"""Gradients of replicated tables: summed over the processes, so that all copies move alike.

Shapes: R rows of a storage, D its width.
"""

from __future__ import annotations

import torch

from viviane.embedding import EmbeddingCollection, Storage
from viviane.embedding.gradients import RowGradients
from viviane.ops.row_update import Entries
from viviane.parallel.group import Group


def join_replicas(replicas: EmbeddingCollection, group: Group) -> None:
    """Put the sum over all processes in the place of the gradients that wait here.

    Replicated tables are small: each storage's gradients go over the wire as one matrix (R, D + 1), whose last column
    says which rows were touched. All processes get the same bits.
    """
    if group.size == 1:
        return
    for storage in replicas.all_storages():
        assert isinstance(storage, Storage)
        if not storage.has_gradients or storage.is_joined:
            continue
        tables = storage.waiting_tables()
        rows, sums = storage.summed_gradients()
        whole = torch.zeros(storage.null_row, storage.dim + 1, device=sums.device)
        whole[rows, : storage.dim] = sums
        whole[rows, storage.dim] = 1.0
        group.all_reduce(whole)
        touched = whole[:, storage.dim] > 0
        every = torch.arange(storage.null_row, device=sums.device)
        own = torch.where(touched, every, storage.null_row)  # rows that nobody touched are passed over
        gradient = whole[:, : storage.dim].contiguous().view(-1)
        storage.replace_gradients(RowGradients(Entries(own, gradient), tables))
