"""Calls in the forms of several versions: other names, other positions, tuples and arrays, lists where one will do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from viviane.compat.hugectr.columns import Slot
from viviane.compat.hugectr.sharding import plan_of
from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError

MADE = modules()
h: Any = MADE["hugectr"]
inference: Any = MADE["hugectr.inference"]
FORMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "AsyncParam before 4.1": (
        lambda: h.AsyncParam(
            num_threads=1, num_batches_per_thread=16, io_block_size=557056, io_depth=4, io_alignment=512,
            shuffle=False, aligned_type=h.Alignment_t.Non,
        ).has_float_dense,
        None,  # the file says it
    ),
    "AsyncParam of 4.3": (lambda: h.AsyncParam(shuffle=False, multi_hot_reader=True).has_float_dense, True),
    "AsyncParam of one-hot data": (
        lambda: h.AsyncParam(32, 4, 10, 2, 512, True, h.Alignment_t.Non, False, False).has_float_dense, False,
    ),
    "HybridEmbeddingParam of 8": (
        lambda: h.HybridEmbeddingParam(
            2, -1, 0.01, 1.3e11, 1.9e11, 1.0, h.CommunicationType.IB_NVLink_Hier, h.HybridEmbeddingType.Distributed
        ).communication_type.name,
        "IB_NVLink_Hier",
    ),
    "HybridEmbeddingParam of 10": (
        lambda: h.HybridEmbeddingParam(
            2, -1, 0.01, 1.3e11, 1.9e11, 1.0, True, True, h.CommunicationType.IB_NVLink,
            h.HybridEmbeddingType.Distributed,
        ).communication_type.name,
        "IB_NVLink",
    ),
    "sparse_name": (
        lambda: h.DataReaderSparseParam(sparse_name="a", nnz_per_slot=2, is_fixed_length=True, slot_num=1).top_name,
        "a",
    ),
    "nnz as an array": (lambda: h.DataReaderSparseParam("a", np.array([1, 2]), False, 2).nnz, [1, 2]),
    "nnz as a tuple": (lambda: h.DataReaderSparseParam("a", (1, 2), False, 2).nnz, [1, 2]),
    "labels by position": (lambda: h.Input([1, 2], ["b", "a"], 0, "dense", []).labels, {"a": 2, "b": 1}),
    "sizes as an array": (
        lambda: h.SparseEmbedding(
            h.Embedding_t.LocalizedSlotSparseEmbeddingOneHot, slot_size_array=np.array([3, 4]), embedding_vec_size=2,
            combiner="sum", sparse_embedding_name="e", bottom_name="a",
        ).slot_size_array,
        [3, 4],
    ),
    "one bottom, one top": (lambda: h.DenseLayer(h.Layer_t.ReLU, "a", "b").to_node(set()).bottom, ("a",)),
    "a mask of one length": (
        lambda: h.DenseLayer(h.Layer_t.SequenceMask, ["a"], ["m"], max_sequence_len=10).to_node(set()).params,
        {"max_sequence_len": 10},
    ),
    "a mask of two lengths": (
        lambda: h.DenseLayer(
            h.Layer_t.SequenceMask, ["a", "b"], ["m"], max_sequence_len_from=3, max_sequence_len_to=5
        ).to_node(set()).params,
        {"max_sequence_len_from": 3, "max_sequence_len_to": 5},
    ),
    "attention in steps": (
        lambda: h.DenseLayer(
            h.Layer_t.MultiHeadAttention, ["q", "k", "v"], ["s", "v4"], num_attention_heads=4, transpose_b=True
        ).to_node(set()).top,
        ("s", "v4"),
    ),
    "a group's bottom_name": (
        lambda: h.GroupDenseLayer(
            group_layer_type=h.GroupLayer_t.GroupFusedInnerProduct, bottom_name=["a"], top_name_list=["b", "c"],
            num_outputs=[3, 4],
        ).to_layer().bottom_names,
        ["a"],
    ),
    "CreateMOS of 3.1": (lambda: h.CreateMOS(True, False, [], ["a"]).folders, ["a"]),
    "CreateMOS of 3.2.1": (lambda: h.CreateMOS([h.TrainPSType_t.Staged], ["a"]).folders, ["a"]),
    "HMemCacheConfig": (lambda: h.HMemCacheConfig(2, 0.5, 0).num_blocks, 2),
    "a table of 3.7": (lambda: h.EmbeddingTableConfig(4, 100, 16, 0, 99).name, "4"),
    "tables of 3.1 in memory": (
        lambda: inference.InferenceParams("m", 10, 0.5, "d", ["s"], db_type=h.Database_t.Local).model_name, "m",
    ),
    "a metric by its name": (lambda: list(h.CreateSolver(metrics_spec={"AUC": 0.8}).metrics_spec), [h.MetricsType.AUC]),
    "kafka_brokers": (lambda: h.CreateSolver(kafka_brokers="a").kafka_brockers, "a"),
    "a number of NumPy's": (lambda: type(h.CreateSolver(batchsize=np.int64(4)).batchsize), int),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_taken_in_the_form_of_each_version(form: str) -> None:
    call, expected = FORMS[form]
    assert call() == expected


def reader() -> Any:
    return h.DataReaderParams(h.DataReaderType_t.Norm, "a", eval_source="b")


def test_model_takes_the_training_cache_by_each_of_its_names() -> None:
    cache, oversubscriber = h.CreateETC([h.TrainPSType_t.Staged], ["a"]), h.CreateMOS(True)
    for more, expected in (({"etc": cache}, cache), ({"mos": oversubscriber}, oversubscriber)):
        model = h.Model(solver=h.CreateSolver(), reader_params=reader(), opt_params=h.CreateOptimizer(), **more)
        assert model._etc_params is expected


def test_set_source_takes_its_arguments_by_place_and_by_each_name() -> None:
    for given, named in (
        ((["x", "y"], ["k", "l"], "e"), {}),
        ((), {"source": ["x", "y"], "keyset": ["k", "l"], "eval_source": "e"}),
        ((), {"source_list": ["x", "y"], "keyset_list": ["k", "l"], "eval_source": "e"}),
    ):
        model = h.Model(h.CreateSolver(repeat_dataset=False), reader(), h.CreateOptimizer())
        model.set_source(*given, **named)
        assert (model._sources, model._keysets, model.reader_params.eval_source) == (["x", "y"], ["k", "l"], "e")
    model.set_source("x", "f")
    assert (model._sources, model._keysets, model.reader_params.eval_source) == (["x"], [], "f")
    with pytest.raises(ConfigError, match="sauce"):
        model.set_source("x", sauce="e")
    with pytest.raises(ConfigError, match="source and eval_source"):
        model.set_source(eval_source="e")
    for wrong in ((["x"], 3, "e"), (None, "e"), ([3], "e"), ("x", 5)):
        with pytest.raises(ConfigError, match="names of files are texts"):
            model.set_source(*wrong)


def lookup(collection: Any) -> Any:
    table = h.EmbeddingTableConfig("a", 10, 4)
    collection.embedding_lookup(table, "data", "top", "mean")
    return table


def test_a_plan_may_come_before_its_lookups_and_name_tables_themselves() -> None:
    early, late = h.EmbeddingCollectionConfig(), h.EmbeddingCollectionConfig()
    early.shard(shard_matrix=[["a"], ["a"]], shard_strategy=[("mp", [("a", 2)])])
    lookup(early)
    early.check_plan()
    table = lookup(late)
    late.shard([[table]], [["mp", [[table, 2]]]], {h.CompressionStrategy.Unique: [table]})
    assert late.compression_strategy == {h.CompressionStrategy.Unique: ["a"]}
    wrong = h.EmbeddingCollectionConfig()
    wrong.shard([["b"]], [("mp", ["b"])])
    lookup(wrong)
    with pytest.raises(ConfigError, match="'b'"):
        wrong.check_plan()


def sharded(matrix: list[list[str]], strategy: list[Any]) -> tuple[Any, list[Slot]]:
    collection = h.EmbeddingCollectionConfig()
    sizes = {"rows": 10, "cut": 10, "copied": 10, "alone": 10, "tiny": 2, "dynamic": -1}
    slots = []
    for name, size in sizes.items():
        collection.embedding_lookup(h.EmbeddingTableConfig(name, size, 4), f"{name}_keys", f"{name}_top", "sum")
        slots.append(Slot(name, name, 1, one_hot=True, size=None if size < 0 else size, table=name))
    collection.shard(matrix, strategy)
    return collection, slots


def test_a_plan_places_tables_on_as_many_processes_as_it_has_gpus() -> None:
    everywhere = ["rows", "cut", "copied", "tiny", "dynamic"]
    collection, slots = sharded(
        [everywhere, [*everywhere, "alone"], everywhere], [("mp", ["rows", ("cut", 2), "alone"]), ("dp", ["copied"])]
    )
    plan = plan_of([collection], slots, 3, has_others=False)
    assert plan is not None
    assert {one["table"]: (one["kind"], tuple(one.get("ranks", ()))) for one in plan["tables"]} == {
        "rows": ("row", (0, 1, 2)), "cut": ("column", (0, 1, 2)), "copied": ("replicated", ()),
        "alone": ("table", (1,)), "tiny": ("table", (0,)), "dynamic": ("table", (0,)),
    }  # fmt: skip
    assert plan_of([collection], slots, 2, has_others=False) is None  # two processes are not its three GPUs
    assert plan_of([collection], slots, 3, has_others=True) is None
    partial, slots = sharded([["rows"], ["rows"]], [("mp", ["rows"])])
    assert plan_of([partial], slots, 2, has_others=False) is None  # it says nothing of the other tables


def test_local_paths_of_more_nodes_than_there_are_processes_are_taken() -> None:
    """A script for two nodes runs in one process, as its vvgpu does."""
    assert h.CreateMOS([h.TrainPSType_t.Cached], ["a"], ["node0", "node1"]).folder == "node0"
    assert h.CreateETC([h.TrainPSType_t.Cached], ["a"], ["one"]).folder == "one"
