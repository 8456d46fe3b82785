"""What scripts of single versions of HugeCTR ask for, and checks that are no stricter than HugeCTR's."""

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import viviane.config as settings
from viviane.compat.hugectr import run_script, train_from_json
from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.json_first import layers_of_2_0
from viviane.compat.hugectr.json_graph import graph_layers
from viviane.compat.hugectr.raw_files import is_of_2_0
from viviane.compat.hugectr.reading import DataReader, close_readers
from viviane.compat.hugectr.symbols import modules
from viviane.compat.hugectr.versions import METHODS, RENAMED, older_names
from viviane.core.errors import ConfigError
from viviane.data import Dataset
from viviane.data.formats import NormFormat
from viviane.data.write import write_dataset
from viviane.schema import Schema

MADE = modules()
h: Any = MADE["hugectr"]
KIND, LAYER, HASH = h.DataReaderType_t, h.Layer_t, h.Embedding_t.DistributedSlotSparseEmbeddingHash
DIM = 4


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    print_notes()
    close_readers()


def parquet(keys: Any, num_dense: int = 1, labels: Any = None) -> str:
    """Write rows with these keys, (rows, slots), and return the file list."""
    keys = np.asarray(keys, "<i8")
    rows = len(keys)
    labels = np.arange(rows)[:, None] % 2 if labels is None else np.asarray(labels)
    named: dict[str, list[tuple[str, Any]]] = {
        "labels": [(f"y{i}", labels[:, i].astype("<f4")) for i in range(labels.shape[1])],
        "conts": [(f"d{i}", np.full(rows, 0.5, "<f4")) for i in range(num_dense)],
        "cats": [(f"c{i}", keys[:, i]) for i in range(keys.shape[1])],
    }
    columns = [one for part in named.values() for one in part]
    pq.write_table(pa.table(dict(columns)), "rows.parquet")
    places = {name: i for i, (name, _) in enumerate(columns)}
    content: dict[str, Any] = {
        kind: [{"col_name": name, "index": places[name]} for name, _ in part] for kind, part in named.items()
    }
    Path("_metadata.json").write_text(json.dumps({"file_stats": [{"file_name": "rows.parquet", "num_rows": rows}],
                                                  **content}))  # fmt: skip
    Path("list.txt").write_text("1\nrows.parquet\n")
    return "list.txt"


def build(
    source: str, groups: Sequence[tuple[str, int]], sizes: Sequence[int] = (), *, kind: Any = None, num_dense: int = 1,
    batch: int = 4, label_dim: int = 1, compiled: bool = True, nnz: int = 1, optimizer: Any = None, **solver: Any,
) -> Any:  # fmt: skip
    """Return a model of one embedding for each group of slots and a linear layer over all of them."""
    given = {"batchsize": batch, "batchsize_eval": batch, "max_eval_batches": 1, "lr": 0.1, "i64_input_key": True}
    more = {} if kind is None else {"num_samples": 4, "eval_num_samples": 4, "float_label_dense": True}
    reader = h.DataReaderParams(kind or KIND.Parquet, [source], eval_source=source, check_type=h.Check_t.Non,
                                slot_size_array=list(sizes), **more)  # fmt: skip
    rule = optimizer or h.CreateOptimizer(optimizer_type=h.Optimizer_t.SGD)
    model = h.Model(h.CreateSolver(**{**given, **solver}), reader, rule)
    sparse = [h.DataReaderSparseParam(name, nnz, True, slots) for name, slots in groups]
    model.add(h.Input(label_dim, "label", num_dense, "dense", sparse))
    for name, slots in groups:
        model.add(h.SparseEmbedding(HASH, 1, DIM, "sum", f"{name}_table", name))
        model.add(h.DenseLayer(LAYER.Reshape, [f"{name}_table"], [f"{name}_flat"], leading_dim=slots * DIM))
    model.add(h.DenseLayer(LAYER.Concat, [*(f"{name}_flat" for name, _ in groups), "dense"], ["all"]))
    model.add(h.DenseLayer(LAYER.InnerProduct, ["all"], ["logit"], num_output=label_dim))
    loss = LAYER.BinaryCrossEntropyLoss if label_dim == 1 else LAYER.CrossEntropyLoss
    model.add(h.DenseLayer(loss, ["logit", "label"], ["loss"]))
    if compiled:
        model.compile()
    return model


