"""HugeCTR 3.0's first Model: the reader inside Input, the schedule in the solver, the rate in the optimizer."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=2,
        num_slot=3,
        i64_input_key=False,
        source="./v3_data/file_list.txt",
        eval_source="./v3_data/file_list_test.txt",
        slot_size_array=[20, 30, 10],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()
solver = hugectr.solver_parser_helper(
    seed=3,
    max_iter=100,
    max_eval_batches=2,
    display=20,
    eval_interval=50,
    snapshot=1000,
    batchsize_eval=32,
    batchsize=32,
    vvgpu=[[0]],
    repeat_dataset=True,
)
optimizer = hugectr.optimizer.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam, use_mixed_precision=False, learning_rate=0.02, beta1=0.9, epsilon=1e-7
)
model = hugectr.Model(solver, optimizer)
model.add(
    hugectr.Input(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source="./v3_data/file_list.txt",
        eval_source="./v3_data/file_list_test.txt",
        check_type=hugectr.Check_t.Sum,
        label_dim=1,
        label_name="label",
        dense_dim=2,
        dense_name="dense",
        slot_size_array=[],
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 10, 1, 3)
        ],
        sparse_names=["data1"],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        max_vocabulary_size_per_gpu=1000,
        embedding_vec_size=8,
        combiner=0,
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
    )
)


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


dense(hugectr.Layer_t.Reshape, ["sparse_embedding1"], ["reshape1"], leading_dim=24)
dense(hugectr.Layer_t.Concat, ["reshape1", "dense"], ["concat1"])
dense(hugectr.Layer_t.InnerProduct, ["concat1"], ["fc1"], num_output=16)
dense(hugectr.Layer_t.ReLU, ["fc1"], ["relu1"])
dense(hugectr.Layer_t.InnerProduct, ["relu1"], ["fc2"], num_output=1)
dense(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"])
model.compile()
model.summary()
model.fit()
