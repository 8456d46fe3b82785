"""Candidates from the vectors of a model: the items nearest to a user's vector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.files import file_sha256
from viviane.core.locations import AnyPath
from viviane.core.locks import ThreadLock
from viviane.core.whole_numbers import whole_numbers
from viviane.model import Model
from viviane.model.saving import FILES_FILE, find_model
from viviane.retrieval.candidates import Candidates, drop_seen
from viviane.retrieval.early_stopping import user_vectors
from viviane.retrieval.faiss_index import IndexKind, IndexSettings
from viviane.retrieval.histories import Histories, Ids
from viviane.retrieval.index import ItemIndex
from viviane.retrieval.rows import Roles, vectors
from viviane.schema import RESERVED

_STEP = 4096  # rows per batch


def model_version(folder: str | AnyPath) -> str:
    """Return an identifier of a version of a saved model: the checksum of its list of files."""
    return file_sha256(find_model(folder) / FILES_FILE)


class VectorSource:
    """Nearest items of a model's user vectors, through an index.

    Args:
        model: with the tensors "user_vector" and "item_vector": `viviane.zoo.SASRec`, `HSTU`, `TwoTower`.
        index: index of the items' vectors; if a kind or settings, it is built.
        items: columns of the items by name, one row per item, if "item_vector" reads more than the item's id; includes
            the item column. None: all ids.
        name: see `CandidateSource`.
        version: version of the model, see `model_version`; stored in the index.
    """

    def __init__(
        self,
        model: Model,
        index: ItemIndex | IndexSettings | IndexKind = "exact",
        *,
        items: Mapping[str, Any] | None = None,
        name: str = "vectors",
        version: str | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.roles = Roles.of(model.schema)
        self.num_items = self.roles.num_items
        self._lock = ThreadLock()
        self.index = index if isinstance(index, ItemIndex) else build_index(model, index, items=items, version=version)

    def candidates(self, histories: Histories, k: int, rows: Any = None) -> Candidates:
        """Return the best k items for each row, without those of its history.

        A row without a history has no query vector if the model reads nothing else, so it gets no candidates.
        """
        parts = []
        for first in range(0, len(histories), _STEP):
            some = slice(first, first + _STEP)
            own = histories.take(some)
            longest = int(own.lengths.max(initial=0))
            found = self.index.search(self._users(own, rows, some), min(k + longest, len(self.index)))
            best = drop_seen(found, own).first(k)
            empty = (own.lengths == 0)[:, None] if self.roles.history is not None and not rows else np.False_
            parts.append((np.where(empty, -1, best.items), np.where(empty, -np.inf, best.scores)))
        if not parts:
            return Candidates(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        items, scores = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return Candidates(items, scores.astype(np.float32))

    def score(self, histories: Histories, items: Ids, rows: Any = None) -> NDArray[np.float32]:
        """Return the inner products with given items, (B, K)."""
        found = np.zeros(items.shape, dtype=np.float32)
        for first in range(0, len(histories), _STEP):
            some = slice(first, first + _STEP)
            users = self._users(histories.take(some), rows, some)
            found[some] = np.einsum("bd,bkd->bk", users, self.index.vectors_of(items[some]))
        return found

    def _users(self, histories: Histories, rows: Any, some: slice) -> NDArray[np.float32]:
        more = {name: values[some] for name, values in (rows or {}).items() if name != self.roles.history}
        with self._lock:  # eval mode applies to the complete module
            return np.asarray(user_vectors(self.model, histories, self.roles, more), dtype=np.float32)


def build_index(
    model: Model,
    settings: IndexSettings | IndexKind = "exact",
    *,
    items: Mapping[str, Any] | None = None,
    version: str | None = None,
    device: torch.device | str = "cpu",
) -> ItemIndex:
    """Build an index of a model's item vectors; arguments as for `VectorSource`."""
    roles = Roles.of(model.schema)
    if items is None:
        ids = np.arange(RESERVED.first, roles.num_items)
        columns: dict[str, Any] = {roles.item: ids}
    else:
        columns = dict(items)
        ids = whole_numbers(columns[roles.item], np.int64, f"column {roles.item!r}")
        ids, first = np.unique(ids, return_index=True)  # a data set repeats an item in every row in which it occurs
        kept = first[ids >= RESERVED.first]
        ids = ids[ids >= RESERVED.first]
        columns = {name: np.asarray(values)[kept] for name, values in columns.items()}
    found = vectors(model, "item_vector", len(ids), columns)
    return ItemIndex(
        found.reshape(len(ids), -1), ids, settings, num_items=roles.num_items, model=version, device=device
    )


def index_folder(model: str | AnyPath) -> Path:
    """Return the folder of a saved model's index: inside the model folder, so that a new version replaces it."""
    return find_model(model) / "index"