def vectors_of(model: Any, name: str) -> np.ndarray:
    model.eval()
    return model.check_out_tensor(name, h.Tensor_t.Evaluate)


KEYS = [[3, 1, 1, 2, 0], [4, 0, 2, 1, 1], [0, 2, 2, 0, 0], [1, 1, 0, 2, 1]]


def test_a_slot_of_size_0_has_the_keys_of_the_next_slot() -> None:
    # DIN's form: a user, a history of two goods and the target among them, and a category
    groups = [("user", 1), ("goods", 3), ("category", 1)]
    model = build(parquet(KEYS), groups, [5, 0, 0, 3, 2])
    for _ in range(3):  # rows come as keys are met
        model.train()
    found = vectors_of(model, "goods_table")
    by_key: dict[int, np.ndarray] = {}
    for row, keys in enumerate(KEYS):
        for slot in range(3):
            key = keys[1 + slot]
            np.testing.assert_array_equal(by_key.setdefault(key, found[row, slot]), found[row, slot])
    assert len({tuple(vector) for vector in by_key.values()}) == 3
    model.save_params_to_files("m")
    keys_of = [set(np.fromfile(f"m{i}_sparse_0.model/key", "<i8").tolist()) for i in range(3)]
    assert keys_of == [{0, 1, 2, 3, 4}, {5, 6, 7}, {8, 9}]  # as HugeCTR's sums of the sizes before a slot count them


def test_groups_of_zeros_alone_have_tables_of_their_own() -> None:
    # BST's form: the history's group has zeros alone, and the target's has the size
    model = build(parquet(KEYS), [("user", 1), ("history", 2), ("target", 1), ("category", 1)], [5, 0, 0, 3, 2])
    model.train()
    model.save_params_to_files("m")
    history, target = (np.fromfile(f"m{i}_sparse_0.model/key", "<i8") for i in (1, 2))
    assert set(history.tolist()) <= {5, 6, 7}
    assert set(target.tolist()) == {5, 6, 7}
    with pytest.raises(ConfigError, match="numbers from 0"):
        build("list.txt", [("user", 5)], [5, -1, 0, 3, 2])


def test_keys_beyond_their_slots_make_a_hash_table_take_any_key(capsys: pytest.CaptureFixture[str]) -> None:
    model = build(parquet(KEYS), [("user", 1), ("goods", 3), ("category", 1)], [5, 3, 3, 2, 2])
    assert "keys of c3 are not in the range of slot_size_array, 0 to 1, but 0 to 2" in capsys.readouterr().out
    assert vectors_of(model, "goods_table").shape == (4, 3, DIM)
    model.train()
    model.save_params_to_files("m")
    # HugeCTR adds 11 to the keys of c3: its key 2 is then the key 0 of the slot after it, in another table
    assert set(np.fromfile("m1_sparse_0.model/key", "<i8").tolist()) == {5, 6, 7, 8, 9, 10, 11, 12, 13}


def test_summary_and_readers_are_there_before_compile(capsys: pytest.CaptureFixture[str]) -> None:
    source = parquet(KEYS)
    model = build(source, [("keys", 5)], compiled=False, repeat_dataset=False)
    model.summary()
    before = capsys.readouterr().out
    assert "InnerProduct" in before
    assert "logit" in before
    train, evaluate = model.get_data_reader_train(), model.get_data_reader_eval()
    with pytest.raises(AttributeError, match=r"before model\.compile"):
        train.is_eof()
    train.set_source("elsewhere.txt")
    train.set_source(source)
    assert train.is_started()
    assert not evaluate.is_started()
    model.compile()
    assert model.train()
    assert not model.train()
    assert train.is_eof()
    train.set_source()
    assert model.train()
    evaluate.set_source()  # the source of DataReaderParams
    assert model.eval()
    assert model.get_data_reader_train() is not train


