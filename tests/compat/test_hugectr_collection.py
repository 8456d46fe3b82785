"""Embedding collections against plain NumPy in float64, and their dumps by bytes laid out by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import CheckpointError, ConfigError

hugectr: Any = modules()["hugectr"]
KIND, LAYER = hugectr.DataReaderType_t, hugectr.Layer_t
HOTNESS = (1, 3, 2)
KEYS = np.array([[0, 0, 0, 4, 3, 3], [5, 1, 2, 3, 0, 1], [0, 4, 4, 4, 2, 0], [5, 0, 1, 0, 3, 2]], "<i8")  # 4 rows


def source(folder: Path) -> str:
    rows = b"".join(
        np.array([i % 2], "<i4").tobytes() + np.array([0.5 * i], "<f4").tobytes() + KEYS[i].tobytes() for i in range(4)
    )
    (folder / "rows.bin").write_bytes(rows)
    return str(folder / "rows.bin")


def start(folder: Path, lookups: list[tuple[Any, Any, str, Any]], width: int, **more: Any) -> Any:
    path = source(folder)
    solver = hugectr.CreateSolver(
        batchsize=4, batchsize_eval=4, max_eval_batches=1, lr=0.5, seed=4, i64_input_key=True,
        use_embedding_collection=True,
    )  # fmt: skip
    reader = hugectr.DataReaderParams(
        KIND.RawAsync, path, eval_source=path, num_samples=4, eval_num_samples=4,
        async_param=hugectr.AsyncParam(1, 1, is_dense_float=True),
    )  # fmt: skip
    rule = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD)
    model = hugectr.Model(solver, reader, rule)
    sparse = [hugectr.DataReaderSparseParam(f"data{i}", nnz, True, 1) for i, nnz in enumerate(HOTNESS)]
    model.add(
        hugectr.Input(
            label_dim=1, label_name="label", dense_dim=1, dense_name="dense", data_reader_sparse_param_array=sparse
        )
    )
    collection = hugectr.EmbeddingCollectionConfig(**more)
    for one in lookups:
        collection.embedding_lookup(*one)
    model.add(collection)
    tops = [one[2] for one in lookups]
    for top in tops:
        model.add(hugectr.DenseLayer(layer_type=LAYER.ReLU, bottom_names=[top], top_names=[f"{top}_flat"]))
    flat = [f"{top}_flat" for top in tops]
    if len(flat) > 1:
        model.add(hugectr.DenseLayer(layer_type=LAYER.Concat, bottom_names=flat, top_names=["all"]))
    model.add(
        hugectr.DenseLayer(
            layer_type=LAYER.InnerProduct,
            bottom_names=["all" if len(flat) > 1 else flat[0]],
            top_names=["logit"],
            num_output=1,
        )
    )
    model.add(
        hugectr.DenseLayer(layer_type=LAYER.BinaryCrossEntropyLoss, bottom_names=["logit", "label"], top_names=["loss"])
    )
    model.compile()
    assert model.viviane.plan().shapes[flat[0]][-1] == width
    return model


def table(name: str, rows: int, width: int) -> Any:
    return hugectr.EmbeddingTableConfig(name, rows, width)


def write_dump(folder: Path, tables: list[np.ndarray], keys: list[np.ndarray]) -> None:
    """Write a dump by hand: 20 bytes of head, ids, counts, widths; files with headers of 128 bytes."""
    place = folder / "embedding_collection_0"
    place.mkdir(parents=True)
    head = np.array([len(tables), 1, 0, 0, max(one.shape[1] for one in tables), *range(len(tables))], "<i4").tobytes()
    counts = np.array([len(one) for one in tables], "<u8").tobytes()
    (place / "meta_data").write_bytes(head + counts + np.array([one.shape[1] for one in tables], "<i4").tobytes())
    for i, (own, vectors) in enumerate(zip(keys, tables, strict=True)):
        for kind, name, data in ((1, "key", own.astype("<i8")), (2, "weight", vectors.astype("<f4"))):
            header = np.zeros(32, "<i4")
            header[:2] = kind, i
            (place / f"{name}{i}").write_bytes(header.tobytes() + data.tobytes())


def test_a_list_pools_concatenates_and_shares(tmp_path: Path) -> None:
    a, b, c = table("a", 6, 2), table("b", 5, 2), table("c", -1, 3)
    lookups = [([a, b, c, b], ["data0", "data1", "data2", "data2"], "emb", ["sum", "sum", "average", "concat"])]
    model = start(tmp_path, lookups, 2 + 2 + 3 + 4)
    values = [
        np.random.default_rng(i).random((n, w)).astype("<f4") for i, (n, w) in enumerate(((6, 2), (5, 2), (4, 3)))
    ]
    write_dump(tmp_path / "dump", values, [np.arange(6), np.arange(5), np.arange(4)])
    model.embedding_load(str(tmp_path / "dump"))
    model.eval()
    found = model.check_out_tensor("emb", hugectr.Tensor_t.Evaluate)
    va, vb, vc = (one.astype(np.float64) for one in values)
    expected = [
        np.concatenate([va[row[0]], vb[row[1:4]].sum(0), vc[row[4:6]].mean(0), vb[row[4:6]].reshape(-1)])
        for row in KEYS.tolist()
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # float32 sums of three numbers below 1


def test_a_step_moves_shared_rows_once(tmp_path: Path) -> None:
    a = table("a", 6, 1)
    lookups = [([a, a], ["data0", "data1"], "emb", "sum")]
    model = start(tmp_path, lookups, 2)
    weights = np.random.default_rng(1).random((6, 1)).astype("<f4")
    write_dump(tmp_path / "before", [weights], [np.arange(6)])
    model.embedding_load(str(tmp_path / "before"))
    model.save_params_to_files(str(tmp_path / "m"))
    *layer, bias = np.fromfile(tmp_path / "m_dense_0.model", "<f4").astype(np.float64)
    pooled = np.stack([weights[KEYS[:, 0], 0], weights[KEYS[:, 1:4], 0].sum(1)], 1).astype(np.float64)
    error = (1 / (1 + np.exp(-(pooled @ layer + bias))) - np.arange(4) % 2) / 4
    expected = weights[:, 0].astype(np.float64)
    for row, share in zip(KEYS.tolist(), error, strict=True):
        expected[row[0]] -= 0.5 * share * layer[0]
        for key in row[1:4]:
            expected[key] -= 0.5 * share * layer[1]
    model.set_learning_rate(0.5)
    model.train()
    model.embedding_dump(str(tmp_path / "after"))
    data = (tmp_path / "after/embedding_collection_0/weight0").read_bytes()
    assert len(data) == 128 + 4 * 6
    np.testing.assert_allclose(np.frombuffer(data, "<f4", offset=128), expected, atol=1e-6)  # float32, near 1
    meta = (tmp_path / "after/embedding_collection_0/meta_data").read_bytes()
    assert np.frombuffer(meta[:24], "<i4").tolist() == [1, 1, 0, 0, 1, 0]
    assert np.frombuffer(meta[24:32], "<u8").tolist() == [6]
    assert np.frombuffer(meta[32:], "<i4").tolist() == [1]
    keys = (tmp_path / "after/embedding_collection_0/key0").read_bytes()
    assert np.frombuffer(keys[:8], "<i4").tolist() == [1, 0]
    assert np.frombuffer(keys, "<i8", offset=128).tolist() == list(range(6))


def test_one_column_in_two_tables_and_a_subset_of_a_dump(tmp_path: Path) -> None:
    wide, deep = table("wide", 6, 1), table("deep", 6, 3)
    model = start(tmp_path, [([wide, deep], ["data0", "data0"], "emb", "sum")], 4)
    values = [np.random.default_rng(i).random((6, w)).astype("<f4") for i, w in enumerate((1, 3))]
    write_dump(tmp_path / "dump", values, [np.arange(6)[::-1]] * 2)
    model.embedding_load(str(tmp_path / "dump"), ["deep"])
    model.eval()
    found = model.check_out_tensor("emb", hugectr.Tensor_t.Evaluate)
    np.testing.assert_array_equal(found[:, 1:], values[1][::-1][KEYS[:, 0]])
    assert not np.array_equal(found[:, :1], values[0][::-1][KEYS[:, 0]])
    model.embedding_dump(str(tmp_path / "part"), ["deep"])
    assert sorted(one.name for one in (tmp_path / "part/embedding_collection_0").iterdir()) == [
        "key1", "meta_data", "weight1",
    ]  # fmt: skip
    model.embedding_load(str(tmp_path / "part"), ["deep"])
    with pytest.raises(CheckpointError, match="the dump does not contain the table"):
        model.embedding_load(str(tmp_path / "part"), ["wide"])


def test_plans_are_checked() -> None:
    a, b = table("a", 6, 4), table("b", 6, 4)
    collection = hugectr.EmbeddingCollectionConfig(True, hugectr.CommunicationStrategy.Hierarchical)
    collection.embedding_lookup([a, b], ["x", "y"], "emb", ["sum", "sum"])
    collection.shard([["a", "b"], ["b"]], [("mp", [("a", 2)]), ("dp", ["b"])], {})
    for matrix, strategy, named in (
        ([["a"], ["b"]], [("dp", ["a"])], "every GPU"),
        ([["a"]], [("mp", ["b"])], "not on any GPU"),
        ([["a", "b"]], [("mp", [("a", 3)])], "ev_size"),
        ([["a", "c"]], [], "no lookup uses a table of this name"),
        ([["a", "b"]], [("rp", ["a"])], "unknown strategy"),
    ):
        with pytest.raises(ConfigError, match=named):
            collection.shard(shard_matrix=matrix, shard_strategy=strategy)
    with pytest.raises(ConfigError, match="unknown combiner"):
        collection.embedding_lookup(a, "x", "again", "max")


def test_a_table_that_is_averaged_has_no_second_combiner(tmp_path: Path) -> None:
    a = table("a", 6, 2)
    with pytest.raises(ConfigError, match="a table with combiner mean"):
        start(tmp_path, [([a, a], ["data1", "data2"], "emb", ["average", "concat"])], 6)


def test_the_planner_of_3_7_reads_its_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('[{"local_embedding_list": [0], "table_placement_strategy": "mp"}]')
    planner = hugectr.EmbeddingPlanner()
    config = hugectr.EmbeddingTableConfig(table_id=0, max_vocabulary_size=6, ev_size=2, min_key=0, max_key=5)
    planner.embedding_lookup(table_config=config, bottom_name="data0", top_name="emb", combiner="sum")
    collection = planner.create_embedding_collection(str(tmp_path / "plan.json"))
    assert list(collection.tables) == ["0"]
