"""DLRM on generated RawAsync data: fused layers with several tops, Interaction, one-hot embedding, SGD."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [20, 30, 15, 8]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.RawAsync,
        label_dim=1,
        dense_dim=3,
        num_slot=4,
        i64_input_key=False,
        source="./dlrm_data/train.bin",
        eval_source="./dlrm_data/test.bin",
        slot_size_array=SIZES,
        num_samples=192,
        eval_num_samples=64,
        float_label_dense=True,
    )
).generate()
solver = hugectr.CreateSolver(
    max_eval_batches=2,
    batchsize_eval=32,
    batchsize=64,
    lr=1.0,
    warmup_steps=20,
    decay_start=150,
    decay_steps=50,
    decay_power=2.0,
    end_lr=0.0,
    vvgpu=[[0]],
    repeat_dataset=True,
    seed=5,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.RawAsync,
    source=["./dlrm_data/train.bin"],
    eval_source="./dlrm_data/test.bin",
    check_type=hugectr.Check_t.Non,
    num_samples=192,
    eval_num_samples=64,
    cache_eval_data=2,
    slot_size_array=SIZES,
    async_param=hugectr.AsyncParam(1, 4, 0, 4, 0, False, hugectr.Alignment_t.Non),
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.SGD, update_type=hugectr.Update_t.Local, atomic_update=True
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=3,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data1", 1, True, 4)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot,
        slot_size_array=SIZES,
        embedding_vec_size=8,
        combiner="sum",
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
        optimizer=optimizer,
    )
)


def fused(bottoms, tops, position, num_output):
    model.add(
        hugectr.DenseLayer(
            layer_type=hugectr.Layer_t.FusedInnerProduct,
            pos_type=position,
            bottom_names=bottoms,
            top_names=tops,
            num_output=num_output,
            act_type=hugectr.Activation_t.Relu,
        )
    )


def group(name):
    return [name, f"{name}_1", f"{name}_2", f"{name}_3"]


P = hugectr.FcPosition_t
fused(["dense"], group("fc11"), P.Head, 16)
fused(group("fc11"), ["fc12"], P.Tail, 8)
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.Interaction,
        bottom_names=["fc12", "sparse_embedding1"],
        top_names=["interaction1", "interaction1_grad"],
    )
)
fused(["interaction1", "interaction1_grad"], group("fc21"), P.Head, 32)
fused(group("fc21"), group("fc22"), P.Body, 16)
fused(group("fc22"), ["fc23"], P.Tail, 8)
model.add(
    hugectr.DenseLayer(layer_type=hugectr.Layer_t.InnerProduct, bottom_names=["fc23"], top_names=["fc24"], num_output=1)
)
model.add(
    hugectr.DenseLayer(
        layer_type=hugectr.Layer_t.BinaryCrossEntropyLoss, bottom_names=["fc24", "label"], top_names=["loss"]
    )
)
model.compile()
model.summary()
model.fit(max_iter=200, display=40, eval_interval=100, snapshot=100000, snapshot_prefix="dlrm")