def test_set_source_without_argument_takes_the_first_source_of_the_parameters() -> None:
    model = build(parquet(KEYS), [("keys", 5)], repeat_dataset=False)
    model.get_data_reader_train().set_source()
    assert model.train(False)
    assert not model.train(False)
    model.reader_params.eval_source = ""
    with pytest.raises(ConfigError, match="no source has been set"):
        model.get_data_reader_eval().set_source()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([-1, 11], {"leading_dim": 11}),
        ([-1, 26, 11], {"leading_dim": 11, "time_step": 26}),
        ((-1, 2, 13, 11), {"shape": [2, 13, 11]}),
        ([286], {"shape": [286]}),
    ],
)
def test_a_shape_that_begins_with_minus_1_merges_leading_dimensions(shape: Any, expected: dict[str, Any]) -> None:
    node = h.DenseLayer(LAYER.Reshape, ["a"], ["b"], shape=shape).to_node(set())
    assert node.params == expected


def test_rows_of_slots_come_together_again_after_a_reshape() -> None:
    model = build(parquet(KEYS), [("keys", 5)], compiled=False)
    for bottom, top, shape in (("keys_table", "rows", [-1, DIM]), ("rows", "again", [-1, 5 * DIM])):
        model.added.insert(-3, h.DenseLayer(LAYER.Reshape, [bottom], [top], shape=shape))
    model.added[-3] = h.DenseLayer(LAYER.Concat, ["again", "dense"], ["all"])
    model.compile()
    assert vectors_of(model, "rows").shape == (20, DIM)
    np.testing.assert_array_equal(vectors_of(model, "all")[:, :-1], vectors_of(model, "keys_table").reshape(4, -1))


def test_the_first_json_becomes_that_of_2_1() -> None:
    data = {"source": "a", "eval_source": "b", "max_feature_num_per_sample": 100, "label_dim": 1, "slot_num": 10}
    hparam = {"vocabulary_size": 9, "load_factor": 0.75, "embedding_vec_size": 8, "combiner": 0}
    layers = [
        {"name": "e", "type": "SparseEmbeddingHash", "top": "e", "sparse_embedding_hparam": hparam},
        {"name": "c", "type": "Concat", "bottom": "e", "top": "c"},
        {"name": "m", "type": "Concat", "bottom": ["e"], "top": "m", "slot_mask": [0, 3]},
        {"name": "j", "type": "Concat", "bottom": ["c", "m"], "top": "j"},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": "j", "top": "loss"},
    ]
    first, embedding, flat, masked, joined, loss = layers_of_2_0(data, layers, "x.json")
    assert (first["type"], first["label"]["label_dim"], first["dense"]["dense_dim"]) == ("Data", 1, 0)
    assert (first["sparse"][0]["slot_num"], first["sparse"][0]["top"]) == (10, embedding["bottom"])
    assert (flat["type"], flat["leading_dim"]) == ("Reshape", 80)
    assert (masked["type"], masked["selected"], "slot_mask" in masked) == ("Reshape", [0, 3], False)
    assert joined == layers[3]
    assert loss["bottom"] == ["j", "label"]
    for wrong in ([], {"slot_num": 1}):
        with pytest.raises(ConfigError, match=r"x\.json"):
            layers_of_2_0(wrong, layers, "x.json")


