"""Wide and deep in passes with an embedding training cache: keysets, incremental models, continued training."""

import hugectr
import numpy as np
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [30, 40, 20]
SOURCES = [f"./etc_data/{i}/file_list.txt" for i in range(3)]
KEYSETS = [f"./etc_data/{i}/keyset" for i in range(3)]
for source, keyset in zip(SOURCES, KEYSETS, strict=True):
    DataGenerator(
        DataGeneratorParams(
            format=hugectr.DataReaderType_t.Norm,
            label_dim=1,
            dense_dim=2,
            num_slot=3,
            i64_input_key=True,
            source=source,
            eval_source=source.replace("file_list", "file_list_test"),
            slot_size_array=SIZES,
            check_type=hugectr.Check_t.Sum,
            num_files=1,
            eval_num_files=1,
            num_samples_per_file=64,
        )
    ).generate()
    np.arange(sum(SIZES), dtype=np.int64).tofile(keyset)


def build(folders):
    solver = hugectr.CreateSolver(
        max_eval_batches=1,
        batchsize_eval=32,
        batchsize=32,
        lr=0.02,
        vvgpu=[[0]],
        i64_input_key=True,
        repeat_dataset=False,
        kafka_brockers="localhost:9092",
        model_name="wdl",
        seed=2,
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=SOURCES,
        keyset=KEYSETS,
        eval_source=SOURCES[0].replace("file_list", "file_list_test"),
        check_type=hugectr.Check_t.Sum,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam)
    cache = hugectr.CreateETC(
        ps_types=[hugectr.TrainPSType_t.Staged, hugectr.TrainPSType_t.Cached],
        sparse_models=folders,
        local_paths=["./"],
        hmem_cache_configs=[hugectr.CreateHMemCache(2, 0.5, 0)],
    )
    model = hugectr.Model(solver, reader, optimizer, cache)
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name="label",
            dense_dim=2,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam("wide_data", 1, True, 1),
                hugectr.DataReaderSparseParam("deep_data", 1, False, 2),
            ],
        )
    )
    for name, width in (("wide", 1), ("deep", 8)):
        model.add(
            hugectr.SparseEmbedding(
                embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
                workspace_size_per_gpu_in_mb=1,
                embedding_vec_size=width,
                combiner="sum",
                sparse_embedding_name=f"{name}_embedding",
                bottom_name=f"{name}_data",
                optimizer=optimizer,
            )
        )

    def dense(kind, bottoms, top, **more):
        model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=[top], **more))

    layers = hugectr.Layer_t
    dense(layers.Reshape, ["wide_embedding"], "wide", leading_dim=1)
    dense(layers.Reshape, ["deep_embedding"], "deep", leading_dim=16)
    dense(layers.Concat, ["deep", "dense"], "features")
    dense(layers.InnerProduct, ["features"], "fc1", num_output=32)
    dense(layers.ReLU, ["fc1"], "relu1")
    dense(layers.InnerProduct, ["relu1"], "fc2", num_output=1)
    dense(layers.Add, ["fc2", "wide"], "logit")
    dense(layers.BinaryCrossEntropyLoss, ["logit", "label"], "loss")
    model.compile()
    return model


folders = ["./etc_wide", "./etc_deep"]
model = build(folders)
model.fit(num_epochs=8, display=8, eval_interval=12)
updates = model.get_incremental_model()
assert [vectors.shape[1] for _, vectors in updates] == [1, 8]
assert all(len(keys) == len(vectors) > 0 for keys, vectors in updates)
assert updates[0][0].max() < 30 <= updates[1][0].min()
model.save_params_to_files("etc", 48)
np.testing.assert_array_equal(np.fromfile("etc_wide/key", np.int64), updates[0][0])
np.testing.assert_array_equal(np.fromfile("etc_deep/emb_vector", np.float32).reshape(-1, 8), updates[1][1])

model.set_source(SOURCES[:1], KEYSETS[:1], SOURCES[0].replace("file_list", "file_list_test"))
model.fit(num_epochs=1, display=1, eval_interval=100)
assert len(model.get_incremental_model()[0][0])
assert not len(model.get_incremental_model()[0][0])

again = build(folders)  # reads the folders
again.load_dense_weights("etc_dense_48.model")
again.load_dense_optimizer_states("etc_opt_dense_48.model")
cache = again.get_embedding_training_cache()
again.get_data_reader_train().set_source(SOURCES[0])
cache.update(KEYSETS[0])
while again.train(False):
    pass
print("trained on, loss", again.get_current_loss())
