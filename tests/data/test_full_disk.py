"""A full disk, a real one of a few hundred kilobytes: every writer says so, names the place, and leaves nothing."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from viviane.core.errors import DataError
from viviane.data import Dataset, convert, write_dataset
from viviane.etl import EtlConfig, SequenceConfig, run, sequences
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}], dense=[{"name": "x"}],
    categorical=[{"name": "c", "num_ids": 2000, "kind": "multi_hot", "max_length": 2}],
)  # fmt: skip
FORMATS = ("parquet", "viviane", "norm", "raw-async", "hugectr-parquet")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    mount = tmp_path / "small"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and permission to mount")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)  # an open data set may have mapped a file


def rows(count: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    bags = rng.integers(0, 2000, (count, 2)).tolist()
    return {"y": rng.integers(0, 2, count).astype(float), "x": rng.random(count), "c": bags}


@pytest.mark.parametrize("kind", FORMATS)
def test_data_sets_of_every_format(small: Path, tmp_path: Path, kind: str) -> None:
    old = write_dataset(small / "set", SCHEMA, [rows(10)], format=kind)
    big = write_dataset(tmp_path / "big", SCHEMA, [rows(60_000)])
    for write in (
        lambda: write_dataset(small / "set", SCHEMA, [rows(60_000)], format=kind, overwrite=True),
        lambda: convert(big, small / "other", kind),
    ):
        with pytest.raises(DataError, match="the disk is full") as caught:
            write()
        assert str(small) in str(caught.value)
        assert "free disk space" in str(caught.value)
        assert [one.name for one in small.iterdir()] == ["set"]
    old.check()
    assert len(Dataset(small / "set").head(20)) == 10
    shutil.rmtree(small / "set")
    write_dataset(small / "set", SCHEMA, [rows(100)], format=kind)


def config() -> EtlConfig:
    return EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "t", "type": "int"}]},
        labels=[{"name": "click"}], categorical=[{"name": "item"}],
        derived=[{"type": "difference_lag", "name": "lag", "source": "t", "by": "item", "order_by": "t"}],
        dense=[{"name": "lag", "operators": [{"type": "fill"}]}],
    )  # fmt: skip


def test_the_etl_says_so_and_resumes_with_more_room(small: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("click,item,t\n" + "".join(f"{n % 2},item-{n * 7919 % 30011},{n}\n" for n in range(30_000)))
    with pytest.raises(DataError, match=r"could not be read or written|the engine failed") as caught:
        run(config(), raw, small / "out")
    assert "free disk space" in str(caught.value)
    assert not (small / "out").exists()
    assert (small / ".out.etl").exists()
    subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
    assert run(config(), raw, small / "out").rows == {"train": 30_000}
    run(config(), raw, tmp_path / "whole")
    ours, truth = ((one / "train/part-00000.parquet").read_bytes() for one in (small / "out", tmp_path / "whole"))
    assert ours == truth


def test_sequences_say_so(small: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("user,item,time\n" + "".join(f"u{n % 5000},i{n * 7919 % 30011},{n}\n" for n in range(60_000)))
    grouping = SequenceConfig(
        input={"columns": [{"name": "user"}, {"name": "item"}, {"name": "time", "type": "int"}]},
        by="user", order_by="time", columns=[{"name": "seen", "source": "item", "last": 20}],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"could not be read or written|the engine failed"):
        sequences(grouping, raw, small / "out")
    assert not (small / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=30m", str(small)], check=True)
    assert sequences(grouping, raw, small / "out").groups == 5000
