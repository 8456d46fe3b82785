"""Wide and deep: train, save, predict from the files in all ways, and look vectors up."""

import hugectr
import numpy as np
import pytest
from hugectr.inference import (
    HPS,
    CreateInferenceSession,
    InferenceModel,
    InferenceParams,
    ParameterServerConfig,
    VolatileDatabaseParams,
)
from hugectr.tools import DataGenerator, DataGeneratorParams
from mpi4py import MPI  # noqa: F401 - as HugeCTR's scripts do

import viviane as vv

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=1,
        dense_dim=3,
        num_slot=3,
        i64_input_key=True,
        source="./wdl_inf/file_list.txt",
        eval_source="./wdl_inf/file_list_test.txt",
        slot_size_array=[30, 25, 20],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=96,
    )
).generate()
SIZES = [30, 25, 20]
solver = hugectr.CreateSolver(
    model_name="wdl",
    max_eval_batches=1,
    batchsize_eval=64,
    batchsize=64,
    lr=0.01,
    vvgpu=[[0]],
    i64_input_key=True,
    seed=1,
)
reader = hugectr.DataReaderParams(
    hugectr.DataReaderType_t.Parquet,
    ["./wdl_inf/file_list.txt"],
    eval_source="./wdl_inf/file_list_test.txt",
    slot_size_array=SIZES,
    check_type=hugectr.Check_t.Non,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Local)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=3,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("wide_data", 1, True, 1),
            hugectr.DataReaderSparseParam("deep_data", 1, True, 2),
        ],
    )
)
for name, width, combiner in (("sparse_embedding2", 1, "sum"), ("sparse_embedding1", 8, "mean")):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1,
            embedding_vec_size=width,
            combiner=combiner,
            sparse_embedding_name=name,
            bottom_name="wide_data" if width == 1 else "deep_data",
            optimizer=optimizer,
        )
    )


def dense(kind, bottoms, top, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=[top], **more))


layers = hugectr.Layer_t
dense(layers.Reshape, ["sparse_embedding1"], "reshape1", leading_dim=16)
dense(layers.Reshape, ["sparse_embedding2"], "reshape2", leading_dim=1)
dense(layers.Concat, ["reshape1", "dense"], "concat1")
dense(layers.BatchNorm, ["concat1"], "bn", factor=0.1)
dense(layers.InnerProduct, ["bn"], "fc1", num_output=32)
dense(layers.ReLU, ["fc1"], "relu1")
dense(layers.Dropout, ["relu1"], "dropout1", dropout_rate=0.1)
dense(layers.InnerProduct, ["dropout1"], "fc2", num_output=1)
dense(layers.Add, ["fc2", "reshape2"], "add1")
dense(layers.BinaryCrossEntropyLoss, ["add1", "label"], "loss")
model.graph_to_json("wdl.json")
model.compile()
model.fit(max_iter=100, display=20, eval_interval=100, snapshot=100, snapshot_prefix="wdl")
model.export_predictions("wdl_pred.txt", "wdl_label.txt")
expected = np.loadtxt("wdl_pred.txt")

params = InferenceParams(
    model_name="wdl",
    max_batchsize=64,
    hit_rate_threshold=1.0,
    dense_model_file="wdl_dense_100.model",
    sparse_model_files=["wdl0_sparse_100.model", "wdl1_sparse_100.model"],
    device_id=0,
    use_gpu_embedding_cache=True,
    cache_size_percentage=0.5,
    i64_input_key=True,
    volatile_db=VolatileDatabaseParams(hugectr.DatabaseType_t.parallel_hash_map),
)
source = ("./wdl_inf/file_list_test.txt", hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Non, SIZES)
served = InferenceModel("wdl.json", params)
found = served.predict(1, *source)
assert found.shape == (64,)
assert np.mean((found - expected) ** 2) < 1e-10, "predictions of the files are those of training"
assert 0 <= served.evaluate(2, *source) <= 1
for ask in (served.predict, served.evaluate):
    for wrong in (0, 2**62):
        with pytest.raises(ValueError, match="no number of batches"):
            ask(wrong, *source)
assert served.check_out_tensor("fc1").shape == (32, 32)

session = CreateInferenceSession("wdl.json", params)
assert np.array_equal(session.predict(1, *source), found)
keys = [3, 4, 30 + 1, 55 + 2, 30 + 5, 55 + 6]  # two rows of the wide table, then two of two slots
listed = session.predict([0.5] * 6, keys, [*range(3), *range(5)])
assert len(listed) == 2
assert all(0 < one < 1 for one in listed)

params.volatile_db = None
InferenceModel("wdl.json", params).save("models/wdl/1")
row = {"dense": [[0.5] * 3] * 2, "wide_data_0": [[3], [4]], "deep_data_0": [[31], [35]], "deep_data_1": [[57], [61]]}
with vv.InferenceSession("models/wdl/1", device="cpu", tables={"cache": {"share": 0.5}}) as moved:
    assert np.allclose(moved.predict(row), listed, atol=1e-6)
params.volatile_db = VolatileDatabaseParams(hugectr.DatabaseType_t.parallel_hash_map)
with pytest.raises(ValueError, match="volatile_db"):
    served.save("models/wdl/2")

server = HPS(
    ParameterServerConfig(
        emb_table_name={"wdl": ["wide", "deep"]},
        embedding_vec_size={"wdl": [1, 8]},
        max_feature_num_per_sample_per_emb_table={"wdl": [1, 2]},
        inference_params_array=[params],
    )
)
stored = np.fromfile("wdl1_sparse_100.model/key", np.int64)
vectors = np.fromfile("wdl1_sparse_100.model/emb_vector", np.float32).reshape(-1, 8)
assert np.array_equal(server.lookup(stored[:5].tolist(), "wdl", 1), vectors[:5])
assert not server.lookup([10**12], "wdl", 1).any()
print("served", found[:3])
