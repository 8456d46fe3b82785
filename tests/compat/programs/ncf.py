"""NCF: NeuMF on Norm data without check sums, in epochs; HitRate, NDCG and SMAPE beside the AUC."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=1,
        num_slot=2,
        i64_input_key=True,
        source="./ncf/train_filelist.txt",
        eval_source="./ncf/test_filelist.txt",
        slot_size_array=[30, 50],
        check_type=hugectr.Check_t.Non,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()
M = hugectr.MetricsType
solver = hugectr.CreateSolver(
    max_eval_batches=2,
    batchsize_eval=32,
    batchsize=32,
    lr=0.02,
    vvgpu=[[0]],
    i64_input_key=True,
    repeat_dataset=False,
    metrics_spec={M.HitRate: 0.8, M.NDCG: 0.8, M.AUC: 1.0, M.SMAPE: 0.0},
    seed=2,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Global, beta1=0.25, beta2=0.5, epsilon=1e-7
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=["./ncf/train_filelist.txt"],
    eval_source="./ncf/test_filelist.txt",
    check_type=hugectr.Check_t.Non,
    num_workers=2,
)
model = hugectr.ModelPerfExt(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=1,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data", 1, True, 2)],
    )
)
for name, width in (("mlp_embedding", 8), ("gmf_embedding", 4)):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=width,
            combiner="sum",
            sparse_embedding_name=name,
            bottom_name="data",
            optimizer=optimizer,
        )
    )


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Reshape, ["mlp_embedding"], ["mlp_flat"], leading_dim=16)
dense(L.Reshape, ["gmf_embedding"], ["gmf_flat"], leading_dim=8)
dense(L.Slice, ["gmf_flat"], ["gmf_user", "gmf_item"], ranges=[(0, 4), (4, 8)])
dense(L.ElementwiseMultiply, ["gmf_user", "gmf_item"], ["gmf"])
dense(L.InnerProduct, ["mlp_flat"], ["fc1"], num_output=16)
dense(L.ReLU, ["fc1"], ["relu1"])
dense(L.InnerProduct, ["relu1"], ["fc2"], num_output=8)
dense(L.Concat, ["fc2", "gmf"], ["neumf"])
dense(L.InnerProduct, ["neumf"], ["fc3"], num_output=1)
dense(L.BinaryCrossEntropyLoss, ["fc3", "label"], ["loss"])
model.compile()
model.summary()
model.fit(num_epochs=25, display=20, eval_interval=50, snapshot=1000000)
