"""DLRM over an embedding collection: Parquet data, shared and multi-hot tables, a sharding plan, dump and load."""

import sys

import hugectr
import numpy as np
from hugectr.tools import DataGenerator, DataGeneratorParams
from mpi4py import MPI

SIZES = [40, 30, 50, 20]
HOTNESS = [1, 3, 1, 2]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=3,
        num_slot=4,
        i64_input_key=True,
        source="./ebc_data/file_list.txt",
        eval_source="./ebc_data/file_list_test.txt",
        slot_size_array=SIZES,
        nnz_array=HOTNESS,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=96,
    )
).generate()


def plan(tables, num_gpus):
    """Spread the large tables by rows, copy the small ones."""
    large = [name for name, size in tables if size > 30]
    small = [name for name, size in tables if size <= 30]
    return [large + small for _ in range(num_gpus)], [("mp", large), ("dp", small)]


def build(seed):
    solver = hugectr.CreateSolver(
        max_eval_batches=2,
        batchsize_eval=48,
        batchsize=64,
        lr=0.1,
        vvgpu=[[0, 1]],
        i64_input_key=True,
        use_embedding_collection=True,
        metrics_spec={hugectr.MetricsType.AUC: 1.0, hugectr.MetricsType.AverageLoss: 0.0},
        seed=seed,
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=["./ebc_data/file_list.txt"],
        eval_source="./ebc_data/file_list_test.txt",
        check_type=hugectr.Check_t.Non,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD)
    model = hugectr.Model(solver, reader, optimizer)
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name="label",
            dense_dim=3,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam(f"data{i}", nnz, nnz == 1, 1) for i, nnz in enumerate(HOTNESS)
            ],
        )
    )
    adam = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam)
    tables = [
        hugectr.EmbeddingTableConfig(
            name=f"table{i}",
            max_vocabulary_size=-1 if i == 2 else size,
            ev_size=8,
            opt_params_or_empty=adam if i == 2 else None,
        )
        for i, size in enumerate(SIZES)
    ]
    wide = hugectr.EmbeddingTableConfig(name="wide", max_vocabulary_size=SIZES[0], ev_size=1)
    collection = hugectr.EmbeddingCollectionConfig(
        use_exclusive_keys=True, comm_strategy=hugectr.CommunicationStrategy.Uniform
    )
    collection.embedding_lookup(
        table_config=tables,
        bottom_name=[f"data{i}" for i in range(4)],
        top_name="emb",
        combiner=["sum", "average", "sum", "concat"],
    )
    collection.embedding_lookup(table_config=wide, bottom_name="data0", top_name="wide_emb", combiner="sum")
    named = [*((table.name, size) for table, size in zip(tables, SIZES, strict=True)), ("wide", SIZES[0])]
    matrix, strategy = plan(named, 2)
    collection.shard(
        shard_matrix=matrix,
        shard_strategy=strategy,
        compression_strategy={hugectr.CompressionStrategy.Unique: ["table0"]},
    )
    model.add(collection)

    def dense(kind, bottoms, tops, **more):
        model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))

    layers, acts = hugectr.Layer_t, hugectr.Activation_t
    dense(layers.MLP, ["dense"], ["bottom"], num_outputs=[16, 8], act_type=acts.Relu)
    dense(layers.Reshape, ["emb"], ["vectors"], shape=[-1, 5, 8])
    dense(layers.Interaction, ["bottom", "vectors"], ["crossed"])
    dense(layers.Reshape, ["wide_emb"], ["wide_flat"], leading_dim=1)
    dense(layers.Concat, ["crossed", "wide_flat"], ["features"])
    dense(layers.MLP, ["features"], ["logit"], num_outputs=[32, 1], activations=[acts.Relu, acts.Non])
    dense(layers.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"])
    return model


comm = MPI.COMM_WORLD
print("rank", comm.Get_rank(), "of", comm.Get_size(), file=sys.stderr)
model = build(3)
model.graph_to_json("ebc.json")
model.compile()
model.summary()
model.fit(max_iter=120, display=20, eval_interval=60, snapshot=1000000)
model.embedding_dump("./ebc_dump")
model.save_params_to_files("ebc", 120)
model.get_data_reader_eval().set_source()
model.eval()
expected = model.check_out_tensor("logit", hugectr.Tensor_t.Evaluate)
assert expected.shape == (48, 1)
assert expected.min() > 0
assert expected.max() < 1

again = build(4)
again.compile()
again.load_dense_weights("ebc_dense_120.model")
again.embedding_load("./ebc_dump", [])
again.eval()
np.testing.assert_array_equal(again.check_out_tensor("logit", hugectr.Tensor_t.Evaluate), expected)
