"""Every tier against a dict, for any sequence of calls, closings and crashes."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import LAYOUT, NUM_IDS, OPENERS, SURVIVORS, rows_of

from viviane.core.errors import ConfigError, StoreError
from viviane.store import SortedRunTier, Tier

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "fetch", "erase", "scan", "flush", "reopen", "crash"]),
        st.lists(st.integers(0, NUM_IDS - 1), max_size=20),
    ),
    max_size=14,
)


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
                    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("LOCK"))
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
