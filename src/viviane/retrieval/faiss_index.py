"""Settings of an index, and approximate search by faiss."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.retrieval.faiss_content import read_faiss

IndexKind: TypeAlias = Literal["exact", "flat", "ivf", "hnsw", "sq8"]
_MOST: Final = 1 << 30
_MOST_DEPTH: Final = 1 << 20  # faiss reserves memory for so many candidates for each query
_MOST_SEED: Final = (1 << 31) - 2000  # faiss's seeds have 32 bits, and ours is not its own
_TRAINING_POINTS = 39  # per list, required by faiss


class IndexSettings(Settings):
    """Settings of the search.

    Args:
        kind: "exact", torch's matrix products on any device; "flat", the same in faiss; "ivf", lists of which some are
            searched; "hnsw", a graph; "sq8", lists of vectors with 8 bits per element.
        num_lists: for "ivf" and "sq8"; None: 4 sqrt(n), or fewer if a list would have less than 39 vectors.
        num_probes: for "ivf" and "sq8": number of lists to search; None: an eighth of them, at least 8.
        num_links: for "hnsw": neighbours per node.
        build_depth, search_depth: for "hnsw": candidates kept while building, and while searching.
        seed: seed of the clustering.
    """

    kind: IndexKind = "exact"
    num_lists: int | None = Field(default=None, ge=1, le=_MOST)
    num_probes: int | None = Field(default=None, ge=1, le=_MOST)
    num_links: int = Field(default=32, ge=2, le=4096)
    build_depth: int = Field(default=80, ge=1, le=_MOST_DEPTH)
    search_depth: int = Field(default=128, ge=1, le=_MOST_DEPTH)
    seed: int = Field(default=0, ge=-(1 << 31), le=_MOST_SEED)


class FaissSearch:
    """A faiss index of vectors, by inner product; not thread-safe.

    Args:
        vectors: (n, d).
        settings: kind and its settings.
        device: "cpu", or a GPU if faiss supports it.
        content: serialized index from `to_bytes`, to load instead of building one.

    Raises:
        MissingExtraError: faiss is not installed.
        CheckpointError: `content` is not an index of these vectors.
    """

    def __init__(
        self, vectors: NDArray[np.float32], settings: IndexSettings, device: torch.device, content: bytes | None = None
    ) -> None:
        self._faiss = require("faiss", extra="retrieval", purpose=f"an index of kind {settings.kind!r}")
        self.settings = settings
        if content is None:
            index = self._build(vectors)
        else:
            index = read_faiss(self._faiss, content, settings.kind, vectors, self._num_lists(len(vectors)))
        self._set_depth(index, len(vectors))
        self._on_cpu = index
        self._index = index if device.type == "cpu" else self._to_gpu(index, device)

    def __call__(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return positions, -1 for none, and scores, (B, k)."""
        scores, places = self._index.search(queries, k)
        return places, scores

    def to_bytes(self) -> bytes:
        """Return the index, serialized by faiss."""
        return bytes(self._faiss.serialize_index(self._on_cpu).tobytes())

    def _build(self, vectors: NDArray[np.float32]) -> Any:
        faiss, settings, (size, dim) = self._faiss, self.settings, vectors.shape
        inner = faiss.METRIC_INNER_PRODUCT
        if settings.kind == "flat":
            index = faiss.IndexFlatIP(dim)
        elif settings.kind == "hnsw":
            index = faiss.IndexHNSWFlat(dim, settings.num_links, inner)
            index.hnsw.efConstruction = settings.build_depth
        else:
            lists = self._num_lists(size)
            quantizer = faiss.IndexFlatIP(dim)
            if settings.kind == "ivf":
                index = faiss.IndexIVFFlat(quantizer, dim, lists, inner)
            else:
                bits = faiss.ScalarQuantizer.QT_8bit
                index = faiss.IndexIVFScalarQuantizer(quantizer, dim, lists, bits, inner)
            index.cp.seed = settings.seed + 1234
            index.cp.min_points_per_centroid = 1  # small catalogues have few points; faiss would warn
            index.train(vectors)
        index.add(vectors)
        return index

    def _num_lists(self, size: int) -> int:
        asked = self.settings.num_lists
        if asked is not None:
            if asked > size:
                raise ConfigError("more lists than vectors", where="num_lists", value=asked, allowed=f"at most {size}")
            return asked
        return max(1, min(round(4 * math.sqrt(size)), size // _TRAINING_POINTS))

    def _set_depth(self, index: Any, size: int) -> None:
        if self.settings.kind == "hnsw":
            index.hnsw.efSearch = self.settings.search_depth
        elif self.settings.kind in ("ivf", "sq8"):
            lists = self._num_lists(size)
            index.nprobe = min(self.settings.num_probes or max(8, lists // 8), lists)

    def _to_gpu(self, index: Any, device: torch.device) -> Any:
        if not hasattr(self._faiss, "StandardGpuResources"):
            fix = "install faiss's GPU build, use kind 'exact', or search on the CPU"
            raise ConfigError("this faiss is built without GPU support", where="device", value=str(device), fix=fix)
        if self.settings.kind == "hnsw":
            raise ConfigError("faiss has no graph index on a GPU", value="hnsw", allowed="flat, ivf, sq8")
        self._resources = self._faiss.StandardGpuResources()
        return self._faiss.index_cpu_to_gpu(self._resources, device.index or 0, index)
