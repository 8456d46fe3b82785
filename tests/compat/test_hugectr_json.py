"""HugeCTR's JSON of 2.0 to 4.3, in all its spellings."""

import json
from pathlib import Path
from typing import Any

import pytest

from viviane.compat.hugectr.enums import DataReaderType_t, Embedding_t, Optimizer_t, Update_t
from viviane.compat.hugectr.json_graph import graph_layers, reader_from_json
from viviane.compat.hugectr.json_layers import layer_to_json
from viviane.compat.hugectr.json_optimizer import optimizer_from_json, schedule_from_json
from viviane.compat.hugectr.layers import DenseLayer
from viviane.compat.hugectr.session import Session, SessionSolver
from viviane.compat.hugectr.solver import Solver
from viviane.compat.hugectr.train_json import solver_from_json, train_from_json
from viviane.core.errors import ConfigError

from .test_hugectr_numbers import KEYS, norm_file

FC: list[dict[str, Any]] = [
    {"name": "r", "type": "Reshape", "bottom": "emb", "top": "r", "leading_dim": 6},
    {"name": "bn", "type": "BatchNorm", "bottom": "r", "top": "bn", "bn_param": {"is_training": True, "factor": 0.9}},
    {"name": "fc1", "type": "InnerProduct", "bottom": "bn", "top": "fc1", "activation": "None",
     "fc_param": {"num_output": 1, "weight_init": "XavierUniform", "bias_init": "Zero"}},
    {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc1", "label"], "top": "loss",
     "regularizer": "L2", "lambda": 0.001},
]  # fmt: skip
HPARAM = {"embedding_vec_size": 2, "combiner": 0}


def data(source: str, sparse: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "data", "type": "Data", "source": source, "eval_source": source, "check": "None",
        "label": {"top": "label", "label_dim": 1}, "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [{"top": "data1", "slot_num": 3, **sparse}], **more,
    }  # fmt: skip


def embedding(kind: str, **more: Any) -> dict[str, Any]:
    return {"name": "emb", "type": kind, "bottom": "data1", "top": "emb", "sparse_embedding_hparam": {**HPARAM, **more}}


SOLVER = {
    "lr_policy": "fixed", "display": 2, "max_iter": 4, "gpu": [0, 1], "batchsize": 5, "batchsize_eval": 5,
    "snapshot": 1000, "snapshot_prefix": "./", "eval_interval": 4, "eval_batches": 1, "input_key_type": "I64",
    "algorithm_search": True, "cuda_graph": False, "seed": 3,
}  # fmt: skip
ADAM = {"type": "Adam", "global_update": True, "adam_hparam": {"alpha": 0.1, "beta1": 0.9, "beta2": 0.999,
                                                              "epsilon": 1e-8}}  # fmt: skip
SGD = {"type": "SGD", "update_type": "Local", "sgd_hparam": {"learning_rate": 24.0, "atomic_update": True,
       "warmup_steps": 8000, "decay_start": 48000, "decay_steps": 24000, "decay_power": 2.0, "end_lr": 0}}  # fmt: skip


