"""Criteo's first model with many keys in one slot, trained by Ftrl; several slots beside; fine-tuned from files."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [200, 30, 40]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=0,
        num_slot=3,
        i64_input_key=False,
        source="./criteo/file_list.txt",
        eval_source="./criteo/file_list_test.txt",
        slot_size_array=SIZES,
        nnz_array=[12, 1, 2],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()


def start(from_json):
    solver = hugectr.CreateSolver(
        max_eval_batches=2,
        batchsize_eval=32,
        batchsize=32,
        lr=0.5,
        vvgpu=[[0]],
        repeat_dataset=True,
        seed=5,
        use_mixed_precision=False,
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=["./criteo/file_list.txt"],
        eval_source="./criteo/file_list_test.txt",
        check_type=hugectr.Check_t.Sum,
    )
    optimizer = hugectr.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Ftrl, update_type=hugectr.Update_t.Global, beta=0.1, lambda1=0.0, lambda2=0.0
    )
    model = hugectr.Model(solver, reader, optimizer)
    if from_json:
        model.construct_from_json(graph_config_file="criteo.json", include_dense_network=True)
        return model
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name="label",
            dense_dim=0,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam("data1", 12, False, 1),
                hugectr.DataReaderSparseParam("data2", 2, False, 2),
            ],
        )
    )
    for number in (1, 2):
        model.add(
            hugectr.SparseEmbedding(
                embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
                workspace_size_per_gpu_in_mb=1,
                embedding_vec_size=8,
                combiner="sum",
                sparse_embedding_name=f"sparse_embedding{number}",
                bottom_name=f"data{number}",
                optimizer=optimizer,
            )
        )

    def dense(kind, bottoms, tops, **more):
        model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))

    dense(hugectr.Layer_t.Reshape, ["sparse_embedding1"], ["reshape1"], leading_dim=8)
    dense(hugectr.Layer_t.Reshape, ["sparse_embedding2"], ["reshape2"], leading_dim=16)
    dense(hugectr.Layer_t.Concat, ["reshape1", "reshape2"], ["concat1"])
    dense(hugectr.Layer_t.InnerProduct, ["concat1"], ["fc1"], num_output=20)
    dense(hugectr.Layer_t.ReLU, ["fc1"], ["relu1"])
    dense(hugectr.Layer_t.InnerProduct, ["relu1"], ["fc2"], num_output=1)
    loss = {"lambda": 0.0001, "use_regularizer": True, "regularizer_type": hugectr.Regularizer_t.L2}
    dense(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"], **loss)
    return model


model = start(from_json=False)
model.graph_to_json(graph_config_file="criteo.json")
model.compile()
model.summary()
model.train()
first = model.get_current_loss()
model.start_data_reading()
model.fit(max_iter=120, display=20, eval_interval=60, snapshot=60, snapshot_prefix="criteo")

tuned = start(from_json=True)
tuned.compile()
tuned.load_dense_weights("criteo_dense_120.model")
tuned.load_sparse_weights(["criteo0_sparse_120.model", "criteo1_sparse_120.model"])
tuned.load_dense_optimizer_states("criteo_opt_dense_120.model")
tuned.load_sparse_optimizer_states(["criteo0_opt_sparse_120.model", "criteo1_opt_sparse_120.model"])
tuned.freeze_embedding("sparse_embedding1")
tuned.freeze_dense()
tuned.unfreeze_embedding("sparse_embedding1")
tuned.unfreeze_dense()
tuned.reset_learning_rate_scheduler(base_lr=0.5)
tuned.fit(max_iter=20, display=20, eval_interval=1000, snapshot=1000000)
assert tuned.get_current_loss() < 0.9 * first, "weights and state continue where they ended"
