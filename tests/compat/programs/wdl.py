"""Wide and Deep on generated Parquet data with slot sizes, in epoch mode, with frozen parts at the end."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams
from mpi4py import MPI

print("process", MPI.COMM_WORLD.Get_rank())
SIZES = [30, 25, 40, 12]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=3,
        num_slot=4,
        i64_input_key=True,
        source="./wdl_data/file_list.txt",
        eval_source="./wdl_data/file_list_test.txt",
        slot_size_array=SIZES,
        nnz_array=[2, 1, 1, 3],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=96,
    )
).generate()

solver = hugectr.CreateSolver(
    max_eval_batches=10,
    batchsize_eval=32,
    batchsize=32,
    lr=0.02,
    vvgpu=[[0, 1]],
    i64_input_key=True,
    repeat_dataset=False,
    seed=3,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source="./wdl_data/file_list.txt",
    eval_source="./wdl_data/file_list_test.txt",
    check_type=hugectr.Check_t.Non,
    slot_size_array=SIZES,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Global)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=3,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("wide_data", [2], False, 1),
            hugectr.DataReaderSparseParam("deep_data", [1, 1, 3], False, 3),
        ],
    )
)
for name, bottom, size in (("wide", "wide_data", 1), ("deep", "deep_data", 8)):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=4,
            embedding_vec_size=size,
            combiner="mean" if name == "deep" else "sum",
            sparse_embedding_name=f"embedding_{name}",
            bottom_name=bottom,
            optimizer=optimizer,
        )
    )


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Reshape, ["embedding_deep"], ["reshape1"], leading_dim=24)
dense(L.Reshape, ["embedding_wide"], ["reshape2"], leading_dim=1)
dense(L.Concat, ["reshape1", "dense"], ["concat1"])
dense(L.InnerProduct, ["concat1"], ["fc1"], num_output=32)
dense(L.ReLU, ["fc1"], ["relu1"])
dense(L.InnerProduct, ["relu1"], ["fc2"], num_output=1)
dense(L.Add, ["fc2", "reshape2"], ["add1"])
dense(
    L.BinaryCrossEntropyLoss,
    ["add1", "label"],
    ["loss"],
    use_regularizer=True,
    regularizer_type=hugectr.Regularizer_t.L2,
    **{"lambda": 0.0001},
)
model.compile()
model.summary()
model.fit(num_epochs=20, display=20, eval_interval=60, snapshot=100000, snapshot_prefix="wdl")
model.freeze_embedding("embedding_wide")
model.freeze_dense()
model.reset_learning_rate_scheduler(base_lr=0.001)
model.fit(num_epochs=1, display=3, eval_interval=6, snapshot=100000)
