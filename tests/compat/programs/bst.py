"""BST: a transformer block over the clicked items and the target; masks from lengths, LayerNorm, attention."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

STEPS, DIM = 5, 8
SIZES = [20] + [40] * STEPS + [40]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=1,
        num_slot=len(SIZES),
        i64_input_key=False,
        source="./bst_data/train/_file_list.txt",
        eval_source="./bst_data/valid/_file_list.txt",
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
    seed=6,
    metrics_spec={hugectr.MetricsType.AUC: 1.0},
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source="./bst_data/train/_file_list.txt",
    eval_source="./bst_data/valid/_file_list.txt",
    check_type=hugectr.Check_t.Non,
    slot_size_array=SIZES,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.LazyGlobal)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=1,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("user", 1, False, 1),
            hugectr.DataReaderSparseParam("history", 1, False, STEPS),
            hugectr.DataReaderSparseParam("target", 1, False, 1),
        ],
    )
)
for name in ("user", "history", "target"):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=DIM,
            combiner="mean",
            sparse_embedding_name=f"{name}_emb",
            bottom_name=name,
            optimizer=optimizer,
        )
    )


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Concat, ["history_emb", "target_emb"], ["sequence"], axis=1)
dense(L.SequenceMask, ["dense", "dense"], ["mask"], max_sequence_len_from=STEPS + 1, max_sequence_len_to=STEPS + 1)
for name in ("query", "key", "value"):
    dense(L.InnerProduct, ["sequence"], [name], num_output=DIM)
dense(L.MultiHeadAttention, ["query", "key", "value", "mask"], ["attention"], num_attention_heads=2)
dense(L.InnerProduct, ["attention"], ["projected"], num_output=DIM)
dense(L.Dropout, ["projected"], ["dropped"], dropout_rate=0.1)
dense(L.Add, ["dropped", "sequence"], ["residual"])
dense(L.LayerNorm, ["residual"], ["normed"], eps=1e-5)
dense(L.InnerProduct, ["normed"], ["forward1"], num_output=2 * DIM)
dense(L.ReLU, ["forward1"], ["active"])
dense(L.InnerProduct, ["active"], ["forward2"], num_output=DIM)
dense(L.Add, ["forward2", "normed"], ["residual2"])
dense(L.LayerNorm, ["residual2"], ["block"])
dense(L.Reshape, ["block"], ["block_flat"], leading_dim=(STEPS + 1) * DIM)
dense(L.Reshape, ["user_emb"], ["user_flat"], leading_dim=DIM)
dense(L.Concat, ["block_flat", "user_flat", "dense"], ["features"])
dense(L.InnerProduct, ["features"], ["fc1"], num_output=32)
dense(L.ReLU, ["fc1"], ["relu1"])
dense(L.InnerProduct, ["relu1"], ["fc2"], num_output=1)
dense(L.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"])
model.compile()
model.fit(max_iter=120, display=20, eval_interval=60, snapshot=1000000, snapshot_prefix="bst")