def norm_file(version: Literal["2.0", "2.1"] = "2.1") -> str:
    options = NormFormat(check_sum=False, shifted_keys=False, version=version)
    schema = Schema.from_dict({
        "labels": [{"name": "y"}],
        "categorical": [{"name": f"c{i}", "num_ids": 10, "kind": "multi_hot"} for i in range(2)],
    })  # fmt: skip
    rows = {"y": [0, 1, 1, 0] * 8, "c0": [[1, 2], [3]] * 16, "c1": [[4], [5, 6]] * 16}
    write_dataset("data", schema, [rows], format=options)
    assert len(Dataset("data", schema, format=options)) == 32
    return "data/file_list.txt"


def first_json(version: Literal["2.0", "2.1"] = "2.1") -> str:
    source = norm_file(version)
    config = {
        "solver": {"lr_policy": "fixed", "display": 1, "max_iter": 3, "gpu": [0], "batchsize": 8, "snapshot": 1000,
                   "seed": 7, "snapshot_prefix": "./", "eval_interval": 2, "eval_batches": 2},
        "optimizer": {"type": "Adam", "adam_hparam": {"alpha": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}},
        "data": {"source": source, "eval_source": source, "max_feature_num_per_sample": 4, "label_dim": 1,
                 "slot_num": 2},
        "layers": [
            {"name": "e", "type": "SparseEmbeddingHash", "top": "e",
             "sparse_embedding_hparam": {"vocabulary_size": 20, "load_factor": 0.75, "embedding_vec_size": 3,
                                         "combiner": 0}},
            {"name": "c", "type": "Concat", "bottom": "e", "top": "c"},
            {"name": "fc", "type": "InnerProduct", "bottom": "c", "top": "fc", "fc_param": {"num_output": 1}},
            {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": "fc", "top": "loss"},
        ],
    }  # fmt: skip
    Path("first.json").write_text(json.dumps(config))
    return "first.json"


def test_data_files_of_2_0_train_as_later_ones(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for version in ("2.0", "2.1"):
        train_from_json(first_json(version))
        printed.append(re.findall(r"Loss: [\d.]+|AUC: [\d.]+", capsys.readouterr().out))
        shutil.rmtree("data")
    assert printed[0] == printed[1]
    assert len(printed[0]) >= 4


@pytest.mark.parametrize("checked", [True, False])
def test_headers_of_2_0_are_told_from_later_ones(checked: bool) -> None:
    schema = Schema.from_dict({"labels": [{"name": "y"}], "categorical": [{"name": "c", "num_ids": 10}]})
    for rows in (1, 63, 64, 65):  # 64 is also the length of the later header, which stands in front of it
        columns = {"y": [1.0] * rows, "c": [3] * rows}
        for version, expected in (("2.0", True), ("2.1", False)):
            folder = f"{version}-{rows}"
            write_dataset(folder, schema, [columns], format=NormFormat(check_sum=checked, version=version))
            assert is_of_2_0(f"{folder}/file_list.txt") == is_of_2_0(f"{folder}/part-00000.norm") == expected


def test_sizes_have_two_names_in_json() -> None:
    data = {"type": "Data", "top": "data", "slot_size": [5, 7], "sparse": [], "source": "x"}
    one = {"type": "LocalizedSlotSparseEmbeddingOneHot", "bottom": "d", "top": "e", "slot_size": [5, 7],
           "sparse_embedding_hparam": {"embedding_vec_size": 2, "combiner": 0}}  # fmt: skip
    alone = {key: value for key, value in one.items() if key != "slot_size"}
    for layer in (one, alone):  # sizes of the layer's own, or those of the data
        _, embedding = graph_layers({"layers": [data, layer]}, True, "x.json")
        assert list(embedding.slot_size_array) == [5, 7]


def test_the_first_json_trains_and_so_does_the_first_python(capsys: pytest.CaptureFixture[str]) -> None:
    train_from_json(first_json())
    assert "Iter: 3 " in capsys.readouterr().out
    solver = h.SolverParser("first.json")
    assert (solver.batchsize, solver.max_eval_batches, solver.repeat_dataset, solver.lr) == (8, 2, True, 0.01)
    session = h.Session.Create(solver, "first.json")
    assert session.train()
    ((name, value),) = session.evaluation()
    assert name == "AUC"
    assert 0 <= value <= 1


@pytest.mark.parametrize("wide", [False, True])
def test_raw_has_one_key_a_slot_of_4_bytes_whatever_the_script_says(wide: bool) -> None:
    keys = np.array(KEYS, "<i4")
    rows = [np.array([i % 2, 0.5], "<f4").tobytes() + keys[i].tobytes() for i in range(4)]
    Path("rows.bin").write_bytes(b"".join(rows))
    model = build("rows.bin", [("keys", 5)], kind=KIND.Raw, nnz=3, i64_input_key=wide)
    model.train()
    found = vectors_of(model, "keys_table")
    np.testing.assert_array_equal(found[0, 1], found[0, 2])  # both are key 1
    assert not np.array_equal(found[0, 0], found[0, 1])


def test_cross_entropy_of_two_labels(capsys: pytest.CaptureFixture[str]) -> None:
    labels = [[1, 0], [0, 1], [0.25, 0.75], [0, 1]]
    model = build(
        parquet(KEYS, labels=labels), [("keys", 5)], [5, 3, 3, 3, 2], label_dim=2, model_name="with two labels"
    )
    model.eval()
    shares = model.check_out_tensor("logit", h.Tensor_t.Evaluate)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    model.export_predictions("p", "y")
    np.testing.assert_allclose(np.loadtxt("p"), shares.reshape(-1), rtol=1e-4)  # %g keeps 6 digits
    np.testing.assert_array_equal(np.loadtxt("y"), np.array(labels).reshape(-1))
    model.train()
    expected = -(np.array(labels) * np.log(shares)).sum(1).mean()
    assert model.get_current_loss() == pytest.approx(expected, rel=1e-5)
    model.graph_to_json("m.json")
    assert json.loads(Path("m.json").read_text())["model_name"] == "with two labels"


def save(folder: str, keys: Sequence[int], slots: Sequence[int] | None = None) -> np.ndarray:
    vectors = np.arange(len(keys) * DIM, dtype="<f4").reshape(-1, DIM)
    Path(folder).mkdir()
    np.array(keys, "<i8").tofile(f"{folder}/key")
    vectors.tofile(f"{folder}/emb_vector")
    if slots is not None:
        np.array(slots, "<u8").tofile(f"{folder}/slot_id")
    return vectors


def test_sparse_files_whose_keys_count_from_0_in_each_slot(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[0, 1], [1, 0], [2, 1], [0, 0]]
    model = build(parquet(rows), [("keys", 2)], [3, 2])
    vectors = save("unshifted", [0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    model.load_sparse_weights(["unshifted"])
    assert "slot_id determines the slot" in capsys.readouterr().out
    expected = np.stack([vectors[[first, 3 + second]] for first, second in rows])
    np.testing.assert_array_equal(vectors_of(model, "keys_table"), expected)
    save("shifted", [0, 1, 2, 3, 4], [0, 0, 0, 1, 1])
    model.load_sparse_weights(["shifted"])
    np.testing.assert_array_equal(vectors_of(model, "keys_table"), expected)
    assert "slot_id" not in capsys.readouterr().out


def test_rows_of_keys_that_no_slot_has_are_left_out_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = build(parquet([[0, 1], [1, 0], [2, 1], [0, 0]]), [("keys", 2)], [3, 2],
                  optimizer=h.CreateOptimizer(h.Optimizer_t.AdaGrad))  # fmt: skip
    vectors = save("more", [99, 1, 3])
    model.load_sparse_weights({"keys_table": "more"})
    assert "1 of 3 keys are in no slot, such as 99; slot_size_array covers 0 to 4" in capsys.readouterr().out
    np.testing.assert_array_equal(vectors_of(model, "keys_table")[1], vectors[1:])
    (vectors + 1).tofile("state")
    model.load_sparse_optimizer_states(["state"])
    model.save_params_to_files("m")
    state = np.fromfile("m0_opt_sparse_0.model", "<f4")[: 5 * DIM].reshape(5, DIM)
    np.testing.assert_array_equal(state[[1, 3]], vectors[1:] + 1)


def test_sizes_that_differ_and_sizes_of_one_embedding_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = build(parquet(KEYS), [("keys", 5)], [5, 3, 3, 3, 2], compiled=False)
    model.added[1] = h.SparseEmbedding(HASH, 1, DIM, "sum", "keys_table", "keys", [5, 3, 3, 9, 2])
    model.added.insert(2, h.SparseEmbedding(HASH, 1, 1, "sum", "wide", "keys"))
    model.compile()
    assert "slot c3 has 9 keys here and 3 elsewhere" in capsys.readouterr().out


def test_the_planner_of_4_1_takes_its_plan_from_python() -> None:
    source = parquet([[0, 1], [1, 0], [2, 1], [0, 0]])
    planner = h.EmbeddingPlanner()
    for i, size in enumerate((3, 2)):
        table = h.EmbeddingTableConfig(id_space=i, max_vocabulary_size=size, ev_size=DIM, min_key=0, max_key=size)
        planner.embedding_lookup(table, f"k{i}", f"v{i}", "sum")
    with pytest.raises(ConfigError, match="unknown strategy"):
        planner.create_embedding_collection(shard_matrix=[[0], [1]], emb_table_placement_strategy=["pm"])
    with pytest.raises(ConfigError, match="a plan must be a list"):
        planner.create_embedding_collection()
    collection = planner.create_embedding_collection(
        shard_matrix=[[0], [1]], emb_table_group_strategy=[[0], [1]], emb_table_placement_strategy=["mp", "dp"]
    )
    model = build(source, [("k0", 1), ("k1", 1)], compiled=False)
    model.added[1:5] = [collection]
    model.added[2:3] = [
        h.DenseLayer(LAYER.Concat, ["v0", "v1"], ["v"]),
        h.DenseLayer(LAYER.Reshape, ["v"], ["all"], leading_dim=2 * DIM),
    ]
    model.compile()
    assert model.train()


def test_calls_of_mpi4py_and_of_mlperf_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.py").write_text(
        "import threading\nfrom mpi4py import MPI\nimport mlperf_logging.mllog.constants as c\n"
        "from mlperf_common.frameworks.hugectr import HCTRCommunicationHandler\n"
        "from mlperf_common.logging import MLLoggerWrapper\nimport numpy as np\n"
        "seen = []\none = threading.Thread(target=lambda: seen.append(MPI.Is_thread_main()))\n"
        "one.start()\none.join()\n"
        "print(MPI.Is_thread_main(), seen, MPI.Query_thread() == MPI.THREAD_MULTIPLE, len(MPI.Get_version()))\n"
        "a, b = np.arange(3.0), np.zeros(3)\nMPI.COMM_WORLD.Allreduce(a, b, op=MPI.SUM)\n"
        "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, a, op=MPI.MAX)\nprint(b, a)\n"
        "g = np.zeros((1, 3))\nMPI.COMM_WORLD.Allgather(a, g)\nprint(g)\n"
        "r = np.zeros(3)\nMPI.COMM_WORLD.Reduce([a, MPI.DOUBLE], [r, 3, MPI.DOUBLE], op=MPI.SUM, root=0)\n"
        "MPI.COMM_WORLD.Bcast([r, MPI.DOUBLE], root=0)\nMPI.COMM_WORLD.Gather(a, g, root=0)\nprint('reduced', r, g)\n"
        "log = MLLoggerWrapper(HCTRCommunicationHandler(), value=None)\nlog.start(key=c.INIT_START)\n"
        "log.mlperf_submission_log(c.DLRM_DCNv2, 2, 'NVIDIA')\nlog.log_init_stop_run_start()\n"
        "log.log_run_stop(status=c.SUCCESS, epoch_num=0.5)\nprint(log.comm_handler.global_rank())\n"
    )
    run_script("s.py")
    printed = capsys.readouterr().out
    assert "True [False] True 2" in printed
    assert "[0. 1. 2.] [0. 1. 2.]" in printed
    assert "[[0. 1. 2.]]" in printed
    assert "reduced [0. 1. 2.] [[0. 1. 2.]]" in printed
    for entry in (
        '"key": "submission_benchmark", "value": "dlrm_dcnv2"', '"value": "2 nodes"',
        '"event_type": "INTERVAL_END", "key": "init_stop"', '"event_type": "INTERVAL_START", "key": "run_start"',
        '"key": "run_stop", "value": null, "metadata": {"status": "success", "epoch_num": 0.5}',
    ):  # fmt: skip
        assert entry in printed, entry
    assert "mlperf_common" not in sys.modules


def test_a_model_trains_in_a_thread_of_the_scripts_own() -> None:
    losses: list[float] = []

    def work() -> None:
        model = build(parquet(KEYS), [("keys", 5)])
        model.start_data_reading()
        model.train()
        losses.append(model.get_current_loss())

    one = threading.Thread(target=work)
    one.start()
    one.join()
    assert np.isfinite(losses).all()
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("given", "static", "expected"),
    [
        ({"update_type": "Local"}, True, settings.Adam(epsilon=1e-7, update="local")),
        ({"update_type": "LazyGlobal"}, True, settings.Adam(epsilon=1e-7, update="lazy_global")),
        ({"update_type": "LazyGlobal"}, False, settings.Adam(epsilon=1e-7, update="lazy_global")),
        ({"update_type": "Global"}, True, settings.Adam(epsilon=1e-7, update="global")),
        ({"update_type": "Global"}, False, settings.Adam(epsilon=1e-7, update="lazy_global")),
        ({"optimizer_type": "RMSProp", "beta": 0.75}, False, settings.RMSProp(decay=0.75, epsilon=1e-7)),
        ({"optimizer_type": "RMSProp"}, False, settings.RMSProp(decay=0.9, epsilon=1e-7)),
        ({"optimizer_type": "Ftrl", "beta": 0.5, "lambda1": 0.1, "lambda2": 0.2}, True,
         settings.Ftrl(beta=0.5, lambda1=0.1, lambda2=0.2)),
        ({"optimizer_type": "AdaGrad", "initial_accu_value": 0.25}, True,
         settings.AdaGrad(initial_accumulator=0.25, epsilon=1e-7)),
        ({"optimizer_type": "MomentumSGD", "momentum_factor": 0.5, "update_type": "LazyGlobal"}, True,
         settings.SGD(momentum=0.5, update="local")),
        ({"optimizer_type": "Nesterov", "momentum_factor": 0.5, "update_type": "Global"}, True,
         settings.SGD(momentum=0.5, nesterov=True, update="global")),
    ],
)  # fmt: skip
def test_each_rule_of_a_table(given: dict[str, Any], static: bool, expected: Any) -> None:
    kinds = {"optimizer_type": h.Optimizer_t, "update_type": h.Update_t}
    rule = h.CreateOptimizer(**{name: kinds[name][one] if name in kinds else one for name, one in given.items()})
    assert rule.to_sparse(static=static, where="test") == expected


def test_every_name_of_an_older_version_is_taken_where_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.compat.hugectr.arguments.checked_type", lambda call, name, value, *_: value)
    own = {"DataSourceParams": MADE["hugectr.data"].DataSourceParams}
    for version, calls in RENAMED.items():
        for call, names in calls.items():
            assert names.items() <= older_names(call).items()
            if "." in call:  # methods, whose own tests pass these names
                continue
            signature = getattr(h, call, own.get(call)).signature
            for old, new in names.items():
                given = {name: 1 for name, default in signature.defaults.items() if name != new}
                given = {name: one for name, one in given.items() if name not in signature.refused}
                assert signature.bind((), {**given, old: 7})[new] == 7, (version, call, old)
                with pytest.raises(ConfigError, match="twice"):
                    signature.bind((), {old: 7, new: 7})
    shown = {"Session": h.Session, "Model": h.Model, "DataReader": DataReader}
    for methods in METHODS.values():
        for old in methods:
            owner, _, name = old.rpartition(".")
            assert callable(getattr(shown[owner] if owner else h, name)), old


def test_the_guide_has_a_table_for_each_version() -> None:
    guide = (Path(__file__).parents[2] / "docs/how-to/migrate-from-hugectr.md").read_text(encoding="utf-8")
    for version, calls in RENAMED.items():
        for names in calls.values():
            assert all(f"`{old}`" in guide for old in names), version
    for methods in METHODS.values():
        assert all(f"`{old.rpartition('.')[2]}`" in guide for old in methods)


def test_a_script_that_needs_another_package_says_which() -> None:
    Path("s.py").write_text("import hugectr\nimport not_installed_anywhere\n")
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        run_script("s.py")
    Path("s.py").write_text(
        "import hugectr\ntry:\n    from hugectr_elsewhere import x\nexcept ImportError:\n    print('without')\n"
    )
    run_script("s.py")


def test_passes_of_the_first_session(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(Path(first_json()).read_text())
    keyset = Path("list.keyset")
    np.arange(1, 7, dtype="<u4").tofile(keyset)
    solver = h.solver_parser_helper(batchsize=8, batchsize_eval=8, repeat_dataset=False, max_eval_batches=300)
    session = h.Session(solver, "first.json", True, "./temp_embedding")
    train, evaluate = session.get_data_reader_train(), session.get_data_reader_eval()
    evaluate.set_file_list_source(config["data"]["source"])
    cache = session.get_model_prefetcher()
    for _ in range(2):
        train.set_file_list_source(config["data"]["source"])
        cache.update(str(keyset))
        steps = 0
        while session.train():
            steps += 1
            ((_, value),) = session.evaluation()  # to the end of its data each time
            assert 0 < value < 1
        assert steps == 4


def test_tensors_of_any_name() -> None:
    model = build(parquet(KEYS), [("goods. list", 5)])
    model.train()
    before = vectors_of(model, "goods. list_table")
    model.freeze_embedding("goods. list_table")
    model.train()
    np.testing.assert_array_equal(vectors_of(model, "goods. list_table"), before)
    model.unfreeze_embedding("goods. list_table")
    model.train()
    assert not np.array_equal(vectors_of(model, "goods. list_table"), before)
    model.graph_to_json("m.json")
    layers = json.loads(Path("m.json").read_text())["layers"]
    assert layers[0]["sparse"][0]["top"] == "goods. list"
    assert [layers[1][key] for key in ("name", "bottom", "top")] == [
        "goods. list_table", "goods. list", "goods. list_table",
    ]  # fmt: skip
    assert (layers[2]["bottom"], layers[2]["top"]) == ("goods. list_table", "goods. list_flat")
    model.save_params_to_files("m")
    again = h.Model(model.solver, model.reader_params, model.opt_params)
    again.construct_from_json("m.json", True)
    again.compile(loss_names=["label"], loss_weights=[0.5])
    again.load_sparse_weights({"goods. list_table": "m0_sparse_0.model"})
    np.testing.assert_array_equal(vectors_of(again, "goods. list_table"), vectors_of(model, "goods. list_table"))
    assert model.get_eval_metrics()[0][0] == "AUC"
