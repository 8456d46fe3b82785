"""A Deep and Cross Network on generated Norm data, fit by iterations."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams
from mpi4py import MPI

assert MPI.COMM_WORLD.Get_size() >= 1
SIZES = [40, 30, 20, 50, 10]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=4,
        num_slot=5,
        i64_input_key=False,
        source="./dcn_data/file_list.txt",
        eval_source="./dcn_data/file_list_test.txt",
        slot_size_array=SIZES,
        check_type=hugectr.Check_t.Sum,
        dist_type=hugectr.Distribution_t.PowerLaw,
        power_law_type=hugectr.PowerLaw_t.Short,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=128,
    )
).generate()

solver = hugectr.CreateSolver(
    max_eval_batches=4,
    batchsize_eval=32,
    batchsize=64,
    lr=0.01,
    vvgpu=[[0]],
    seed=7,
    repeat_dataset=True,
    use_cuda_graph=False,
    metrics_spec={hugectr.MetricsType.AUC: 1.0, hugectr.MetricsType.AverageLoss: 0.0},
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=["./dcn_data/file_list.txt"],
    eval_source="./dcn_data/file_list_test.txt",
    check_type=hugectr.Check_t.Sum,
    num_workers=1,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam,
    update_type=hugectr.Update_t.Global,
    beta1=0.9,
    beta2=0.999,
    epsilon=0.0000001,
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=4,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data1", 1, True, 5)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        workspace_size_per_gpu_in_mb=8,
        embedding_vec_size=8,
        combiner="sum",
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
        optimizer=optimizer,
    )
)


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Reshape, ["sparse_embedding1"], ["reshape1"], leading_dim=40)
dense(L.Concat, ["reshape1", "dense"], ["concat1"])
dense(L.Slice, ["concat1"], ["slice11", "slice12"], ranges=[(0, 44), (0, 44)])
dense(L.MultiCross, ["slice11"], ["multicross1"], num_layers=2)
dense(L.InnerProduct, ["slice12"], ["fc1"], num_output=32)
dense(L.ReLU, ["fc1"], ["relu1"])
dense(L.Dropout, ["relu1"], ["dropout1"], dropout_rate=0.1)
dense(L.InnerProduct, ["dropout1"], ["fc2"], num_output=32)
dense(L.ReLU, ["fc2"], ["relu2"])
dense(L.Concat, ["relu2", "multicross1"], ["concat2"])
dense(L.InnerProduct, ["concat2"], ["fc3"], num_output=1)
dense(L.BinaryCrossEntropyLoss, ["fc3", "label"], ["loss"])
model.graph_to_json("dcn.json")
model.compile()
model.summary()
model.fit(max_iter=160, display=20, eval_interval=80, snapshot=160, snapshot_prefix="dcn")
