"""A loop of the script's own, two labels, several keys a slot, saved and loaded again."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=2,
        dense_dim=0,
        num_slot=3,
        i64_input_key=True,
        source="./low_data/file_list.txt",
        eval_source="./low_data/file_list_test.txt",
        slot_size_array=[30, 40, 20],
        nnz_array=[3, 1, 2],
        check_type=hugectr.Check_t.Non,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()


def build(seed):
    solver = hugectr.CreateSolver(
        max_eval_batches=2, batchsize_eval=32, batchsize=32, lr=0.01, vvgpu=[[0]], i64_input_key=True, seed=seed
    )
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Norm,
        "./low_data/file_list.txt",
        eval_source="./low_data/file_list_test.txt",
        check_type=hugectr.Check_t.Non,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.LazyGlobal)
    model = hugectr.Model(solver, reader, optimizer)
    model.add(
        hugectr.Input(
            label_dims=[1, 1],
            label_names=["buy", "click"],
            dense_dim=0,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam("first", [3, 1], False, 2),
                hugectr.DataReaderSparseParam("second", 2, False, 1),
            ],
        )
    )
    for name, combiner in (("first", "mean"), ("second", "sum")):
        model.add(
            hugectr.SparseEmbedding(
                hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
                4,
                embedding_vec_size=6,
                combiner=combiner,
                sparse_embedding_name=f"{name}_embedding",
                bottom_name=name,
            )
        )

    def dense(kind, bottoms, tops, **more):
        model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))

    layers = hugectr.Layer_t
    dense(layers.Reshape, ["first_embedding"], ["flat1"], leading_dim=12)
    dense(layers.Reshape, ["second_embedding"], ["flat2"], leading_dim=6)
    dense(layers.Concat, ["flat1", "flat2"], ["features"])
    dense(layers.BatchNorm, ["features"], ["normed"], factor=0.1)
    for label in ("buy", "click"):
        dense(
            layers.MLP,
            ["normed"],
            [f"{label}_logit"],
            num_outputs=[16, 1],
            activations=[hugectr.Activation_t.Relu, hugectr.Activation_t.Non],
        )
        dense(layers.BinaryCrossEntropyLoss, [f"{label}_logit", label], [f"{label}_loss"])
    model.compile(loss_names=["buy", "click"], loss_weights=[0.5, 0.5])
    return solver, model


def evaluate(solver, model):
    for _ in range(solver.max_eval_batches):
        model.eval()
    return model.get_eval_metrics()


solver, model = build(9)
model.start_data_reading()
schedule = model.get_learning_rate_scheduler()
losses = []
for i in range(120):
    model.set_learning_rate(schedule.get_next())
    assert model.train(False)
    if i % 20 == 0:
        losses.append(model.get_current_loss())
        print(f"iteration {i}, loss {losses[-1]:.5f}")
assert losses[-1] < losses[0]
found = evaluate(solver, model)
model.save_params_to_files("low", 120)

solver, again = build(10)
again.load_dense_weights("low_dense_120.model")
again.load_sparse_weights({"first_embedding": "low0_sparse_120.model", "second_embedding": "low1_sparse_120.model"})
again.start_data_reading()
assert evaluate(solver, again) == found, "the loaded model predicts the same"
print("metrics", found)
