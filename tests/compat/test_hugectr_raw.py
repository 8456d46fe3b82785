"""Raw files that say more than the script, and tables that are larger than the machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from viviane.compat.hugectr import capacity
from viviane.compat.hugectr.reading import close_readers
from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError, DataError, VivianeError

MADE = modules()
hugectr: Any = MADE["hugectr"]
DataGenerator, DataGeneratorParams = (
    getattr(MADE["hugectr.tools"], name) for name in ("DataGenerator", "DataGeneratorParams")
)
KIND, LAYER = hugectr.DataReaderType_t, hugectr.Layer_t
COUNTS = np.array([[0, 7], [3, 0], [1, 2], [9, 1], [0, 0]])
KEYS = np.array([[0, 1], [2, 3], [1, 0], [0, 2], [2, 1]], "<i4")


def raw_file(dense: np.ndarray) -> str:
    rows = b"".join(np.array([i % 2], "<i4").tobytes() + dense[i].tobytes() + KEYS[i].tobytes() for i in range(5))
    Path("rows.bin").write_bytes(rows)
    return "rows.bin"


def build(source: str, num_samples: int, batch_size: int, sizes: list[int], **more: Any) -> Any:
    solver = hugectr.CreateSolver(batchsize=batch_size, batchsize_eval=batch_size, max_eval_batches=1, lr=0.1, **more)
    reader = hugectr.DataReaderParams(
        KIND.RawAsync, source, eval_source=source, num_samples=num_samples, eval_num_samples=num_samples,
        slot_size_array=sizes, async_param=hugectr.AsyncParam(32, 4, 716800, 2, 512, True, hugectr.Alignment_t.Non),
    )  # fmt: skip
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD))
    model.add(hugectr.Input(1, "label", 2, "dense", [hugectr.DataReaderSparseParam("keys", 1, True, 2)]))
    kind = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot
    model.add(hugectr.SparseEmbedding(kind, 1, 4, "sum", "table", "keys", sizes))
    model.add(hugectr.DenseLayer(LAYER.Reshape, ["table"], ["flat"], leading_dim=8))
    model.add(hugectr.DenseLayer(LAYER.Concat, ["flat", "dense"], ["all"]))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["all"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(LAYER.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    model.compile()
    return model


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    close_readers()


def dense_of(model: Any) -> np.ndarray:
    model.eval()
    return model.check_out_tensor("all", hugectr.Tensor_t.Evaluate)[:, 8:]


def test_whole_numbers_and_floats_are_told_apart_by_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    model = build(raw_file(COUNTS.astype("<i4")), 5, 5, [3, 4])
    np.testing.assert_allclose(dense_of(model), np.log1p(COUNTS), rtol=1e-6)  # one rounding to float32
    assert "rows.bin contains int32" in capsys.readouterr().out
    model = build(raw_file(COUNTS.astype("<f4")), 5, 5, [3, 4])
    np.testing.assert_array_equal(dense_of(model), COUNTS)


def test_num_samples_ends_a_longer_file_and_warns_of_a_shorter_one(capsys: pytest.CaptureFixture[str]) -> None:
    source = raw_file(COUNTS.astype("<f4"))
    model = build(source, 4, 2, [3, 4], repeat_dataset=False)
    model.get_data_reader_eval().set_source(source)
    seen = []
    while model.eval():
        seen.append(model.check_out_tensor("all", hugectr.Tensor_t.Evaluate)[:, 8:])
    assert model.get_data_reader_eval().is_eof()
    np.testing.assert_array_equal(np.concatenate(seen), COUNTS[:4])
    assert "Warning" not in capsys.readouterr().out
    build(source, 4_195_155_968, 5, [3, 4])
    assert "rows.bin has 5 rows, fewer than 4195155968" in capsys.readouterr().out


def test_tables_that_do_not_fit_get_their_rows_as_keys_are_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("viviane.compat.hugectr.graph.free_bytes", lambda device: 2**30)
    source = raw_file(COUNTS.astype("<f4"))
    model = build(source, 5, 5, [40_000_000, 40_000_000])  # 80 million rows of 4 float32: 1.2 GiB
    assert "need 1.2 GiB, and 1.0 GiB of memory are free" in capsys.readouterr().out
    for _ in range(3):
        model.train()
    model.save_params_to_files("large")
    keys = np.fromfile("large0_sparse_0.model/key", "<i8")
    assert sorted(keys.tolist()) == [0, 1, 2, *(40_000_000 + key for key in (0, 1, 2, 3))]
    build(source, 5, 5, [40, 40])
    assert "Warning" not in capsys.readouterr().out


def test_remote_paths_are_read_where_they_are_mounted_and_not_written() -> None:
    source = f"hdfs://localhost:9000{Path(raw_file(COUNTS.astype('<i4'))).resolve()}"
    model = build(source, 5, 5, [3, 4])
    np.testing.assert_allclose(dense_of(model), np.log1p(COUNTS), rtol=1e-6)  # one rounding to float32
    with pytest.raises(ConfigError, match="remote files cannot be written"):
        model.save_params_to_files("hdfs://localhost:9000/model")
    with pytest.raises(DataError, match="mount the file system"):
        build("s3://bucket/not/there", 5, 5, [3, 4])


@pytest.mark.parametrize(("kind", "what"), [("RawAsync", "file"), ("Parquet", "file list"), ("Norm", "file list")])
def test_a_source_that_is_not_there_is_named_with_how_it_is_made(kind: str, what: str) -> None:
    reader = hugectr.DataReaderParams(KIND[kind], "./data/train", eval_source="./data/val")
    model = hugectr.Model(hugectr.CreateSolver(), reader, hugectr.CreateOptimizer())
    model.add(hugectr.Input(1, "label", 2, "dense", [hugectr.DataReaderSparseParam("keys", 1, True, 2)]))
    table = hugectr.SparseEmbedding(hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash, 1, 4, "sum", "e", "keys")
    model.add(table)
    model.add(hugectr.DenseLayer(LAYER.Reshape, ["e"], ["flat"], leading_dim=8))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["flat"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(LAYER.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    with pytest.raises(
        DataError, match=f"(?s){what} of training data not found.*./data/train.*DataGenerator.*{Path.cwd()}"
    ):
        model.compile()


def built(kind: str, source: str, labels: int, dense: int) -> Any:
    solver = hugectr.CreateSolver(batchsize=2, batchsize_eval=2, max_eval_batches=1, repeat_dataset=False)
    reader = hugectr.DataReaderParams(KIND[kind], source, eval_source=source, check_type=hugectr.Check_t.Non)
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    keys = [hugectr.DataReaderSparseParam("keys", 1, False, 1)]
    model.add(hugectr.Input(labels, "label", dense, "dense", keys))
    table = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(table, 1, 4, "sum", "e", "keys"))
    model.add(hugectr.DenseLayer(LAYER.Reshape, ["e"], ["flat"], leading_dim=4))
    model.add(hugectr.DenseLayer(LAYER.Concat, ["flat", "dense"], ["all"]))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["all"], ["logit"], num_output=labels))
    weights = [1.0] * labels
    model.add(hugectr.DenseLayer(LAYER.MultiCrossEntropyLoss, ["logit", "label"], ["loss"], target_weight_vec=weights))
    model.compile()
    return model


def rows_of(model: Any) -> int:
    model.get_data_reader_train().set_source()
    return sum(1 for _ in iter(model.train, False)) * 2


def generated(kind: str) -> tuple[str, list[Path]]:
    """Write a list of two files of 4 rows."""
    non, params = hugectr.Check_t.Non, DataGeneratorParams
    numbers = {"num_files": 2, "eval_num_files": 1, "num_samples_per_file": 4}
    DataGenerator(params(KIND[kind], 1, 1, 1, False, f"{kind}.txt", "v.txt", [5], check_type=non, **numbers)).generate()
    return f"{kind}.txt", [Path(name) for name in Path(f"{kind}.txt").read_text().split()[1:]]


def test_lines_of_a_list_beyond_its_count_are_ignored() -> None:
    source, (first, second) = generated("Norm")
    Path(source).write_text(f"1\n{first}\n{second}\n")
    assert rows_of(built("Norm", source, 1, 1)) == 4


def test_missing_parquet_files_are_skipped_unless_all_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    source, (first, second) = generated("Parquet")
    second.unlink()
    assert rows_of(built("Parquet", source, 1, 1)) == 4
    assert capsys.readouterr().out.count("1 files that are missing are skipped") == 1
    first.unlink()
    with pytest.raises(DataError, match="a file of the list is missing"):
        built("Parquet", source, 1, 1)


def test_only_the_sum_of_labels_and_dense_values_is_that_of_the_header() -> None:
    header = np.array([0, 4, 1, 2, 1, 0, 0, 0], "<i8").tobytes()
    row = np.array([1, 0, 0.5], "<f4").tobytes() + np.array([1, 3], "<i4").tobytes()
    Path("rows.data").write_bytes(header + 4 * row)
    Path("rows.txt").write_text("1\nrows.data\n")
    model = built("Norm", "rows.txt", 2, 1)
    assert rows_of(model) == 4
    model.get_data_reader_eval().set_source()
    assert model.eval()
    assert model.check_out_tensor("all", hugectr.Tensor_t.Evaluate)[:, 4].tolist() == [0.5, 0.5]
    with pytest.raises(DataError, match="header's dense_dim"):
        rows_of(built("Norm", "rows.txt", 1, 1))


def norm_file(lengths: list[list[int]]) -> str:
    """Write a file list of a Norm file without checksums, whose slots have that many keys in each row."""
    header = np.array([0, len(lengths), 1, 0, len(lengths[0]), 0, 0, 0], "<i8").tobytes()
    slots = ((np.array([n], "<i4"), np.arange(n, dtype="<u4")) for row in lengths for n in row)
    bags = [count.tobytes() + keys.tobytes() for count, keys in slots]
    label, width = np.ones(1, "<f4").tobytes(), len(lengths[0])
    rows = [label + b"".join(bags[i * width : (i + 1) * width]) for i in range(len(lengths))]
    Path("rows.data").write_bytes(header + b"".join(rows))
    Path("rows.txt").write_text("1\nrows.data\n")
    return "rows.txt"


@pytest.mark.parametrize(("nnz", "is_refused"), [(2, False), ([5, 1, 2], False), ([4, 1, 2], True)])
def test_one_number_of_keys_is_an_average_over_the_slots(nnz: Any, is_refused: bool) -> None:
    source = norm_file([[5, 1, 0], [0, 0, 2]])
    solver = hugectr.CreateSolver(batchsize=2, batchsize_eval=2, max_eval_batches=1)
    reader = hugectr.DataReaderParams(KIND.Norm, source, eval_source=source, check_type=hugectr.Check_t.Non)
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    model.add(hugectr.Input(1, "label", 0, "dense", [hugectr.DataReaderSparseParam("keys", nnz, False, 3)]))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, 1, 4, "sum", "e", "keys"))
    model.add(hugectr.DenseLayer(LAYER.Reshape, ["e"], ["flat"], leading_dim=12))
    model.add(hugectr.DenseLayer(LAYER.InnerProduct, ["flat"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(LAYER.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    model.compile()
    if is_refused:
        with pytest.raises(DataError, match="5 ids"):
            model.train()
        return
    model.train()
    model.save_params_to_files("n")
    assert sorted(np.fromfile("n0_sparse_0.model/key", "<i8").tolist()) == [0, 1, 2, 3, 4]


def test_free_memory_is_known_here() -> None:
    assert (capacity.free_bytes("cpu") or 0) > 2**20


def _without(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([name])


BROKEN: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "no key column": (_without("C1"), "is missing in the file"),
    "no label column": (_without("label"), "is missing in the file"),
    "two columns of a name": (lambda table: table.append_column("C1", table["C1"]), "two columns have one name"),
    "keys of text": (
        lambda table: table.set_column(table.column_names.index("C1"), "C1", table["C1"].cast("string")), "type",
    ),
    "keys of bytes": (
        lambda table: table.set_column(table.column_names.index("C1"), "C1", pa.array([b"\x00\x80"] * len(table))),
        "type",
    ),
    "an empty list of dense values": (
        lambda table: table.set_column(
            table.column_names.index("I1"), "I1", pa.array([None] * len(table), pa.list_(pa.float32()))
        ),
        "first row is null",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_parquet_that_differs_from_its_metadata_is_refused(name: str) -> None:
    source, files = generated("Parquet")
    change, message = BROKEN[name]
    for file in files:
        pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(VivianeError, match=message):
        rows_of(built("Parquet", source, 1, 1))


def test_truncated_parquet_and_metadata_of_other_columns_are_refused() -> None:
    source, files = generated("Parquet")
    metadata = files[0].parent / "_metadata.json"
    whole = metadata.read_text()
    metadata.write_text(whole.replace('"C1"', '"C1x"'))
    with pytest.raises(VivianeError, match=r"(?s)is missing in the file.*_metadata\.json.*C1x"):
        built("Parquet", source, 1, 1)
    metadata.write_text(whole)
    files[0].write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(VivianeError, match="not a complete Parquet file"):
        built("Parquet", source, 1, 1)


@pytest.mark.parametrize("kind", KIND.__members__)
def test_a_reader_without_a_source_is_refused(kind: str) -> None:
    solver = hugectr.CreateSolver(batchsize=2, batchsize_eval=2)
    reader = hugectr.DataReaderParams(KIND[kind], [], eval_source="e", num_samples=4, eval_num_samples=4)
    with pytest.raises(ConfigError, match="no source of training rows"):
        hugectr.Model(solver, reader, hugectr.CreateOptimizer())
