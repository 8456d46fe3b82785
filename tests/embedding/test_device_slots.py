"""A cache that a "device" in host memory plans and fills itself, against tables that are whole in memory."""

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from staged import use_staged
from test_cached_storage import RULES, assert_equal, batches, content, train
from test_staged_moves import CASES, collection, storage_of

from viviane.config import SGD, Adam
from viviane.store import ArrayTier
from viviane.store.slots import CacheFullError


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return use_staged(monkeypatch, maps_memory=True)


@pytest.mark.parametrize(("rule", "share", "ahead"), CASES)
def test_every_bit_is_that_of_tables_in_memory(streams: list[Any], rule: str, share: float, ahead: int) -> None:
    given = batches(12)
    truth, cached = collection(None, RULES[rule]), collection(share, RULES[rule])
    assert train(truth, given) == train(cached, given, ahead=ahead)
    assert_equal(content(truth), content(cached))
    storage = storage_of(cached)
    assert not storage.cache.plans_on_host
    assert sum(one.num_jobs for one in streams) > 12
    stats = storage.tier_stats()
    assert stats["host"].bytes_written > 0
    assert stats["memory"].misses > 0
    assert stats["memory"].hits > 0


IN_CI = {("sgd", "bfloat16"), ("adam", "float16")}
KINDS = [
    pytest.param(rule, dtype, marks=() if (rule, dtype) in IN_CI else pytest.mark.slow)
    for rule in ("sgd", "adam", "row-wise adagrad")
    for dtype in ("float16", "bfloat16")
]


@pytest.mark.parametrize(("rule", "dtype"), KINDS)
def test_rows_of_16_bits(streams: list[Any], rule: str, dtype: str) -> None:
    given = batches(12)
    for dim in (3, 4):
        truth, cached = (collection(share, RULES[rule], dtype, dim=dim) for share in (None, 0.2))
        assert train(truth, given) == train(cached, given, ahead=2)
        assert_equal(content(truth), content(cached))
        assert storage_of(cached).cache.plans_on_host == (dim % 2 == 1)  # rows that are no whole words


def test_a_batch_that_does_not_fit_names_the_size_and_changes_nothing(streams: list[Any]) -> None:
    emb = collection(0.05, SGD())
    train(emb, batches(3, size=4))
    before = content(emb)
    large = {**batches(1, size=90)[0], "u": torch.arange(90)}
    with pytest.raises(CacheFullError, match=r"(?s)table 'user'.*90 distinct rows in use at once.*20 rows"):
        emb(large)
    assert emb.resolve_ahead(large)  # whether its rows fit is known when it is looked up
    with pytest.raises(CacheFullError, match=r"(?s)table 'user'.*90 distinct rows in use at once.*20 rows"):
        emb(large)
    assert_equal(before, content(emb))
    with torch.no_grad():
        assert torch.equal(emb.eval()(large).flat, collection_of(before)(large).flat)
    train(emb.train(), batches(3, size=4))


def collection_of(state: dict[str, torch.Tensor]) -> Any:
    emb = collection(None, SGD())
    emb.load_state_dict(state)
    return emb.eval()


def test_batches_announced_too_early_are_admitted_when_their_turn_comes(streams: list[Any]) -> None:
    given = [{**batches(1, size=12)[0], "u": torch.arange(12) + 12 * i} for i in range(10)]
    truth, cached = collection(None, Adam()), collection(0.08, Adam())  # 32 rows of a user: two batches of 12 fit
    assert train(truth, given) == train(cached, given, ahead=3)
    assert_equal(content(truth), content(cached))


def test_frozen_tables_are_never_written_back(streams: list[Any]) -> None:
    truth, cached = collection(None, Adam()), collection(0.1, Adam())
    for one in (truth, cached):
        one.freeze("item")
        train(one, batches(10, size=6), ahead=2)
    assert_equal(content(truth), content(cached))
    storage = storage_of(cached)
    first = storage.regions["item"].first_slot
    storage.finish_moves()
    assert not storage.cache.table.dirty[first : first + storage.regions["item"].num_slots].any()
    assert storage.tier_stats()["host"].rows_written > 0


