"""Tables whose keys come as they are met: saved, loaded into another model, and evaluated alike."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=2,
        num_slot=3,
        i64_input_key=True,
        source="./reload_data/file_list.txt",
        eval_source="./reload_data/file_list_test.txt",
        slot_size_array=[30, 40, 20],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()


def build(seed):
    metrics = {hugectr.MetricsType.AverageLoss: 0.0, hugectr.MetricsType.AUC: 1.0}
    solver = hugectr.CreateSolver(
        max_eval_batches=2,
        batchsize_eval=32,
        batchsize=32,
        lr=0.05,
        i64_input_key=True,
        seed=seed,
        metrics_spec=metrics,
    )
    reader = hugectr.DataReaderParams(
        hugectr.DataReaderType_t.Norm,
        "./reload_data/file_list.txt",
        eval_source="./reload_data/file_list_test.txt",
        check_type=hugectr.Check_t.Sum,
    )
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    sparse = [hugectr.DataReaderSparseParam("a", 1, False, 2), hugectr.DataReaderSparseParam("b", 1, False, 1)]
    model.add(hugectr.Input(1, "label", 2, "dense", sparse))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    layers = hugectr.Layer_t
    for name, width in (("a", 16), ("b", 8)):
        model.add(hugectr.SparseEmbedding(kind, 1, 8, "sum", f"embedding_{name}", name))
        model.add(hugectr.DenseLayer(layers.Reshape, [f"embedding_{name}"], [f"flat_{name}"], leading_dim=width))
    model.add(hugectr.DenseLayer(layers.Concat, ["flat_a", "flat_b", "dense"], ["all"]))
    model.add(hugectr.DenseLayer(layers.InnerProduct, ["all"], ["logit"], num_output=1))
    model.add(hugectr.DenseLayer(layers.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    model.compile()
    return model


def evaluate(model):
    model.start_data_reading()
    for _ in range(2):
        model.eval()
    return model.get_eval_metrics()


first, second = build(3), build(9)
first.fit(max_iter=20, display=10, eval_interval=0, snapshot=20, snapshot_prefix="reload")
second.load_dense_weights("reload_dense_20.model")
second.load_sparse_weights(["reload0_sparse_20.model", "reload1_sparse_20.model"])
second.load_dense_optimizer_states("reload_opt_dense_20.model")
second.load_sparse_optimizer_states(["reload0_opt_sparse_20.model", "reload1_opt_sparse_20.model"])
expected = evaluate(first)
found = evaluate(second)
assert found == expected, (found, expected)
print("loaded", found)
