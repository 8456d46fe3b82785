"""Nearest neighbours by inner product among the items' vectors: exact, or approximate with faiss.

index.json      kind, settings, number and width of vectors, the model it was built from, measured recall, checksums
vectors.npy     (n, d), float32; enough for the kinds "exact" and "flat"
ids.npy         (n,), the item of each vector
index.faiss     for the approximate kinds
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from viviane.config.base import Settings, load_json
from viviane.core.errors import CheckpointError, ConfigError, SchemaError, VivianeError
from viviane.core.file_names import file_inside, refuse_links
from viviane.core.files import file_sha256, read_array, replace_folder, write_json_atomic
from viviane.core.locations import AnyPath, location
from viviane.core.remote.cache import local_copy
from viviane.core.tensors import float_array
from viviane.core.whole_numbers import whole_numbers
from viviane.retrieval.candidates import NO_ITEM, Candidates, check_count, check_fits, in_order
from viviane.retrieval.faiss_index import FaissSearch, IndexKind, IndexSettings
from viviane.retrieval.histories import Ids

INDEX_FILE: Final = "index.json"
_FILES = ("vectors.npy", "ids.npy", "index.faiss")
_MOST_SCORES = 1 << 24  # maximum scores per batch of exact search


class IndexFile(Settings):
    """The content of index.json.

    Args:
        model: checksum of the model of the vectors, see `viviane.retrieval.model_version`; None: unknown.
        recall: fraction of the exact nearest neighbours that the index finds, by list length: {"10": 0.98}.
        sha256: checksum of each other file.
    """

    format: Literal["viviane-index"] = "viviane-index"
    version: Literal[1] = 1
    settings: IndexSettings
    num_vectors: int = Field(ge=1)
    dim: int = Field(ge=1)
    num_items: int = Field(ge=1)
    model: str | None = None
    recall: dict[str, float] = Field(default_factory=dict)
    sha256: dict[str, str]


class ItemIndex:
    """Finds the items whose vectors have the largest inner products with a query.

    Args:
        vectors: (n, d), float32.
        ids: the item of each vector, distinct; None: numbered from 0.
        settings: settings of the search, or only its kind.
        num_items: item ids are below it; None: the largest plus one.
        model: checksum of the model, see `IndexFile`.
        device: device of the search: "cpu", or a GPU; the kinds of faiss then need its GPU build.

    Example:
        >>> index = ItemIndex(np.eye(3, dtype=np.float32), np.array([5, 7, 9]))
        >>> index.search(np.array([[0.0, 2.0, 1.0]], dtype=np.float32), 2).items.tolist()
        [[7, 9]]
    """

    def __init__(
        self,
        vectors: NDArray[np.floating],
        ids: Ids | Sequence[int] | None = None,
        settings: IndexSettings | IndexKind = "exact",
        *,
        num_items: int | None = None,
        model: str | None = None,
        device: torch.device | str = "cpu",
        _faiss: bytes | None = None,
    ) -> None:
        self.settings = IndexSettings(kind=settings) if isinstance(settings, str) else settings
        self.vectors = _numbers(vectors, "vectors of items")
        self.ids = np.arange(len(self.vectors)) if ids is None else whole_numbers(ids, np.int64, "ids of items")
        self._check(num_items)
        self.num_items = int(self.ids.max()) + 1 if num_items is None else num_items
        self.model = model
        self.device = torch.device(device)
        self.recall: dict[str, float] = {}
        self._lock = threading.Lock()
        self._search: FaissSearch | None = None
        self._torch = torch.from_numpy(self.vectors).to(self.device)
        if self.settings.kind != "exact":
            self._search = FaissSearch(self.vectors, self.settings, self.device, _faiss)

    def __reduce__(self) -> Any:
        """Copy and pickle what `save` writes; faiss's own index as its bytes."""
        faiss = self._search.to_bytes() if self._search is not None and self.settings.kind != "flat" else None
        given = (self.vectors, self.ids, self.settings, self.num_items, self.model, str(self.device), faiss)
        return _with_recall, (type(self), given, self.recall)

    def _check(self, num_items: int | None) -> None:
        if self.vectors.ndim != 2 or not self.vectors.size:
            raise SchemaError("an index needs vectors", value=self.vectors.shape, allowed="(n, d), n and d from 1")
        if self.ids.shape != self.vectors.shape[:1]:
            raise SchemaError("one id per vector is needed", value=self.ids.shape, allowed=str(self.vectors.shape[:1]))
        distinct, counts = np.unique(self.ids, return_counts=True)
        if (counts > 1).any():
            raise SchemaError("an item occurs twice in the index", value=int(distinct[counts > 1][0]))
        if distinct[0] < 0 or (num_items is not None and distinct[-1] >= num_items):
            raise SchemaError("an item's id is out of range", value=int(distinct[-1]), allowed=f"0 to {num_items}")
        if not np.isfinite(self.vectors).all():
            row = int(np.flatnonzero(~np.isfinite(self.vectors).all(1))[0])
            raise SchemaError("an item's vector is not finite", value=int(self.ids[row]))

    def __len__(self) -> int:
        return len(self.ids)

    def search(self, queries: NDArray[np.floating], k: int) -> Candidates:
        """Return the best k items of each query, or fewer if there are not as many; thread-safe.

        Raises:
            SchemaError: queries have another width, or are not finite. ConfigError: k below 1.
        """
        asked = _numbers(queries, "queries")
        if asked.ndim != 2 or asked.shape[1] != self.vectors.shape[1]:
            raise SchemaError(
                "queries must have the width of the items", value=asked.shape, allowed=f"(B, {self.vectors.shape[1]})"
            )
        if not np.isfinite(asked).all():
            row = int(np.flatnonzero(~np.isfinite(asked).all(1))[0])
            raise SchemaError("a query is not finite", where=f"row {row}")
        check_count(k, "neighbours", rows=len(asked))
        if self._search is None:
            return self.exact(asked, k)
        with self._lock:
            place, scores = self._search(asked, min(k, len(self.ids)))
        items = np.where(place < 0, NO_ITEM, self.ids[place])
        return in_order(items, np.where(place < 0, -np.inf, scores)).first(k)

    def exact(self, queries: NDArray[np.float32], k: int) -> Candidates:
        """Return the result of exact search with torch, the reference of all kinds."""
        asked = torch.from_numpy(queries).to(self.device)
        count, parts = min(k, len(self.ids)), []
        step = max(1, _MOST_SCORES // len(self.ids))
        for first in range(0, len(asked), step):
            best = (asked[first : first + step] @ self._torch.T).topk(count, 1)
            parts.append((self.ids[best.indices.cpu().numpy()], best.values.cpu().numpy()))
        if not parts:
            return Candidates(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        items, scores = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return in_order(items, scores).first(k)

    def measure_recall(self, queries: NDArray[np.floating], k: Sequence[int] = (10, 100)) -> dict[str, float]:
        """Measure the fraction of the exact k nearest items that the index finds, and store it for `save`.

        An item at the same distance as the k-th, by rounding or because vectors are equal, counts as found.
        """
        asked = _numbers(queries, "queries")
        self.recall = {}
        for one in k:
            check_count(one, "neighbours")
            count = min(one, len(self.ids))
            check_fits(len(asked) * count**2, f"the recall of {count:,} neighbours of {len(asked):,} queries")
            found = self.search(asked, count)
            truth = self.exact(asked, count)
            own = (found.items[:, :, None] == truth.items[:, None, :]).any(2)
            near = np.abs(truth.scores[:, -1:]) * 1e-5 + 1e-6
            found_as_near = own | (found.scores >= truth.scores[:, -1:] - near)
            # Quantized scores are not comparable: for them the item itself must be among the nearest.
            hit = own if self.settings.kind == "sq8" else found_as_near
            self.recall[str(one)] = float((hit & (found.items >= 0)).sum(1).mean() / count)
        return self.recall

    def vectors_of(self, items: Ids) -> NDArray[np.float32]:
        """Return the vectors of items, (..., d), zeros for items that are not in the index."""
        order = np.argsort(self.ids)
        place = np.searchsorted(self.ids, items, sorter=order).clip(0, len(self.ids) - 1)
        at = order[place]
        known = self.ids[at] == items
        return np.asarray(self.vectors[at] * known[..., None], dtype=np.float32)

    def save(self, folder: str | AnyPath) -> AnyPath:
        """Write the index to a folder, atomically; the folder may be a URL."""
        path = location(folder)
        if path.exists() and (
            not path.is_dir() or (any(True for _ in path.iterdir()) and not (path / INDEX_FILE).exists())
        ):
            raise ConfigError(
                "this is not an index, so it is not replaced", where=str(path), fix="choose another folder"
            )
        with replace_folder(path) as work:
            np.save(work / "vectors.npy", self.vectors)
            np.save(work / "ids.npy", self.ids)
            if self._search is not None and self.settings.kind != "flat":
                (work / "index.faiss").write_bytes(self._search.to_bytes())
            content = IndexFile(
                settings=self.settings, num_vectors=len(self.ids), dim=self.vectors.shape[1],
                num_items=self.num_items, model=self.model, recall=self.recall,
                sha256={name: file_sha256(work / name) for name in _FILES if (work / name).exists()},
            )  # fmt: skip
            write_json_atomic(work / INDEX_FILE, content.to_dict())
        return path

    @classmethod
    def load(cls, folder: str | AnyPath, *, model: str | None = None, device: torch.device | str = "cpu") -> Self:
        """Load and verify an index.

        Args:
            model: checksum of the current model; an index of another model is refused.
            device: device of the search.

        Raises:
            CheckpointError: there is no index, a file is missing or altered, or it belongs to another model.
        """
        path = local_copy(folder)
        content = _read(path, str(folder))
        if model is not None and content.model not in (None, model):
            raise CheckpointError(
                "the index was built from another version of the model", where=str(folder),
                value=f"{content.model}, the model is {model}", fix="rebuild it: viviane index build MODEL",
            )  # fmt: skip
        vectors = read_array(path / _FILES[0], np.float32, 2, CheckpointError)
        ids = read_array(path / _FILES[1], np.int64, 1, CheckpointError)
        if vectors.shape != (content.num_vectors, content.dim) or ids.shape != (content.num_vectors,):
            value = f"{vectors.shape}, {ids.shape}"
            raise CheckpointError("the files of the index do not match index.json", where=str(folder), value=value)
        faiss = (path / "index.faiss").read_bytes() if "index.faiss" in content.sha256 else None
        try:
            index = cls(
                vectors, ids, content.settings, num_items=content.num_items, model=content.model, device=device,
                _faiss=faiss,
            )  # fmt: skip
        except SchemaError as error:
            raise CheckpointError(
                "the files of the index are inconsistent", where=str(folder), value=error.what
            ) from None
        index.recall = dict(content.recall)
        return index


def _with_recall(kind: type[ItemIndex], given: tuple[Any, ...], recall: dict[str, float]) -> ItemIndex:
    vectors, ids, settings, num_items, model, device, faiss = given
    index = kind(vectors, ids, settings, num_items=num_items, model=model, device=device, _faiss=faiss)
    index.recall = dict(recall)
    return index


def _read(path: Path, where: str) -> IndexFile:
    refuse_links(path, [INDEX_FILE], CheckpointError)
    if not (path / INDEX_FILE).is_file():
        fix = "build one: viviane index build MODEL"
        raise CheckpointError("no index found", where=where, allowed=f"a folder with {INDEX_FILE}", fix=fix)
    try:
        content = IndexFile.from_dict(load_json(path / INDEX_FILE))
    except VivianeError as error:
        raise CheckpointError("index.json cannot be read", where=where, value=error.what) from error
    for name in _FILES[:2]:
        if name not in content.sha256:
            raise CheckpointError(f"index.json lacks {name}", where=where)
    if (content.settings.kind in ("ivf", "hnsw", "sq8")) != ("index.faiss" in content.sha256):
        raise CheckpointError("index.json does not match its kind", where=where, value=content.settings.kind)
    for name, expected in content.sha256.items():
        if name not in _FILES:
            raise CheckpointError("index.json names an unexpected file", where=where, value=name)
        file = file_inside(path, name, where=INDEX_FILE, error=CheckpointError)
        if not file.is_file() or file_sha256(file) != expected:
            what = "a file of the index is missing or was altered: its checksum differs"
            raise CheckpointError(what, where=str(path / name), fix="load another copy, or rebuild it")
    return content


def _numbers(values: Any, what: str) -> NDArray[np.float32]:
    return float_array(values, what, SchemaError)
