"""Reading a serialized faiss index that may be crafted: bounded allocations, and no place outside of its arrays.

faiss follows the numbers of a file without a check: a list count of 2^40 takes all memory, and a neighbour that does
not exist is read from beyond the array.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import CheckpointError

_LIMITS: Final = threading.Lock()  # the limits of faiss are those of the process
_MOST_LEVELS: Final = 64


def read_faiss(faiss: Any, content: bytes, kind: str, vectors: NDArray[np.float32], num_lists: int) -> Any:
    """Return the index in `content`.

    Args:
        faiss: the module.
        content: bytes of `faiss.serialize_index`.
        kind: "flat", "ivf", "hnsw" or "sq8".
        vectors: (n, d), what the index must hold.
        num_lists: how many lists "ivf" and "sq8" must have.

    Raises:
        CheckpointError: `content` is not an index of this kind and of these vectors, or its parts do not fit together.
    """
    with _limited(faiss, len(content), max(len(vectors), num_lists, 1024)):
        try:
            index = faiss.deserialize_index(np.frombuffer(content, dtype=np.uint8))
        except (RuntimeError, MemoryError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError("index.faiss cannot be read", value=first[:300]) from error
    expected = {
        "flat": faiss.IndexFlatIP, "ivf": faiss.IndexIVFFlat, "sq8": faiss.IndexIVFScalarQuantizer,
        "hnsw": faiss.IndexHNSWFlat,
    }[kind]  # fmt: skip
    _need(type(index) is expected, f"it is a {type(index).__name__}", expected.__name__)
    if (index.ntotal, index.d) != vectors.shape:
        value = f"{index.ntotal} x {index.d}, {vectors.shape[0]} x {vectors.shape[1]}"
        raise CheckpointError("the vectors of index.faiss differ from vectors.npy", value=value)
    _need(index.metric_type == faiss.METRIC_INNER_PRODUCT, f"metric {index.metric_type}", "inner product")
    if kind == "flat":
        _check_stored(faiss, index, "the index", vectors)
    elif kind == "hnsw":
        _check_graph(faiss, index, vectors)
    else:
        _check_lists(faiss, index, kind, vectors, num_lists)
    return index


@contextmanager
def _limited(faiss: Any, num_bytes: int, num_rounds: int) -> Iterator[None]:
    """Let no array of a file be larger than the file, and no loop longer than the index."""
    names = ("deserialization_vector_byte_limit", "deserialization_loop_limit")
    if not all(hasattr(faiss, f"set_{name}") for name in names):
        yield  # an older faiss has no limits
        return
    with _LIMITS:
        before = [getattr(faiss, f"get_{name}")() for name in names]
        try:
            for name, value in zip(names, (num_bytes, num_rounds), strict=True):
                getattr(faiss, f"set_{name}")(value)
            yield
        finally:
            for name, value in zip(names, before, strict=True):
                getattr(faiss, f"set_{name}")(value)


def _need(fits: object, value: str, allowed: str | None = None) -> None:
    if not fits:
        fix = "rebuild it: viviane index build MODEL"
        raise CheckpointError("index.faiss is damaged", value=value, allowed=allowed, fix=fix)


def _check_flat(faiss: Any, part: Any, what: str, num_vectors: int, dim: int) -> NDArray[np.float32]:
    """Check vectors that a flat index holds, and return them."""
    flat: Any = faiss.downcast_index(part) if part is not None else None
    _need(isinstance(flat, faiss.IndexFlat), f"{what} {type(flat).__name__}", "IndexFlat")
    _need((flat.ntotal, flat.d) == (num_vectors, dim), f"{what} {flat.ntotal} x {flat.d}", f"{num_vectors} x {dim}")
    _need(flat.metric_type == faiss.METRIC_INNER_PRODUCT, f"metric {flat.metric_type} of {what}", "inner product")
    _need(flat.code_size == 4 * dim and flat.codes.size() == 4 * num_vectors * dim, f"{what} has another size")
    return np.asarray(faiss.rev_swig_ptr(flat.get_xb(), num_vectors * dim)).reshape(num_vectors, dim)


def _check_stored(faiss: Any, part: Any, what: str, vectors: NDArray[np.float32]) -> None:
    """Check that a flat index holds the vectors."""
    stored = _check_flat(faiss, part, what, *vectors.shape)
    _need(np.array_equal(stored, vectors), "its vectors differ from vectors.npy")


def _check_graph(faiss: Any, index: Any, vectors: NDArray[np.float32]) -> None:
    """Check that every link of the graph leads to a node that its level has."""
    num = len(vectors)
    _check_stored(faiss, index.storage, "the storage", vectors)
    graph = index.hnsw
    counts, levels, starts, links = (
        faiss.vector_to_array(part).astype(np.int64)
        for part in (graph.cum_nneighbor_per_level, graph.levels, graph.offsets, graph.neighbors)
    )
    _need(0 < len(counts) <= _MOST_LEVELS and counts[0] == 0 and (np.diff(counts) >= 0).all(), "its levels")
    _need(len(levels) == num and levels.min() >= 1 and levels.max() < len(counts), "the levels of its nodes")
    sizes = counts[levels]
    _need(
        len(starts) == num + 1 and starts[0] == 0 and np.array_equal(np.diff(starts), sizes), "the places of its links"
    )
    _need(len(links) == starts[-1] and links.min(initial=-1) >= -1 and links.max(initial=-1) < num, "a link to no node")
    within = np.arange(len(links)) - np.repeat(starts[:-1], sizes)
    level = np.searchsorted(counts, within, side="right") - 1
    used = links >= 0
    _need((levels[links[used]] > level[used]).all(), "a link to a node that is not on its level")
    _need(0 <= graph.entry_point < num, f"entry point {graph.entry_point}", f"0 to {num - 1}")
    _need(graph.max_level == levels[graph.entry_point] - 1, f"top level {graph.max_level}")


def _check_lists(faiss: Any, index: Any, kind: str, vectors: NDArray[np.float32], num_lists: int) -> None:
    """Check that the lists hold every vector once."""
    num, dim = vectors.shape
    _need(index.nlist == num_lists, f"{index.nlist} lists", str(num_lists))
    _check_flat(faiss, index.quantizer, "the quantizer", num_lists, dim)
    size = 4 * dim
    if kind == "sq8":
        size, sq = dim, index.sq
        fits = (sq.qtype, sq.d, sq.code_size) == (faiss.ScalarQuantizer.QT_8bit, dim, dim)
        _need(fits and sq.trained.size() == 2 * dim, f"a quantizer of {sq.d} elements in {sq.code_size} bytes")
    lists: Any = faiss.downcast_InvertedLists(index.invlists) if index.invlists is not None else None
    _need(isinstance(lists, faiss.ArrayInvertedLists), f"lists of type {type(lists).__name__}", "ArrayInvertedLists")
    _need(
        (lists.nlist, lists.code_size, index.code_size) == (num_lists, size, size), f"codes of {lists.code_size} bytes"
    )
    _need(index.is_trained, "it is not trained")
    sizes = [lists.list_size(i) for i in range(num_lists)]
    _need(sum(sizes) == num, f"{sum(sizes)} vectors in its lists", str(num))
    ids = [np.array(faiss.rev_swig_ptr(lists.get_ids(i), count)) for i, count in enumerate(sizes) if count]
    _need(np.array_equal(np.sort(np.concatenate(ids)), np.arange(num)), "its lists do not hold every vector once")
    if kind == "ivf":
        filled = (i for i, count in enumerate(sizes) if count)
        for i, rows in zip(filled, ids, strict=True):
            codes = np.asarray(faiss.rev_swig_ptr(lists.get_codes(i), len(rows) * size))
            _need(codes.tobytes() == vectors[rows].tobytes(), "its vectors differ from vectors.npy")
