"""DIN: attention of ten clicked items on the target item; Parquet, three groups, no dense numbers."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

USERS, GOODS, CATES, STEPS, DIM = 30, 40, 12, 10, 8
SIZES = [USERS] + [GOODS] * (STEPS + 1) + [CATES] * (STEPS + 1)
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=0,
        num_slot=len(SIZES),
        i64_input_key=True,
        source="./din_data/train/_file_list.txt",
        eval_source="./din_data/valid/_file_list.txt",
        slot_size_array=SIZES,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()
solver = hugectr.CreateSolver(
    max_eval_batches=2,
    batchsize_eval=32,
    batchsize=32,
    lr=0.01,
    vvgpu=[[0]],
    repeat_dataset=True,
    i64_input_key=True,
    use_cuda_graph=True,
    seed=11,
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=["./din_data/train/_file_list.txt"],
    eval_source="./din_data/valid/_file_list.txt",
    check_type=hugectr.Check_t.Non,
    num_workers=1,
    slot_size_array=SIZES,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam,
    update_type=hugectr.Update_t.Global,
    beta1=0.9,
    beta2=0.999,
    epsilon=0.000000001,
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=0,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("UserID", 1, True, 1),
            hugectr.DataReaderSparseParam("GoodID", 1, True, STEPS + 1),
            hugectr.DataReaderSparseParam("CateID", 1, True, STEPS + 1),
        ],
    )
)
for bottom, top in (("UserID", "user"), ("GoodID", "good"), ("CateID", "cate")):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=DIM,
            combiner="sum",
            sparse_embedding_name=f"sparse_embedding_{top}",
            bottom_name=bottom,
            optimizer=optimizer,
        )
    )


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.FusedReshapeConcat, ["sparse_embedding_good", "sparse_embedding_cate"], ["item_his_em", "item"])
dense(L.Scale, ["item"], ["Scale_item"], axis=1, factor=STEPS)
dense(L.Sub, ["Scale_item", "item_his_em"], ["sub_ih"])
dense(L.ElementwiseMultiply, ["Scale_item", "item_his_em"], ["mul_i"])
dense(L.Concat, ["Scale_item", "item_his_em", "sub_ih", "mul_i"], ["concat_i_h"])
dense(L.InnerProduct, ["concat_i_h"], ["fc_att_i2"], num_output=16)
dense(L.PReLU_Dice, ["fc_att_i2"], ["dice_1"], elu_alpha=0.2, eps=1e-8)
dense(L.InnerProduct, ["dice_1"], ["fc_att_i4"], num_output=1)
dense(L.Reshape, ["fc_att_i4"], ["reshape_score"], leading_dim=STEPS)
dense(L.Softmax, ["reshape_score"], ["softmax_att_i"])
dense(L.Scale, ["softmax_att_i"], ["Scale_i"], axis=0, factor=2 * DIM)
dense(L.Reshape, ["item_his_em"], ["reshape_his"], leading_dim=2 * DIM * STEPS)
dense(L.ElementwiseMultiply, ["Scale_i", "reshape_his"], ["ip_i"])
dense(L.Reshape, ["ip_i"], ["reshape_ip"], leading_dim=2 * DIM, time_step=STEPS)
dense(L.ReduceSum, ["reshape_ip"], ["item_his"], axis=1)
dense(L.Reshape, ["item_his"], ["reshape_item_his"], leading_dim=2 * DIM)
dense(L.Reshape, ["item_his_em"], ["reshape_mean"], leading_dim=2 * DIM, time_step=STEPS)
dense(L.ReduceMean, ["reshape_mean"], ["mean_his"], axis=1)
dense(L.Reshape, ["mean_his"], ["reshape_reduce"], leading_dim=2 * DIM)
dense(L.Reshape, ["sparse_embedding_user"], ["reshape_user"], leading_dim=DIM)
dense(L.Concat, ["reshape_user", "reshape_reduce", "reshape_item_his", "item"], ["concat_din_i"])
dense(L.InnerProduct, ["concat_din_i"], ["fc_din_i1"], num_output=32)
dense(L.PReLU_Dice, ["fc_din_i1"], ["dice_3"], elu_alpha=0.2, eps=1e-8)
dense(L.InnerProduct, ["dice_3"], ["fc3"], num_output=1)
dense(L.BinaryCrossEntropyLoss, ["fc3", "label"], ["loss"])
model.compile()
model.summary()
model.fit(max_iter=120, display=20, eval_interval=60, snapshot=1000000, snapshot_prefix="din")