def test_passes_and_rows_written_between_steps(streams: list[Any]) -> None:
    given = batches(8)
    truth, cached = collection(None, Adam()), collection(0.3, Adam())
    storage = storage_of(cached)
    moved = storage.begin_pass({"user": np.arange(100), "item": np.arange(10, 60)})
    assert (moved.rows, moved.read, moved.written) == (150, 150, 0)
    assert train(truth, given, clip=False) == train(cached, given, clip=False)
    moved = storage.begin_pass({"user": np.arange(50, 160)})
    assert moved.rows == 110
    assert moved.read > 0
    assert moved.written > 0
    for emb in (truth, cached):
        state = emb.export_table("user")
        state.weight[:] = torch.arange(400.0)[:, None]
        emb.import_table("user", state)
    assert train(truth, given) == train(cached, given, ahead=2)
    assert_equal(content(truth), content(cached))


def test_forwards_without_backward_take_no_more_memory(streams: list[Any]) -> None:
    emb = collection(0.1, SGD())
    given = batches(10)
    for i in range(100):
        emb(given[i % 10])
    gc.collect()
    assert not storage_of(emb)._live
    assert not storage_of(emb)._leases


def test_all_rows_lie_in_host_memory_from_the_beginning(streams: list[Any]) -> None:
    truth, cached = collection(None, Adam()), collection(0.1, Adam())
    tiers = storage_of(cached).tiers
    assert all(isinstance(one, ArrayTier) and one.num_rows() == one.num_ids for one in tiers.values())
    assert_equal(content(truth), content(cached))


def test_tables_of_which_host_memory_holds_a_part_are_planned_by_the_host(streams: list[Any]) -> None:
    given = batches(10, size=8)
    truth, cached = collection(None, Adam()), collection(0.2, Adam(), host_memory=80 * 54)
    assert storage_of(cached).cache.plans_on_host
    assert train(truth, given) == train(cached, given, ahead=2)
    assert_equal(content(truth), content(cached))


def test_more_rows_than_the_device_numbers_are_planned_by_the_host(
    streams: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viviane.embedding.construction.MAX_ROWS", 450)  # two tables of 400 and 60 rows
    assert storage_of(collection(0.2, Adam())).cache.plans_on_host


def test_rows_of_a_tier_are_found_where_training_has_left_them(streams: list[Any]) -> None:
    truth, cached = collection(None, Adam()), collection(0.1, Adam())
    for emb in (truth, cached):
        train(emb, batches(10, size=6), ahead=2)
    storage = storage_of(cached)
    tier = storage.tiers["user"]
    assert isinstance(tier, ArrayTier)
    storage.finish_moves()
    region = storage.regions["user"]
    outside = np.flatnonzero(storage.cache.places(np.arange(400) + region.first_row) < 0)
    moved = storage.cache.table.places_of(torch.from_numpy(outside + region.first_row)) - region.first_row
    assert (moved.numpy() != outside).sum() > 5
    whole = truth.export_table("user").weight.numpy()
    found = tier.layout.zeros(len(outside))
    assert tier.fetch(outside, found).all()
    assert np.array_equal(tier.layout.column(found, "weight").view(np.float32), whole[outside])
    scanned = {int(key): row for keys, rows in tier.scan(50) for key, row in zip(keys, rows, strict=True)}
    assert len(scanned) == 400
    assert all(np.array_equal(scanned[int(key)], row) for key, row in zip(outside, found, strict=True))
    storage.begin_as("user", lambda weight, keys: weight.copy_(keys[:, None].expand(weight.shape).to(weight.dtype)))
    assert torch.equal(cached.export_table("user").weight[:, 0], torch.arange(400.0))
