"""Arrays of another type, size, order or memory are refused before compiled code reads or writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from viviane.batch import Bag
from viviane.config.optimizers import SGD
from viviane.core.errors import VivianeError
from viviane.embedding import (
    DynamicTable,
    DynamicTableConfig,
    EmbeddingBag,
    EmbeddingCollection,
    FeatureConfig,
    TableConfig,
)
from viviane.embedding.dynamic_content import DynamicContent
from viviane.ops.row_cache import RowCache
from viviane.retrieval import Histories, ItemIndex, Popularity, Recommender
from viviane.store import ArrayTier, Column, FileTier, HostTier, RowLayout, SortedRunTier
from viviane.store.cache import CacheTier

LAYOUT = RowLayout([Column("weight", "float32", 4)])
KEYS = np.array([5, 6, 7])
WRONG_KEYS: dict[str, Any] = {
    "int32": KEYS.astype(np.int32), "float": KEYS.astype(np.float64), "twice as far": np.arange(6)[::2],
    "backward": KEYS[::-1], "matrix": KEYS.reshape(3, 1), "list": [5, 6, 7], "number": 3, "none": None,
    "objects": KEYS.astype(object), "masked": np.ma.masked_array(KEYS, [True, False, True]),
}  # fmt: skip
WRONG_ROWS: dict[str, Any] = {
    "fewer": np.zeros((2, 16), np.uint8), "narrow": np.zeros((3, 15), np.uint8), "float": np.zeros((3, 16), np.float32),
    "gaps": np.zeros((3, 32), np.uint8)[:, ::2], "list": [[0] * 16] * 3, "flat": np.zeros(48, np.uint8), "none": None,
}  # fmt: skip


def tier(name: str, folder: Path) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "cache": lambda: CacheTier(LAYOUT, 64), "host": lambda: HostTier(LAYOUT),
        "file": lambda: FileTier(folder / "f", LAYOUT, 20), "runs": lambda: SortedRunTier(folder / "r", LAYOUT),
        "array": lambda: ArrayTier(np.zeros((20, 16), np.uint8), LAYOUT),
    }  # fmt: skip
    return made[name]()


@pytest.mark.parametrize("name", ["cache", "host", "file", "runs"])
def test_tiers_refuse_other_keys_and_rows(name: str, tmp_path: Path) -> None:
    """The cache read keys and wrote rows beyond their ends, which damaged the heap."""
    made = tier(name, tmp_path)
    made.put(KEYS, np.ones((3, 16), np.uint8))
    methods = [one for one in ("fetch", "put", "replace", "fill") if hasattr(made, one)]
    for method in methods:
        for keys in WRONG_KEYS.values():
            with pytest.raises(VivianeError):
                getattr(made, method)(keys, np.zeros((3, 16), np.uint8))
        for rows in WRONG_ROWS.values():
            with pytest.raises(VivianeError):
                getattr(made, method)(KEYS, rows)
    for keys in WRONG_KEYS.values():
        with pytest.raises(VivianeError):
            made.erase(keys)
    frozen = np.frombuffer(bytes(48), np.uint8).reshape(3, 16)
    with pytest.raises(VivianeError, match=r"read-only|cannot be written"):
        made.fetch(KEYS, frozen)
    assert not frozen.any()
    out = np.zeros((3, 16), np.uint8)
    assert made.fetch(KEYS, out).all()
    assert out.all()
    for batch_rows in (0, -1, 1.5, None, "x", True):  # a scan by none at once had no end
        with pytest.raises(VivianeError, match="at least one row"):
            next(iter(made.scan(batch_rows)))
    made.put(KEYS[:0], np.zeros((0, 16), np.uint8))
    assert not len(made.fetch(KEYS[:0], out[:0]))
    made.close()


def test_a_row_cache_refuses_rows_that_overlap() -> None:
    cache = RowCache(16, 16)
    cache.insert(KEYS, np.ones((3, 16), np.uint8))
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(32, np.uint8), (3, 16), (8, 1))
    with pytest.raises(VivianeError, match="cannot be written"):
        cache.find(KEYS, overlapping)
    wide = np.zeros((3, 48), np.uint8)
    assert cache.find(KEYS, wide[:, 16:32]).all()
    assert wide.sum() == 48


SPARSE = torch.tensor([1, 2, 3]).to_sparse()
META = torch.zeros(3, dtype=torch.int64, device="meta")
BOUNDS = torch.tensor([0, 3])


@pytest.mark.parametrize("wrong", [SPARSE, META], ids=["sparse", "meta"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_lookups_refuse_tensors_without_memory(wrong: torch.Tensor, mode: str) -> None:
    bag, ids = EmbeddingBag(9, 4, mode=mode), torch.tensor([1, 2, 3])
    for given in ((wrong, torch.tensor([0])), (ids, wrong), (wrong,)):
        with pytest.raises(VivianeError):
            bag(*given)
    if mode == "sum":
        with pytest.raises(VivianeError):
            bag(ids, torch.tensor([0]), wrong.to(torch.float32))
    table = TableConfig(name="t", num_rows=9, dim=4)
    features = [FeatureConfig(name="a", table="t", combiner="mean" if mode == "mean" else "sum")]
    collection = EmbeddingCollection([table], features, SGD())
    for one in (Bag(wrong, BOUNDS), Bag(ids, wrong), Bag(ids, BOUNDS, wrong.to(torch.float32)), wrong):
        with pytest.raises(VivianeError):
            collection({"a": one})


def test_a_dynamic_table_refuses_what_is_no_vector_of_whole_numbers() -> None:
    table = DynamicTable(DynamicTableConfig(name="d", dim=4, max_capacity=64), SGD())
    wrong: list[Any] = [3, None, [1, 2], np.arange(3), SPARSE, META, torch.tensor([1.5]), torch.tensor([True])]
    for keys in wrong:
        with pytest.raises(VivianeError):
            table(keys)
    ids, weight, none = torch.tensor([1, 2, 3]), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for part in [*wrong, torch.tensor([1, 2]), torch.tensor([[1, 2, 3]])]:
        for content in (
            DynamicContent(part, weight, none, none, {}), DynamicContent(ids, weight, part, none, {}),
            DynamicContent(ids, part, none, none, {}),
        ):  # fmt: skip
            with pytest.raises(VivianeError):
                table.import_(content)
    assert not len(table.export().keys)


@pytest.mark.parametrize(
    ("values", "offsets"),
    [([3, 4], [0, 2]), (np.array([3.0]), np.array([0, 1])), (np.array([3]), np.array([0, 2])),
     (np.array([3, 4]), np.array([0, 2, 1, 2])), (np.array([3]), np.array([], np.int64)),
     (np.array([3]), np.array([-1, 1])), (np.array([[3]]), np.array([0, 1])), (None, None)],
)  # fmt: skip
def test_histories_refuse_other_arrays(values: Any, offsets: Any) -> None:
    with pytest.raises(VivianeError):
        Histories(values, offsets)


def test_searches_and_recommendations_refuse_other_arguments() -> None:
    index = ItemIndex(np.eye(4, dtype=np.float32), np.arange(3, 7))
    recommender = Recommender([Popularity(np.ones(7))])
    for k in (0, -1, 1.5, None, "x"):
        with pytest.raises(VivianeError):
            index.search(np.zeros((1, 4)), k)  # type: ignore[arg-type]
        with pytest.raises(VivianeError):
            recommender.recommend([[3]], k)  # type: ignore[arg-type]
    for vectors in ("x", None, [["a"]], [[1, 2], [3]], {}):
        with pytest.raises(VivianeError):
            index.search(vectors, 1)  # type: ignore[arg-type]
        with pytest.raises(VivianeError):
            ItemIndex(vectors)  # type: ignore[arg-type]
    for histories in ("x", None, 3, [3], [["a"]], [[1.5]], {"a": 1}, np.arange(3)):
        with pytest.raises(VivianeError):
            recommender.recommend(histories, 1)
    with pytest.raises(VivianeError, match="put in order"):
        Histories.of_events([1, 2], [3, 4], [{}, {}])
