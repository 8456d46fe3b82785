"""DeepFM on generated Raw data."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [20, 30, 15]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Raw,
        label_dim=1,
        dense_dim=2,
        num_slot=3,
        i64_input_key=False,
        source="./deepfm_data/train.bin",
        eval_source="./deepfm_data/test.bin",
        slot_size_array=SIZES,
        num_samples=256,
        eval_num_samples=64,
    )
).generate()
solver = hugectr.CreateSolver(
    max_eval_batches=2, batchsize_eval=32, batchsize=64, lr=0.05, vvgpu=[[0]], repeat_dataset=True, seed=5
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Raw,
    source="./deepfm_data/train.bin",
    eval_source="./deepfm_data/test.bin",
    check_type=hugectr.Check_t.Non,
    num_samples=256,
    eval_num_samples=64,
    slot_size_array=SIZES,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.AdaGrad, initial_accu_value=0.1, epsilon=1e-6, update_type=hugectr.Update_t.Local
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=2,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data1", 1, True, 3)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
        slot_size_array=SIZES,
        embedding_vec_size=5,
        combiner="sum",
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
        optimizer=optimizer,
    )
)


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Reshape, ["sparse_embedding1"], ["reshape1"], leading_dim=5)
dense(L.Slice, ["reshape1"], ["slice11", "slice12"], ranges=[(0, 4), (4, 5)])
dense(L.Reshape, ["slice11"], ["reshape2"], leading_dim=12)
dense(L.Reshape, ["slice12"], ["reshape3"], leading_dim=3)
dense(L.WeightMultiply, ["dense"], ["weight_multiply1"], weight_dims=[2, 4])
dense(L.WeightMultiply, ["dense"], ["weight_multiply2"], weight_dims=[2, 1])
dense(L.Concat, ["reshape2", "weight_multiply1"], ["concat1"])
dense(L.InnerProduct, ["concat1"], ["fc1"], num_output=16)
dense(L.ReLU, ["fc1"], ["relu1"])
dense(L.InnerProduct, ["relu1"], ["fc2"], num_output=1)
dense(L.FmOrder2, ["concat1"], ["fmorder2"], out_dim=4)
dense(L.ReduceSum, ["fmorder2"], ["reducesum1"], axis=1)
dense(L.Concat, ["reshape3", "weight_multiply2"], ["concat2"])
dense(L.ReduceSum, ["concat2"], ["reducesum2"], axis=1)
dense(L.Add, ["fc2", "reducesum1", "reducesum2"], ["add"])
dense(L.BinaryCrossEntropyLoss, ["add", "label"], ["loss"])
model.compile()
model.summary()
model.fit(max_iter=160, display=20, eval_interval=80, snapshot=100000, snapshot_prefix="deepfm")
