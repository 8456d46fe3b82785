"""The row cache of a GPU against a dict: search, replacement, eviction, both memories, lines that overflow."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from viviane.core.errors import ConfigError
from viviane.ops.row_cache import DeviceRowCache
from viviane.ops.row_cache.reference import DictCache

ROW_BYTES = 24


def rows_for(keys: np.ndarray, version: int) -> np.ndarray:
    return np.repeat((keys * 31 + version).astype(np.int64)[:, None], ROW_BYTES // 8, 1).view(np.uint8)


def look(cache: DeviceRowCache, keys: np.ndarray, table: int = 0) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((len(keys), ROW_BYTES), np.uint8)
    found = cache.find(keys, out, table)
    return found, out


@pytest.mark.parametrize("host_rows", [0, 90])
def test_it_is_a_dict_while_all_keys_fit(device, host_rows):
    random = np.random.default_rng(host_rows)
    capacity = 120 - host_rows
    cache, plain = DeviceRowCache(capacity, ROW_BYTES, device, host_capacity=host_rows), DictCache(ROW_BYTES)
    known = np.unique(np.concatenate([random.integers(-(2**63), 2**63 - 1, 110), [0, -1, 1, 2**63 - 1, -(2**63)]]))
    for step in range(8):
        some = random.choice(known, 40)
        if step % 4 == 3:
            assert cache.erase(some) == plain.erase(np.unique(some))
        else:
            cache.insert(some, rows_for(some, step))
            plain.insert(some, rows_for(some, step))
        asked = np.concatenate([random.choice(known, 30), [5, 6]])
        want = np.zeros((len(asked), ROW_BYTES), np.uint8)
        there = plain.find(asked, want)
        found, out = look(cache, asked)
        assert (found == there).all()
        assert (out == want).all()
        assert len(cache) == len(plain.rows)
    assert cache.num_evicted == 0
    assert sorted(cache.keys().tolist()) == sorted(plain.rows)
    scanned = {
        key: row.tobytes() for keys, rows in cache.scan(64) for key, row in zip(keys.tolist(), rows, strict=True)
    }
    assert scanned == plain.rows


@pytest.mark.parametrize(("host_rows", "eviction"), [(0, "oldest"), (20, "oldest"), (20, "random")])
def test_a_full_cache_forgets_but_never_lies(device, host_rows, eviction):
    random = np.random.default_rng(7)
    cache = DeviceRowCache(20, ROW_BYTES, device, host_capacity=host_rows, eviction=eviction)
    newest: dict[int, int] = {}
    for step in range(8):
        keys = random.integers(0, 60, 15)
        cache.insert(keys, rows_for(keys, step))
        newest |= dict.fromkeys(keys.tolist(), step)
        assert len(cache) <= 20 + host_rows
        asked = np.arange(60)
        found, out = look(cache, asked)
        assert np.count_nonzero(found) == len(cache)
        for key in asked[found]:
            want = rows_for(np.array([key]), newest[int(key)])[0]
            assert (out[key] == want).all()
    assert cache.num_evicted > 0


def test_a_full_cache_takes_replacements_without_losing_rows(device):
    cache = DeviceRowCache(10, ROW_BYTES, device, host_capacity=10)
    keys = np.arange(20)
    cache.insert(keys, rows_for(keys, 0))
    for version in range(1, 8):
        cache.insert(keys, rows_for(keys, version))
    found, out = look(cache, keys)
    assert found.all()
    assert (out == rows_for(keys, 7)).all()
    assert cache.num_evicted == 0


def test_rows_of_two_tables_with_one_key_are_two_rows(device):
    cache = DeviceRowCache(100, ROW_BYTES, device)
    keys = np.arange(40)
    for table in (0, 3):
        cache.insert(keys, rows_for(keys, table), table)
    given = torch.from_numpy(np.repeat(keys, 2)).to(device)
    tables = torch.tensor([0, 3] * 40, dtype=torch.int32, device=device)
    wide = torch.zeros((80, 10), dtype=torch.float32, device=device)
    assert (cache.find_into(given, tables, wide[:, 2:8]) >= 0).all()
    got = wide[:, 2:8].contiguous().cpu().numpy().view(np.uint8)
    want = np.stack([rows_for(keys, 0), rows_for(keys, 3)], 1).reshape(80, ROW_BYTES)
    assert (got == want).all()
    assert not wide[:, :2].any()
    cache.clear(3)
    assert not look(cache, keys, 3)[0].any()
    assert look(cache, keys)[0].all()


@pytest.mark.parametrize("columns", [[1, 8, 15], [17, 0, 9]])
def test_a_request_puts_the_rows_of_features_into_their_columns(device, columns):
    cache, random = DeviceRowCache(60, ROW_BYTES, device, host_capacity=60), np.random.default_rng(3)
    keys = np.arange(40)
    for table in (0, 2):
        cache.insert(keys, rows_for(keys, table), table)
    for rows in (37, 5, 0):  # the second and third use the memory of the first
        out = torch.full((rows, 23), 7.0, device=device)
        asked = random.integers(-3, 45, (3, rows))
        with cache.requests.take(3, rows) as request:
            request.keys[:] = asked
            found = cache.find_for(request, out, columns, [0, 2, -1]).copy()
        assert (found == (np.isin(asked, keys) & np.array([[True], [True], [False]]))).all()
        got = out.cpu().numpy().view(np.int32)
        for feature, table in ((0, 0), (1, 2), (2, -1)):
            own = np.ascontiguousarray(got[:, columns[feature] : columns[feature] + 6]).view(np.uint8)
            want = np.where(found[feature][:, None], rows_for(asked[feature], table), 0)
            assert (own == want).all()
        between = np.setdiff1d(np.arange(23), np.concatenate([np.arange(6) + one for one in columns]))
        assert (out[:, between.tolist()] == 7.0).all()
    cache.insert(keys, rows_for(keys, 5), 2)  # no lookup holds places any more
    assert look(cache, keys, 2)[1].tobytes() == rows_for(keys, 5).tobytes()


def test_skipped_keys_read_zeros_and_are_not_used(device):
    cache, keys = DeviceRowCache(60, ROW_BYTES, device), np.arange(30)
    cache.insert(keys, rows_for(keys, 0))
    out, want = torch.full((10, 12), 7.0, device=device), np.ones((2, 10), bool)
    want[0, [3, 7]] = want[1, 0] = False
    asked = np.stack([keys[:10], keys[10:20]])
    for skips in (True, False, True, True, True):  # in the memory of one request, and recorded from the third on
        with cache.requests.take(2, 10) as request:
            request.keys[:] = asked
            if skips:
                request.skip(0, np.array([3, 7]))
                request.skip(1, np.array([0]))
            found = cache.find_for(request, out, [0, 6], [0, 0]).copy()
        assert (found == (want | (not skips))).all()
        got = np.ascontiguousarray(out.cpu().numpy()).view(np.uint8).reshape(10, 2, ROW_BYTES).swapaxes(0, 1)
        assert (got == np.where(found[..., None], rows_for(asked.ravel(), 0).reshape(2, 10, -1), 0)).all()
    time.sleep(0.3)
    with cache.requests.take(2, 10) as request:
        request.keys[:] = asked
        request.skip(0, np.array([3, 7]))
        cache.find_for(request, out, [0, 6], [0, 0])
    cache.evict_older(0.2)
    assert sorted(cache.keys().tolist()) == [key for key in range(20) if key not in (3, 7)]


def test_an_output_too_narrow_for_its_columns_is_refused(device):
    cache = DeviceRowCache(60, ROW_BYTES, device)
    with cache.requests.take(2, 3) as request, pytest.raises(ConfigError, match=r"\(3, 13 or more\)"):
        cache.find_for(request, torch.zeros(3, 12, device=device), [0, 7], [0, 0])


@pytest.mark.parametrize("columns", [[0], [0, 7, 8], [-1, 7]])
def test_columns_that_are_not_those_of_the_request_are_refused(device, columns):
    cache = DeviceRowCache(60, ROW_BYTES, device)
    with cache.requests.take(2, 3) as request, pytest.raises(ConfigError, match="2 of 0 and above"):
        cache.find_for(request, torch.zeros(3, 20, device=device), columns, [0, 0])


def test_tables_that_are_not_those_of_the_request_are_refused(device):
    cache = DeviceRowCache(60, ROW_BYTES, device)
    with cache.requests.take(2, 3) as request, pytest.raises(ConfigError, match="2 numbers"):
        cache.find_for(request, torch.zeros(3, 20, device=device), [0, 7], [0])


def test_lookups_that_come_again_read_what_the_cache_has_now(device):
    """From the third on they are recorded on a GPU: keys, rows, places and times of use change all the same."""
    cache, keys, out = DeviceRowCache(40, ROW_BYTES, device), np.arange(40), torch.zeros(20, 7, device=device)
    cache.insert(keys, rows_for(keys, 0))
    for version in range(1, 9):
        asked = np.roll(keys, version)[:20]
        cache.insert(keys, rows_for(keys, version))
        cache.erase(asked[:version])
        with cache.requests.take(1, 20) as request:
            request.keys[:] = asked
            found = cache.find_for(request, out, [1], [0]).copy()
        assert found[0].tolist() == [i >= version for i in range(20)]
        got = np.ascontiguousarray(out[:, 1:].cpu().numpy()).view(np.uint8)
        assert (got == np.where(found[0][:, None], rows_for(asked, version), 0)).all()
    kept = asked[found[0]]
    for _ in range(5):
        time.sleep(0.12)
        with cache.requests.take(1, 20) as request:
            request.keys[:] = asked
            cache.find_for(request, out, [1], [0])
    cache.evict_older(0.3)
    assert sorted(cache.keys().tolist()) == sorted(kept.tolist())


def test_a_recorded_lookup_starts_in_a_thread_that_has_called_nothing_of_cuda(device):
    cache, keys, out = DeviceRowCache(40, ROW_BYTES, device), np.arange(40), torch.zeros(20, 6, device=device)
    cache.insert(keys, rows_for(keys, 0))

    def look_up(first: int) -> bool:
        with cache.requests.take(1, 20) as request:
            request.keys[:] = keys[first : first + 20]
            return bool(cache.find_for(request, out, [0], [0]).all())

    assert all(look_up(first) for first in range(4))
    for first in range(5, 15):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(look_up, first).result()
        assert out.cpu().numpy().view(np.uint8).tobytes() == rows_for(keys[first : first + 20], 0).tobytes()


def test_outputs_of_one_form_are_each_written_at_their_own_address(device):
    cache, keys = DeviceRowCache(60, ROW_BYTES, device), np.arange(10)
    cache.insert(keys, rows_for(keys, 0))
    wide = torch.zeros(10, 40, device=device)
    outputs = [torch.zeros(10, 7, device=device), torch.zeros(10, 7, device=device), wide[:, :7], wide[:, 13:20]]
    for i, out in enumerate(outputs):
        with cache.requests.take(1, 10) as request:
            request.keys[:] = (keys + i) % 10
            assert cache.find_for(request, out, [1], [0]).all()
    for i, out in enumerate(outputs):
        got = np.ascontiguousarray(out[:, 1:].cpu().numpy()).view(np.uint8)
        assert (got == rows_for((keys + i) % 10, 0)).all()
        assert not out[:, 0].any()
    if device.type == "cuda":
        with cache.requests.take(1, 10) as request, pytest.raises(ConfigError, match="on cpu"):
            cache.find_for(request, outputs[0].cpu(), [1], [0])


def test_present_and_absent_keys_are_told_apart(device):
    cache = DeviceRowCache(50, ROW_BYTES, device)
    first, later = np.arange(10), np.arange(5, 15)
    cache.insert(first, rows_for(first, 1))
    cache.insert(later, rows_for(later, 2), only="absent")
    cache.insert(np.arange(3, 20), rows_for(np.arange(3, 20), 3), only="present")
    found, out = look(cache, np.arange(20))
    assert found.tolist() == [True] * 15 + [False] * 5
    versions = out.view(np.int64)[:15, 0] - 31 * np.arange(15)
    assert versions.tolist() == [1] * 3 + [3] * 12
    twice = np.array([4, 4])
    cache.insert(twice, np.repeat(np.array([[7], [9]], np.uint8), ROW_BYTES, 1))
    assert look(cache, np.array([4]))[1].tolist() == [[9] * ROW_BYTES]


def test_rows_that_are_asked_for_come_to_the_device(device, monkeypatch):
    clock = [100]
    monkeypatch.setattr("viviane.ops.row_cache.device_cache._now", lambda: clock[0])
    cache = DeviceRowCache(20, ROW_BYTES, device, host_capacity=80)
    keys = np.arange(90)
    cache.insert(keys, rows_for(keys, 1))
    near_places = 20 + 64
    on_host = cache.find_into(*_given(keys, device)).cpu().numpy() >= near_places
    assert on_host.sum() == 70
    clock[0] += 5
    hot = keys[on_host][:8]
    look(cache, hot)
    assert cache.promote() == 8
    assert (cache.find_into(*_given(hot, device)) < near_places).all()
    found, out = look(cache, keys)
    assert found.all()
    assert (out == rows_for(keys, 1)).all()
    clock[0] += 100
    look(cache, hot)
    assert cache.evict_older(5) == 82
    assert sorted(cache.keys().tolist()) == hot.tolist()


def _given(keys: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(keys)
    tables = torch.zeros(count, dtype=torch.int32, device=device)
    return torch.from_numpy(keys).to(device), tables, torch.zeros((count, ROW_BYTES // 4), device=device)


def test_a_place_is_not_filled_again_while_a_lookup_may_read_it(device):
    cache = DeviceRowCache(4, ROW_BYTES, device)
    keys = np.arange(4)
    cache.insert(keys, rows_for(keys, 0))
    places = set(cache.find_into(*_given(keys, device)).tolist())
    held = _Held()
    cache._readers[-5] = held  # a lookup that was launched and has not ended
    cache.insert(keys, rows_for(keys, 1))
    taken = {place for one in range(8) for place in _replaced(cache, keys, one, device)}
    assert not places & taken
    held.ended = True
    for one in range(25):  # more places than there are: some are filled again
        _replaced(cache, keys, one, device)


class _Held:
    ended = False

    def query(self) -> bool:
        return self.ended


def _replaced(cache: DeviceRowCache, keys: np.ndarray, version: int, device: torch.device) -> list[int]:
    cache.insert(keys, rows_for(keys, version))
    return cache.find_into(*_given(keys, device)).tolist()


@pytest.mark.parametrize(
    ("capacity", "row_bytes", "host"), [(0, 8, 0), (5, 6, 0), (5, 0, 0), (5, 8, -1), (2**31, 8, 0)]
)
def test_caches_that_cannot_be_are_refused(device, capacity, row_bytes, host):
    with pytest.raises(ConfigError):
        DeviceRowCache(capacity, row_bytes, device, host_capacity=host)


def test_lookups_of_another_form_are_refused(device):
    cache = DeviceRowCache(8, ROW_BYTES, device)
    keys, tables, out = _given(np.arange(3), device)
    others = (keys.int(), tables, out), (keys, tables.long(), out), (keys, tables, out[:, :4]), (keys, tables[:2], out)
    for given in others:
        with pytest.raises(ConfigError):
            cache.find_into(*given)
    assert len(cache.find_into(keys[:0], tables[:0], out[:0])) == 0
