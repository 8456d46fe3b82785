"""RocksDB on a disk that is full for a while, and with files that cannot be read."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from viviane.core.errors import StoreError
from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.rocks_database import RocksDatabase

LAYOUT = RowLayout([Column("weight", "float32", 16)])
KEYS = np.arange(1000)


def rows_of(keys: np.ndarray, version: int) -> np.ndarray:
    return np.repeat(keys.astype(np.float32)[:, None] + version, 16, axis=1).view(np.uint8)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def check(tier: AppliedRocksTier, version: int) -> None:
    out = LAYOUT.zeros(len(KEYS))
    assert tier.fetch(KEYS, out).all()
    assert np.array_equal(out, rows_of(KEYS, version))


def test_after_a_full_disk_rows_are_written_again_without_a_restart(tmp_path: Path) -> None:
    database = RocksDatabase(tmp_path / "db")
    tier, other = (AppliedRocksTier(database, name, LAYOUT) for name in ("user", "item"))
    none = np.empty(0, np.int64)
    tier.apply(KEYS, rows_of(KEYS, 1), none, {"applied": b"1"})
    kept = []  # errors, whose tracebacks have the frames of the write
    with full_disk():
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot write") as caught:
                tier.apply(KEYS, rows_of(KEYS, 2), none, {"applied": b"2"})
            kept.append(caught)
            check(tier, 1)
        assert tier.note("applied") == b"1"
    scan = tier.scan(10)
    next(scan)
    with pytest.raises(StoreError, match="being read"):  # opening again would end the scan
        other.put(KEYS, rows_of(KEYS, 3))
    assert sum(len(keys) for keys, _ in scan) == len(KEYS) - 10
    other.put(KEYS, rows_of(KEYS, 3))
    tier.apply(KEYS, rows_of(KEYS, 2), none, {"applied": b"2"})
    check(tier, 2)
    check(other, 3)
    database.close()
    database = RocksDatabase(tmp_path / "db")
    assert kept
    tier = AppliedRocksTier(database, "user", LAYOUT)
    check(tier, 2)
    assert tier.note("applied") == b"2"
    database.close()


def test_a_database_that_cannot_be_flushed_is_closed(tmp_path: Path) -> None:
    database = RocksDatabase(tmp_path / "db")
    tier = AppliedRocksTier(database, "user", LAYOUT)
    tier.put(KEYS, rows_of(KEYS, 1))
    with full_disk():
        with pytest.raises(StoreError, match="cannot write"):
            tier.put(KEYS, rows_of(KEYS, 2))
        tier.close()
        database.close()
        database.close()
    database = RocksDatabase(tmp_path / "db")
    check(AppliedRocksTier(database, "user", LAYOUT), 1)
    database.close()


def test_a_file_that_is_damaged_is_an_error_of_the_store(tmp_path: Path) -> None:
    database = RocksDatabase(tmp_path / "db")
    tier = AppliedRocksTier(database, "user", LAYOUT)
    tier.put(KEYS, rows_of(KEYS, 1))
    tier.flush()
    database.close()
    largest = max((tmp_path / "db").glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[2000:2100] = os.urandom(100)  # of rows: the index and what describes the file stay whole
    largest.write_bytes(data)
    database = RocksDatabase(tmp_path / "db")
    tier = AppliedRocksTier(database, "user", LAYOUT)
    with pytest.raises(StoreError, match="RocksDB cannot read"):
        tier.fetch(KEYS, LAYOUT.zeros(len(KEYS)))
    with pytest.raises(StoreError, match="RocksDB cannot read"):
        list(tier.scan())  # a scan that ended there would seem complete
    with pytest.raises(StoreError, match="RocksDB cannot read"):
        tier.num_rows()
    database.close()


def test_what_is_advised_fits_why_a_folder_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file/db", Path("/proc/db")):
        with pytest.raises(StoreError, match=r"cannot be made[\s\S]*may write"):
            RocksDatabase(place)
    held = RocksDatabase(tmp_path / "db")
    with pytest.raises(StoreError, match="close the process that has it open"):
        RocksDatabase(tmp_path / "db")
    held.close()
    manifest = next((tmp_path / "db").glob("MANIFEST-*"))
    manifest.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="fill it again"):
        RocksDatabase(tmp_path / "db")


def test_what_a_killed_process_has_probed_with_is_removed(tmp_path: Path) -> None:
    RocksDatabase(tmp_path / "db").close()
    (tmp_path / "db/viviane-probe").write_bytes(b"x")
    RocksDatabase(tmp_path / "db").close()
    assert not (tmp_path / "db/viviane-probe").exists()
