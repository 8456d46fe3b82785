"""The GPU engine against DuckDB: the same output, byte for byte; and its parts against plain Python.

It runs on the CPU too, with the same result; on a GPU where there is one.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import clicks, config, data_bytes, text

pytest.importorskip("duckdb")  # what the engine is compared with; a machine with GPUs may have no ETL extra

from viviane.core.errors import ConfigError, VivianeError
from viviane.etl import device_counts, gpu, run
from viviane.etl.device_counts import DeviceIndex, SharedHashError, Tally, count_keys, count_texts
from viviane.etl.device_texts import Texts
from viviane.etl.engine import DuckDbEngine
from viviane.etl.gpu import GpuEngine

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LEAST, MOST = -(2**63), 2**63 - 1
WORDS = ["", "a", "A", "é", "日本", "\u200b", "1", "eightlet", "eightlet\0", "eightle\0", "nineletter", "x" * 100]
VALUES: dict[str, tuple[list[Any], pa.DataType]] = {
    "text": (WORDS, pa.string()),
    "int": ([0, -1, 7, LEAST, MOST, 2**53 + 1, 2**31, 2**32], pa.int64()),
    "near": ([MOST, MOST - 1, MOST - 2**31], pa.int64()),
    "hex": ([0, 2**64 - 1, 2**63, 5], pa.uint64()),
    "time": ([0, -1, 1_700_000_000_123_456], pa.timestamp("us")),
    "float": ([0.5, -1.0, 1e300], pa.float64()),
}


def texts_of(values: list[str]) -> Texts:
    return Texts.of_arrow(pa.array(values, pa.string()), CPU)


def column(values: list[Any], kind: pa.DataType, rows: int) -> Any:
    """Skewed values, one in eight missing."""
    rng = np.random.default_rng(len(values) + rows)
    places = (len(values) * rng.random(rows) ** 3).astype(int)
    return pa.array([None if at == len(values) - 1 else values[at] for at in places], kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 3_000])
@pytest.mark.parametrize("name", VALUES)
def test_counts_and_places_are_those_of_duckdb(
    tmp_path: Path, monkeypatch: Any, name: str, rows: int, device: str
) -> None:
    monkeypatch.setattr(gpu, "SHARD_ROWS", 512)
    monkeypatch.setattr(device_counts, "_FEWEST_MERGED", 4)  # so that merged counts are merged again
    values, kind = VALUES[name]
    table = pa.table({"value": column(values, kind, rows)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    engines = DuckDbEngine(), GpuEngine(device=device)
    for how in ({}, {"by_value": True}, {"min_count": 40, "max_values": 3}):
        ours, theirs = (
            engine.count(opened.filter(opened["value"].notnull()), **how)
            for engine in engines
            for opened in [engine.open([tmp_path / "rows.parquet"], table.schema)]
        )
        assert ours.equals(theirs)
    known = pa.array(values[::-2], kind)
    asked = pa.concat_arrays([pa.array([*values, None], kind), table.column("value").combine_chunks()])
    for part in (asked, asked[3:7], asked[:0]):
        place, expected = (engine.lookup(known)(part).tolist() for engine in engines)
        assert place == expected
    assert (engines[1].lookup(known[:0])(asked) == -1).all()


KEYS = st.one_of(st.integers(LEAST, MOST), st.integers(MOST - 3, MOST), st.integers(-3, 3))


@given(st.lists(st.lists(KEYS, max_size=30), max_size=5))
@settings(deadline=None, max_examples=60)
def test_whole_numbers_are_counted_exactly(shards: list[list[int]]) -> None:
    tally = Tally()
    for shard in shards:
        tally.add(count_keys(torch.tensor(shard, dtype=torch.int64)))
    total = tally.total()
    found = {} if total is None else dict(zip(total.keys.tolist(), total.counts.tolist(), strict=True))
    assert found == Counter(value for shard in shards for value in shard)
    known = list(found)[::2]
    index = DeviceIndex(torch.tensor(known, dtype=torch.int64))
    asked = [*found, 0, LEAST]
    places = index.find(torch.tensor(asked, dtype=torch.int64)).tolist()
    assert places == [known.index(value) if value in known else -1 for value in asked]


def test_one_key_100_000_times() -> None:
    counts = count_keys(torch.full((100_000,), 5))
    assert (counts.keys.tolist(), counts.counts.tolist()) == ([5], [100_000])


@given(st.lists(st.text(max_size=20), min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_texts_keep_their_bytes(values: list[str]) -> None:
    texts = texts_of(values)
    order = torch.arange(len(values)).flip(0)
    assert texts.take(order).to_arrow().to_pylist() == values[::-1]
    joined = Texts.join([texts, texts.take(order)])
    assert joined.to_arrow().to_pylist() == values + values[::-1]
    assert joined.hashes(3).tolist() == [*texts.hashes(3).tolist(), *texts.hashes(3).flip(0).tolist()]
    pairs = [(a, b) for a in range(len(values)) for b in range(len(values))]
    ours, theirs = torch.tensor(pairs).T
    assert texts.equal(ours, texts, theirs).tolist() == [values[a] == values[b] for a, b in pairs]


def test_hashes_differ_by_seed_length_and_zeros() -> None:
    values = ["", "\0", "\0" * 8, "\0" * 9, "a", "a\0", "abcdefgh", "abcdefgh\0"]
    hashes = [texts_of(values).hashes(seed).tolist() for seed in (0, 1)]
    assert len({*hashes[0], *hashes[1]}) == 2 * len(values)


def weak_first(monkeypatch: Any) -> None:
    """Let the first seed hash text to its length alone."""
    sound = Texts.hashes
    monkeypatch.setattr(Texts, "hashes", lambda self, seed: self.lengths.clone() if seed == 0 else sound(self, seed))


def test_a_shared_hash_is_found_and_another_seed_taken(tmp_path: Path, monkeypatch: Any) -> None:
    weak_first(monkeypatch)
    for values in (["ab", "cd"], ["x" * 8 + "a", "x" * 8 + "b"]):
        with pytest.raises(SharedHashError):
            count_texts(texts_of(values), 0)
    tally = Tally()
    tally.add(count_texts(texts_of(["ab"]), 0))
    tally.add(count_texts(texts_of(["cd"]), 0))
    with pytest.raises(SharedHashError):  # of two shards
        tally.total()
    table = pa.table({"value": ["ab", "cd", "ab", "e"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    engine = GpuEngine(device="cpu")
    counts = engine.count(engine.open([tmp_path / "rows.parquet"], table.schema))
    assert counts.to_pydict() == {"value": ["ab", "cd", "e"], "count": [2, 1, 1]}
    # Known texts of different lengths keep the first seed: unknown ones that share a hash are told apart by bytes.
    assert engine.lookup(pa.array(["ab", "e"]))(pa.array(["cd", "ab", "f", "e"])).tolist() == [-1, 0, -1, 1]


def test_known_values_that_are_not_distinct_are_refused() -> None:
    with pytest.raises(VivianeError, match="not distinct"):
        DeviceIndex(texts_of(["a", "b", "a"]))


def everything() -> Any:
    columns: list[dict[str, Any]] = [
        {"name": "y", "type": "int"}, {"name": "user"}, {"name": "item", "type": "hex"}, {"name": "num", "type": "int"},
        {"name": "x", "type": "float"}, {"name": "tags", "list": True},
    ]  # fmt: skip
    fill = {"type": "fill", "value": 0.5}
    return config(
        columns,
        labels=[{"name": "y"}],
        derived=[
            {"type": "count", "name": "times", "by": ["user", "num"]},
            {"type": "count", "name": "of_tag", "by": "tags"},
            {"type": "target_encode", "name": "rate", "by": "user", "target": "y", "folds": 3},
        ],
        dense=[{"name": name, "operators": [fill]} for name in ("times", "rate")],
        categorical=[
            {"name": "user", "vocabulary": "words", "encoding": {"type": "categorify", "min_count": 2}},
            {
                "name": "tags", "kind": "multi_hot", "vocabulary": "words", "max_length": 2,
                "encoding": {"type": "categorify", "min_count": 2},
            },
            {"name": "item", "encoding": {"type": "categorify", "max_values": 2, "unknown_buckets": 3}},
            {"name": "num"},
            {"name": "both", "source": ["user", "num"]},
            {"name": "level", "source": "x", "encoding": {"type": "bucketize", "quantiles": 5}},
        ],
    )  # fmt: skip


def raw(rows: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)

    def some(values: list[Any], kind: pa.DataType) -> Any:
        return pa.array(
            [None if at == len(values) else values[at] for at in rng.integers(0, len(values) + 1, rows)], kind
        )

    return pa.table(
        {
            "y": pa.array(rng.integers(0, 2, rows)),
            "user": some(WORDS, pa.string()),
            "item": some(["ff", "0", "ffffffffffffffff", "abc"], pa.string()),
            "num": some([0, -1, 2**62, 2**53 + 1], pa.int64()),
            "x": some([0.0, 0.1, -3.5], pa.float64()),
            "tags": some([[], ["a"], ["a", None, "é"], ["b", "a", "a"]], pa.list_(pa.string())),
        }
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [None, "rows:train=0.5,valid=0.25,test=0.25"], ids=str)
def test_the_output_is_that_of_duckdb_byte_for_byte(tmp_path: Path, split: str | None, device: str) -> None:
    for number, size in enumerate((400, 1, 0, 90)):
        pq.write_table(raw(size, number), tmp_path / f"raw-{number}.parquet")
    sources = str(tmp_path / "raw-*.parquet")
    summaries = [
        run(everything(), sources, tmp_path / engine, split=split, engine=engine, device=on, threads=2)
        for engine, on in (("duckdb", None), ("gpu", device))
    ]
    assert summaries[0].num_ids == summaries[1].num_ids
    assert data_bytes(tmp_path / "duckdb") == data_bytes(tmp_path / "gpu")


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    source = text(tmp_path / "raw.csv", "click,item\n1,a\n")
    for device in ("cuda:99", "toaster", "meta"):
        with pytest.raises(ConfigError, match="no such device"):
            run(clicks(), source, tmp_path / "out", engine="gpu", device=device)
    with pytest.raises(ConfigError, match="a device is the GPU engine's"):
        run(clicks(), source, tmp_path / "out", device="cpu")
    with pytest.raises(ConfigError, match="no such engine"):
        run(clicks(), source, tmp_path / "out", engine="abacus")
