"""Every tier against a dict, for any sequence of calls, closings and crashes."""

import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import LAYOUT, NUM_IDS, OPENERS, SURVIVORS, rows_of
from viviane.core.errors import ConfigError, StoreError
from viviane.store import FileTier, SortedRunTier, Tier

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "fetch", "erase", "scan", "flush", "reopen", "crash"]),
        st.lists(st.integers(0, NUM_IDS - 1), max_size=20),
    ),
    max_size=14,
)


def copy_of_open(folder: Path, target: Path) -> None:
    """Copy the files of an open tier; again, where RocksDB has removed some of them meanwhile."""
    for _ in range(20):
        try:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("LOCK"))
        except shutil.Error:
            shutil.rmtree(target)
        else:
            return
    raise AssertionError("the files of the tier never stay for as long as a copy takes")


def check_all(tier: Tier, known: dict[int, bytes]) -> None:
    keys = np.arange(NUM_IDS)
    out = np.full((NUM_IDS, LAYOUT.row_bytes), 7, np.uint8)
    found = tier.fetch(keys, out)
    for key in range(NUM_IDS):
        assert found[key] == (key in known), key
        assert out[key].tobytes() == known.get(key, b"\7" * LAYOUT.row_bytes), key
    assert tier.num_rows() == len(known)
    seen = [(int(k), r.tobytes()) for ks, rs in tier.scan(5) for k, r in zip(ks, rs, strict=True)]
    assert len(seen) == len(known)
    assert dict(seen) == known


