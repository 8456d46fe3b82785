"""Arguments of another type are refused by name, in calls and in methods; what HugeCTR's binding takes is taken."""

from typing import Any

import pytest

from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError

h: Any = modules()["hugectr"]


@pytest.mark.parametrize(
    ("call", "given", "named"),
    [
        ("CreateSolver", {"batchsize": "64"}, "batchsize"),
        ("CreateSolver", {"batchsize": 64.5}, "batchsize"),
        ("CreateSolver", {"lr": float("nan")}, "lr"),
        ("CreateSolver", {"vvgpu": [0]}, "vvgpu"),
        ("CreateSolver", {"repeat_dataset": "no"}, "repeat_dataset"),
        ("CreateSolver", {"metrics_spec": []}, "metrics_spec"),
        ("CreateSolver", {"metrics_spec": {"AUC": "0.8"}}, "metrics_spec"),
        ("CreateSolver", {"metrics_spec": {"AUC": float("nan")}}, "metrics_spec"),
        (
            "Input",
            {
                "label_dims": 2**63,
                "label_names": ["a", "b"],
                "dense_dim": 0,
                "dense_name": "dense",
                "data_reader_sparse_param_array": [],
            },
            "label_dims and label_names",
        ),
        ("CreateOptimizer", {"update_type": h.Optimizer_t.Adam}, "update_type"),
        ("CreateOptimizer", {"update_type": "local"}, "update_type"),
        (
            "DataReaderSparseParam",
            {"top_name": ["a"], "nnz_per_slot": 1, "is_fixed_length": True, "slot_num": 1},
            "top",
        ),
        (
            "DataReaderSparseParam",
            {"top_name": "a", "nnz_per_slot": "1", "is_fixed_length": True, "slot_num": 1},
            "nnz",
        ),
        ("DataReaderSparseParam", {"top_name": "a", "nnz_per_slot": 1, "is_fixed_length": [], "slot_num": 1}, "fixed"),
        ("DenseLayer", {"layer_type": 3.7, "bottom_names": ["a"], "top_names": ["b"]}, "layer_type"),
        ("DenseLayer", {"layer_type": h.Layer_t.ReLU, "bottom_names": h.Layer_t.ReLU, "top_names": ["b"]}, "bottom"),
        *(
            ("DenseLayer", {"layer_type": h.Layer_t.MLP, "bottom_names": ["a"], "top_names": ["b"], **given}, named)
            for given, named in (
                ({"activations": ["Rely"]}, "activations"),  # was no activation at all
                ({"activations": [[]]}, "activations"),
                ({"biases": ["no"]}, "biases"),
            )
        ),
        ("Model", {"solver": 3}, "solver"),
        (
            "SparseEmbedding",
            {
                "embedding_type": "DistributedSlotSparseEmbeddingHash",
                "workspace_size_per_gpu_in_mb": 1,
                "embedding_vec_size": 8,
                "combiner": [],
                "sparse_embedding_name": "e",
                "bottom_name": "d",
            },
            "combiner",
        ),
    ],
)
def test_wrong_types_are_refused_by_name(call: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        getattr(h, call)(**given)


def test_types_that_say_the_same_are_taken() -> None:
    solver = h.CreateSolver(batchsize=64.0, repeat_dataset=0, vvgpu=((0,),))
    assert (solver.batchsize, solver.repeat_dataset) == (64, False)
    assert h.CreateOptimizer(update_type="Local").update_type is h.Update_t.Local


def test_methods_check_their_arguments() -> None:
    model = h.Model(h.CreateSolver(), None, h.CreateOptimizer())
    for call, named in (
        (lambda: model.fit(eval_interval="x"), "eval_interval"),
        (lambda: model.fit(1, 2, 3, 4, 5, "a", None, 7), "arguments do not fit"),
        (lambda: model.graph_to_json(True), "graph_config_file"),
        (model.load_dense_weights, "arguments do not fit"),
        (lambda: model.set_learning_rate(None), "lr"),
        (lambda: model.check_out_tensor("a", 3), "tensor_type"),
        (lambda: h.Model(h.CreateSolver(), None, 0), "opt_params"),
        (lambda: h.LearningRateScheduler("x"), "base_lr"),
    ):
        with pytest.raises(ConfigError, match=named):
            call()


def test_collections_and_generators_check_their_arguments() -> None:
    table = h.EmbeddingTableConfig(name="a", max_vocabulary_size=10, ev_size=4)
    tools: Any = modules()["hugectr.tools"]
    config = h.EmbeddingCollectionConfig()
    planner = h.EmbeddingPlanner()
    for call, named in (
        (lambda: tools.DataGenerator(config), "params"),
        (tools.DataGenerator, "arguments do not fit"),
        (lambda: tools.DataGeneratorParams("x", 1, 1, 1, True, "a", "b", [3]), "format"),
        (lambda: config.embedding_lookup("a", "k", "o", "sum"), "table_config"),
        (lambda: config.embedding_lookup(table, "k", "o", ["sum", "max"]), "one combiner"),
        (lambda: config.embedding_lookup(table, "k", "o", "max"), "unknown combiner"),
        (lambda: config.embedding_lookup(table, "k", "o", [[]]), "combiner"),
        (lambda: config.embedding_lookup(table, 3, "o", "sum"), "bottom_name"),
        (lambda: config.shard("a", [("mp", ["a"])]), "shard_matrix"),
        (lambda: config.shard([3], [("mp", ["a"])]), "shard_matrix"),
        (lambda: config.shard([[None]], [("mp", ["a"])]), "a table"),
        (lambda: config.shard([["a"]], ["mp"]), "must be a pair"),
        (lambda: config.shard([["a"]], [("mp", [("a", 0)])]), "or a pair"),
        (lambda: config.shard([["a"]], [("mp", ["a"])], ["a"]), "compression_strategy"),
        (lambda: config.shard([["a"]]), "arguments do not fit"),
        (lambda: planner.create_embedding_collection(3), "one entry per GPU"),
        (lambda: planner.create_embedding_collection([["a"]], [], [["mp"]]), "wrong type"),
    ):
        with pytest.raises(ConfigError, match=named):
            call()
    assert planner.create_embedding_collection([[0]], [["a"]], ["mp"]).calls == []
