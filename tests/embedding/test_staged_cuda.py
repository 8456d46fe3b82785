"""A GPU's cache over host memory against the same tables whole on the GPU: every bit; needs a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_cached_storage import ROWS, RULES, assert_equal, batches, content, row_bytes

from viviane.batch import Bag
from viviane.embedding import CachedStorage, CacheSettings, EmbeddingCollection, FeatureConfig, TableConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def collection(
    share: float | None, optimizer: Any, host_memory: int | None = None, dtype: str = "float32", dim: int = 8
) -> EmbeddingCollection:
    tables = [TableConfig(name=name, num_rows=rows, dim=dim, dtype=dtype) for name, rows in ROWS.items()]
    features = [
        FeatureConfig(name="u", table="user"),
        FeatureConfig(name="i", table="item", combiner="mean"),
        FeatureConfig(name="s", table="shop"),
        FeatureConfig(name="last", table="item", combiner="concat", max_length=3),
    ]
    cache = None
    if share is not None:
        size = row_bytes(tables[0], optimizer)
        sizes = {name: max(1, round(ROWS[name] * share)) * size for name in ("user", "item")}
        cache = CacheSettings(tables=sizes, host_memory=host_memory)
    return EmbeddingCollection(tables, features, optimizer, device="cuda", seed=3, cache=cache)


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: one.to("cuda") if isinstance(one, Bag | torch.Tensor) else one for name, one in batch.items()}


def train(emb: EmbeddingCollection, given: list[dict[str, Any]], ahead: int, clip: bool) -> list[float]:
    there = [on_gpu(one) for one in given]
    losses, announced = [], 0
    for i, batch in enumerate(there):
        while announced < min(len(there), i + 1 + ahead) and emb.resolve_ahead(there[announced], given[announced]):
            announced += 1
        loss = emb(batch).flat.tanh().sum()
        loss.backward()
        scale = 0.5 / emb.grad_norm_squared().sqrt().clamp_min(0.5) if clip else 1.0
        emb.step(lr=0.05, scale=scale)
        emb.forget_ahead(batch)
        announced = max(announced, i + 1)
        losses.append(loss)
    emb.end_ahead()
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("staged", [False, True])
def test_every_bit_is_that_of_tables_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, staged: bool, rule: str, ahead: int, clip: bool
) -> None:
    monkeypatch.setattr("viviane.store.streams.DeviceStreams.maps_memory", not staged)
    monkeypatch.setattr("viviane.embedding.staged_moves.PIECE_BYTES", 1000)
    given = batches(30)
    truth, cached = collection(None, RULES[rule]), collection(0.2, RULES[rule])
    assert cached.has_tiers
    assert train(truth, given, 0, clip) == train(cached, given, ahead, clip)
    assert_equal(
        {name: part.cpu() for name, part in content(truth).items()},
        {name: part.cpu() for name, part in content(cached).items()},
    )
    [storage] = [one for one in cached.all_storages() if isinstance(one, CachedStorage)]
    assert storage.tier_stats()["host"].rows_written > 0
    assert storage.cache.plans_on_host == staged


@pytest.mark.parametrize("dim", [7, 8, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "row-wise adagrad"])
@pytest.mark.parametrize("staged", [False, True])
def test_rows_of_16_bits(monkeypatch: pytest.MonkeyPatch, staged: bool, rule: str, dtype: str, dim: int) -> None:
    monkeypatch.setattr("viviane.store.streams.DeviceStreams.maps_memory", not staged)
    given = batches(20)
    truth, cached = (collection(share, RULES[rule], dtype=dtype, dim=dim) for share in (None, 0.3))
    assert train(truth, given, 0, True) == train(cached, given, 3, True)
    assert_equal(
        {name: part.cpu() for name, part in content(truth).items()},
        {name: part.cpu() for name, part in content(cached).items()},
    )
    [storage] = [one for one in cached.all_storages() if isinstance(one, CachedStorage)]
    assert storage.cache.plans_on_host == (staged or dim == 7)


def test_many_caches_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """More caches than torch has streams: with streams of their own they lost updates on a busy GPU."""
    monkeypatch.setattr("viviane.store.streams.DeviceStreams.maps_memory", False)
    monkeypatch.setattr("viviane.embedding.staged_moves.PIECE_BYTES", 1000)
    given = batches(30)
    truth = train(collection(None, RULES["adam"]), given, 0, False)
    assert all(train(collection(0.2, RULES["adam"]), given, 3, False) == truth for _ in range(34))


def test_host_memory_over_files() -> None:
    given = batches(30)
    truth, cached = collection(None, RULES["adam"]), collection(0.15, RULES["adam"], host_memory=9_000)
    assert train(truth, given, 0, True) == train(cached, given, 2, True)
    assert_equal(
        {name: part.cpu() for name, part in content(truth).items()},
        {name: part.cpu() for name, part in content(cached).items()},
    )


def test_forwards_without_backward_take_no_more_memory() -> None:
    emb = collection(0.2, RULES["sgd"])
    given = [on_gpu(one) for one in batches(10)]
    for i in range(10_000):
        emb(given[i % 10])
        if i == 200:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