@pytest.mark.parametrize("kind", OPENERS)
@settings(max_examples=15)
@given(calls=CALLS)
def test_any_sequence_of_calls_gives_what_a_dict_gives(kind: str, calls: list[tuple[str, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "a"
        folder.mkdir()
        tier, known = OPENERS[kind](folder), {}
        for version, (call, given_keys) in enumerate(calls):
            keys = np.array(given_keys, np.int64)
            if call == "put":
                rows = rows_of(keys, version)
                rows[:, -1] = np.arange(len(keys))  # rows of a repeated key differ
                tier.put(keys, rows)
                known |= {int(k): r.tobytes() for k, r in zip(keys, rows, strict=True)}
            elif call == "fetch":
                out = LAYOUT.zeros(len(keys))
                assert tier.fetch(keys, out).tolist() == [k in known for k in given_keys]
                assert [row.tobytes() for row in out] == [known.get(k, bytes(LAYOUT.row_bytes)) for k in given_keys]
            elif call == "erase":
                assert tier.erase(keys) == len(set(given_keys) & known.keys())
                known = {k: r for k, r in known.items() if k not in given_keys}
            elif call == "scan":
                check_all(tier, known)
            elif call == "flush":
                tier.flush()
            elif kind in SURVIVORS:
                if call == "crash":  # what the files hold now, without a close
                    tier.flush()
                    other = folder.parent / f"{version}"
                    copy_of_open(folder, other)
                    tier.close()
                    folder = other
                else:
                    tier.close()
                tier = OPENERS[kind](folder)
        check_all(tier, known)
        tier.close()
        tier.close()


@pytest.mark.parametrize("kind", OPENERS)
def test_calls_are_checked_and_closed_tiers_refuse(kind: str, tmp_path: Path) -> None:
    tier = OPENERS[kind](tmp_path)
    assert isinstance(tier, Tier)
    with pytest.raises(ConfigError, match="rows have another form"):
        tier.put(np.arange(3), LAYOUT.zeros(2))
    with pytest.raises(ConfigError, match="keys have another form"):
        tier.fetch(np.arange(3, dtype=np.int32), LAYOUT.zeros(3))
    tier.put(np.arange(3), rows_of(np.arange(3), 1))
    tier.fetch(np.arange(4), LAYOUT.zeros(4))
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.rows_written) == (3, 1, 3)
    assert stats.bytes_written >= 3 * LAYOUT.row_bytes
    tier.close()
    with pytest.raises(StoreError, match="closed"):
        tier.fetch(np.arange(3), LAYOUT.zeros(3))


@pytest.mark.parametrize("kind", ["file", "sorted runs"])
def test_a_crash_in_the_middle_of_a_write_tears_no_row(kind: str, tmp_path: Path) -> None:
    tier = OPENERS[kind](tmp_path)
    keys = np.arange(8)
    tier.put(keys, rows_of(keys, 1))
    tier.flush()
    tier.put(keys, rows_of(keys, 2))
    [journal] = [*tmp_path.rglob("journal.bin")]
    size = journal.stat().st_size
    for cut in (size, size - 1, size // 2, 30, 3, 0):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("cut*"))
        with next(copy.rglob("journal.bin")).open("r+b") as file:
            file.truncate(cut)
        if cut < size and kind == "file":  # the crash came before the rows went to their place, or within one
            with (copy / "file" / "rows.bin").open("r+b") as file:
                file.write(rows_of(keys, 1).tobytes())
        again = OPENERS[kind](copy)
        out = LAYOUT.zeros(8)
        assert again.fetch(keys, out).all()
        assert out.tobytes() == rows_of(keys, 2 if cut == size else 1).tobytes()
        again.close()
    tier.close()


def test_a_full_host_tier_changes_nothing() -> None:
    tier = OPENERS["host"](Path())
    tier.put(np.arange(999), rows_of(np.arange(999), 1))
    with pytest.raises(StoreError, match="the tier is full"):
        tier.put(np.arange(990, 1010), rows_of(np.arange(990, 1010), 2))
    out = LAYOUT.zeros(1010)
    assert tier.fetch(np.arange(1010), out).sum() == 999
    assert out[:999].tobytes() == rows_of(np.arange(999), 1).tobytes()


def test_ids_outside_a_file_tier(tmp_path: Path) -> None:
    tier = OPENERS["file"](tmp_path)
    with pytest.raises(StoreError, match="outside the tier"):
        tier.put(np.array([1, NUM_IDS]), LAYOUT.zeros(2))
    assert tier.num_rows() == 0
    assert not tier.fetch(np.array([-1, 1, NUM_IDS]), LAYOUT.zeros(3)).any()
    assert tier.erase(np.array([-1, NUM_IDS])) == 0
    tier.close()


def test_keys_whose_difference_overflows_stay_in_order(tmp_path: Path) -> None:
    """Keys at both ends of int64: hashed ids are spread over all of it."""
    keys = np.array([-(2**63), -(2**62) - 7, 0, 2**62 + 5, 2**63 - 1])
    tier = SortedRunTier(tmp_path / "a", LAYOUT, memory_rows=2, most_runs=2)
    tier.put(keys[::-1].copy(), rows_of(keys[::-1], 0))
    tier.flush()
    tier.merge()
    tier.close()
    again = SortedRunTier(tmp_path / "a", LAYOUT)
    out = LAYOUT.zeros(len(keys))
    assert again.fetch(keys, out).all()
    assert out.tobytes() == rows_of(keys, 0).tobytes()
    assert [key for some, _ in again.scan(2) for key in some.tolist()] == keys.tolist()
    again.close()


EXTREMES = np.array([-(2**63), -(2**63) + 1, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 2, 2**63 - 1])


@pytest.mark.parametrize("kind", ["host", "sorted runs", "rocksdb"])
@settings(max_examples=20)
@given(more=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_any_64_bit_key_is_found_and_scanned(kind: str, more: list[int]) -> None:
    keys = np.unique(np.concatenate([EXTREMES, np.array(more, np.int64)]))
    with tempfile.TemporaryDirectory() as name:
        tier = OPENERS[kind](Path(name))
        for version, part in enumerate((keys[::2], keys[1::2], keys[::3])):
            tier.put(np.ascontiguousarray(part), rows_of(part, version))
            tier.flush()
        if kind in SURVIVORS:
            tier.close()
            tier = OPENERS[kind](Path(name))
        wanted = {int(k): r.tobytes() for v, p in enumerate((keys[::2], keys[1::2], keys[::3]))
                  for k, r in zip(p, rows_of(p, v), strict=True)}  # fmt: skip
        out = LAYOUT.empty(len(keys))
        assert tier.fetch(keys, out).all()
        assert [row.tobytes() for row in out] == [wanted[int(key)] for key in keys]
        assert {int(k) for ks, _ in tier.scan(4) for k in ks} == set(wanted)
        tier.close()


def test_a_file_tier_of_one_id(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "one", LAYOUT, 1)
    tier.put(np.array([0, 0]), rows_of(np.array([0, 0]), 4))
    tier.close()
    again, out = FileTier(tmp_path / "one", LAYOUT, 1), LAYOUT.zeros(1)
    assert again.fetch(np.array([0]), out).all()
    assert out.tobytes() == rows_of(np.array([0]), 4).tobytes()
    again.close()


@settings(max_examples=30)
@given(puts=st.lists(st.lists(st.integers(0, 699), max_size=60), max_size=6))
def test_rows_between_those_that_are_written_stay(puts: list[list[int]]) -> None:
    """Rows are smaller than a page, so that a put writes over the holes between its ids."""
    with tempfile.TemporaryDirectory() as name:
        tier, known = FileTier(Path(name) / "t", LAYOUT, 700, durable=False), {}
        for version, given_keys in enumerate(puts):
            keys = np.array(given_keys, np.int64)
            tier.put(keys, rows_of(keys, version))
            known |= {int(k): r.tobytes() for k, r in zip(keys, rows_of(keys, version), strict=True)}
        out = LAYOUT.zeros(700)
        found = tier.fetch(np.arange(700), out)
        assert {int(k): out[k].tobytes() for k in np.flatnonzero(found)} == known
        tier.close()


@pytest.mark.parametrize("kind", ["file", "sorted runs"])
def test_a_damaged_tier_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    tier = OPENERS[kind](tmp_path)
    tier.put(np.arange(20), rows_of(np.arange(20), 1))
    tier.close()
    name = "present.bin" if kind == "file" else "run-*.bin"
    file = next(tmp_path.rglob(name))
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:1] + bytes([whole[1] ^ 16]) + whole[2:]):
        file.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"(?s)(truncated|altered).*{file.name}"):
            OPENERS[kind](tmp_path)
    file.write_bytes(whole)
    OPENERS[kind](tmp_path).close()


@pytest.mark.parametrize("kind", ["file", "sorted runs"])
def test_a_folder_that_another_has_open_is_refused(kind: str, tmp_path: Path) -> None:
    tier, errors = OPENERS[kind](tmp_path), []

    def open_it() -> None:
        try:
            OPENERS[kind](tmp_path)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert "another process is writing here" in str(errors[0])
    tier.close()
    OPENERS[kind](tmp_path).close()