@pytest.mark.parametrize(
    ("sparse", "kind", "hparam"),
    [
        ({"type": "DistributedSlot", "max_feature_num_per_sample": 9}, "DistributedSlotSparseEmbeddingHash",
         {"vocabulary_size": 100, "load_factor": 0.75}),
        ({"type": "LocalizedSlot", "max_feature_num_per_sample": 9, "max_nnz": 1}, "LocalizedSlotSparseEmbeddingHash",
         {"max_vocabulary_size_per_gpu": 100}),
        ({"is_fixed_length": False, "nnz_per_slot": 1}, "DistributedSlotSparseEmbeddingHash",
         {"workspace_size_per_gpu_in_mb": 1}),
        ({"is_fixed_length": True, "nnz_per_slot": [1, 1, 1]}, "LocalizedSlotSparseEmbeddingOneHot",
         {"slot_size_array": [3, 5, 7]}),
    ],
)  # fmt: skip
def test_every_age_of_json_trains(
    sparse: dict[str, Any], kind: str, hparam: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = KEYS.copy()
    keys[:, 2] += 8  # slots begin at 0, 3 and 8
    layers = [data(norm_file(tmp_path, keys), sparse), embedding(kind, **hparam), *FC]
    (tmp_path / "c.json").write_text(json.dumps({"solver": SOLVER, "optimizer": ADAM, "layers": layers}))
    train_from_json(tmp_path / "c.json")
    printed = capsys.readouterr().out
    assert "Finish 4 iterations with batchsize: 5 in" in printed
    assert "Warning: vvgpu [[0, 1]]" in printed
    assert "lr:0.1" in printed


def test_a_graph_alone_without_data_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = data("", {"is_fixed_length": False, "nnz_per_slot": 1})
    del one["source"], one["eval_source"]
    content = {"model_name": "m", "layers": [one, embedding("DistributedSlotSparseEmbeddingHash"), *FC]}
    (tmp_path / "g.json").write_text(json.dumps(content))
    assert train_from_json(tmp_path / "g.json").solver.model_name == "m"
    assert "has no source" in capsys.readouterr().out


def test_json_that_is_no_graph_is_named(tmp_path: Path) -> None:
    for content, named in (
        ({"supportlonglong": True, "models": []}, "HPS"),
        ({"slot_size_array": [1]}, "DataGenerator"),
        ({"type": "all2all", "plan": [[0, 1]]}, "plan_file"),
        ([{"local_embedding_list": [0]}], "plan_file"),
        ({"lr": 1}, "solver, optimizer and layers"),
        ({"layers": [data("", {}), {"name": "fc", "type": "InnerProduct", "top": "fc"}]}, "(?s)layer 'fc'.*'bottom'"),
    ):
        (tmp_path / "x.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=named):
            train_from_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("key", "value"), [("check", "Some"), ("format", "Tsv"), ("async_param", {"aligned_type": "x"})]
)
def test_words_of_the_data_layer_are_known(key: str, value: Any) -> None:
    """They were taken for "None"."""
    with pytest.raises(ConfigError, match=rf"layer Data, {key}"):
        reader_from_json(data("a", {}) | {key: value})


@pytest.mark.parametrize(("key", "value"), [("check", []), ("check", "Some"), ("label", 3), ("alpha", None)])
def test_a_session_refuses_values_of_its_file(key: str, value: Any, tmp_path: Path) -> None:
    """These ended in a TypeError or an AttributeError, or were taken for "None"."""
    rule = ADAM | {"adam_hparam": {"alpha": None}} if key == "alpha" else ADAM
    reader = data("no/file_list.txt", {"is_fixed_length": False, "nnz_per_slot": 1}) | {key: value}
    reader.pop("alpha", None)
    graph = [reader, embedding("DistributedSlotSparseEmbeddingHash", workspace_size_per_gpu_in_mb=1), *FC]
    (tmp_path / "x.json").write_text(json.dumps({"optimizer": rule, "layers": graph}))
    with pytest.raises(ConfigError, match=r"check|expected form|optimizer, lr"):
        Session(SessionSolver(seed=1, batchsize=5, batchsize_eval=5), str(tmp_path / "x.json"))


def test_the_clause_of_2_0_is_a_data_layer() -> None:
    content = {
        "data": {"source": "a", "eval_source": "b", "max_feature_num_per_sample": 20, "label_dim": 1, "slot_num": 2},
        "layers": [{**embedding("SparseEmbeddingHash", vocabulary_size=9, load_factor=0.5), "bottom": "data"}, *FC],
    }
    given, table, *_ = graph_layers(content, True, "f")
    assert given.sparse[0].nnz == [20, 20]
    assert table.embedding_type is Embedding_t.DistributedSlotSparseEmbeddingHash


def test_solver_and_schedule_of_dlrm() -> None:
    clause = {
        "batchsize": 64, "gpu": [[0, 1], [2, 3]], "mixed_precision": 1024, "max_eval_samples": 130,
        "eval_metrics": ["AUC:0.8025", "AverageLoss"], "num_epochs": 0, "max_iter": 10,
    }  # fmt: skip
    solver = solver_from_json({"solver": clause, "optimizer": SGD}, Solver)
    assert (solver.lr, solver.warmup_steps, solver.decay_start, solver.decay_power) == (24.0, 8000, 48000, 2.0)
    assert (solver.vvgpu, solver.use_mixed_precision) == ([[0, 1], [2, 3]], True)
    assert (solver.max_eval_batches, solver.repeat_dataset) == (3, True)  # 130 rows in batches of 64
    assert {one.name: limit for one, limit in solver.metrics_spec.items()} == {
        "AUC": 0.8025,
        "AverageLoss": float("inf"),
    }


@pytest.mark.parametrize(
    ("clause", "kind", "values"),
    [
        (ADAM, "Adam", {"beta2": 0.999, "update_type": Update_t.Global}),
        (SGD, "SGD", {"atomic_update": True, "update_type": Update_t.Local}),
        ({"type": "AdaGrad", "adagrad_hparam": {"initial_accu_value": 0.5, "epsilon": 1e-6}}, "AdaGrad",
         {"initial_accu_value": 0.5}),
        ({"type": "MomentumSGD", "momentum_sgd_hparam": {"learning_rate": 0.1, "momentum_factor": 0.9}}, "MomentumSGD",
         {"momentum_factor": 0.9}),
        ({"type": "Nesterov", "nesterov_hparam": {"momentum_factor": 0.8}, "update_type": "LazyGlobal"}, "Nesterov",
         {"momentum_factor": 0.8, "update_type": Update_t.LazyGlobal}),
        ({"type": "Ftrl", "ftrl_hparam": {"beta": 0.9, "lambda1": 0.1, "lambda2": 0.2}}, "Ftrl", {"lambda2": 0.2}),
    ],
)  # fmt: skip
def test_optimizers(clause: dict[str, Any], kind: str, values: dict[str, Any]) -> None:
    found = optimizer_from_json(clause)
    assert found.optimizer_type is Optimizer_t[kind]
    assert {name: getattr(found, name) for name in values} == values
    assert schedule_from_json(clause)["lr"] > 0


def test_readers_of_raw_data() -> None:
    clause = data("a.bin", {"type": "LocalizedSlot", "max_feature_num_per_sample": 3}, format="RawAsync",
                  num_samples=7, eval_num_samples=5, cache_eval_data=True, slot_size_array=[2, 3, 4],
                  async_param={"num_threads": 4, "num_batches_per_thread": 4, "io_block_size": 552960, "io_depth": 2,
                               "io_alignment": 512, "shuffle": False, "aligned_type": "None",
                               "multi_hot_reader": False})  # fmt: skip
    found = reader_from_json(clause)
    assert found.data_reader_type is DataReaderType_t.RawAsync
    assert (found.num_samples, found.async_param.max_num_requests_per_thread) == (7, 552960)
    assert not found.async_param.has_float_dense  # the reader of one-hot data knows whole numbers alone
    given, table = graph_layers({"layers": [clause, embedding("LocalizedSlotSparseEmbeddingOneHot")]}, True, "f")
    assert given.sparse[0].nnz == [1, 1, 1]
    assert table.slot_size_array == [2, 3, 4]


def test_keys_that_are_not_known_or_stand_twice_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = data(norm_file(tmp_path, KEYS), {"is_fixed_length": False, "nnz_per_slot": 1}, preload=True)
    table = embedding("DistributedSlotSparseEmbeddingHash", rows_on_disk=1)
    layers = [one, table, {**FC[0], "colour": "red"}, *FC[1:]]
    solver = {**SOLVER, "max_itr": 4, "iteration_strategy": "default"}
    text = json.dumps({"solver": solver, "optimizer": ADAM, "layers": layers})
    (tmp_path / "c.json").write_text(text.replace('"seed": ', '"seed": 4, "seed": '))
    train_from_json(tmp_path / "c.json")
    printed = capsys.readouterr().out
    for key in ("preload", "rows_on_disk", "colour", "iteration_strategy"):
        assert f"the key {key!r} is unknown and has no effect" in printed
    assert "'max_itr' is unknown and has no effect; did you mean 'max_iter'?" in printed
    assert "'seed' occurs twice in one object; the last one is used" in printed
    assert "Finish 4 iterations" in printed


def test_an_inference_graph_of_3_0_names_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"type": "Data", "dense": {"top": "dense", "dense_dim": 2},
           "sparse": [{"top": "keys", "slot_num": 3, "max_feature_num_per_sample": 3}]}  # fmt: skip
    for label in ({}, {"label": {"label_dim": 1}}):
        content = {"inference": {"max_batchsize": 8}, "layers": [{**one, **label}, embedding("SparseEmbeddingHash")]}
        (tmp_path / "i.json").write_text(json.dumps(content))
        train_from_json(tmp_path / "i.json")
        assert "has no source" in capsys.readouterr().out


def test_selected_slots_are_written_in_either_form() -> None:
    forms = ({"selected": True, "selected_slots": [0, 2]}, {"selected": [0, 2]})
    layers = [DenseLayer("Reshape", ["e"], ["r"], **form) for form in forms]
    assert [layer_to_json(one).get("selected") for one in layers] == [[0, 2], [0, 2]]
