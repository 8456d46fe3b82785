"""Passes whose tables do not fit into the workspace: rows and state leave memory and come back; argument: MB."""

import sys

import hugectr
import numpy as np
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [3000, 60000, 20000]
MEGABYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 1
SOURCES = [f"./etc_data/{i}/file_list.txt" for i in range(3)]
KEYSETS = [f"./etc_data/{i}/keyset" for i in range(3)]
for source in SOURCES:
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
            num_samples_per_file=512,
        )
    ).generate()

reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=SOURCES,
    keyset=KEYSETS,
    eval_source=SOURCES[0].replace("file_list", "file_list_test"),
    check_type=hugectr.Check_t.Sum,
    slot_size_array=SIZES,
)
first = np.arange(SIZES[0])
for i, keyset in enumerate(KEYSETS):  # a third of the keys of each pass: those that it lacks are fetched by batch
    wide = SIZES[0] + i * 3000 + np.arange(3000)
    deep = SIZES[0] + SIZES[1] + i * 2000 + np.arange(2000)
    np.concatenate([first, wide, deep]).astype(np.int64).tofile(keyset)

solver = hugectr.CreateSolver(
    max_eval_batches=1,
    batchsize_eval=64,
    batchsize=64,
    lr=0.02,
    vvgpu=[[0]],
    i64_input_key=True,
    repeat_dataset=False,
    seed=2,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.LazyGlobal)
cache = hugectr.CreateETC(ps_types=[hugectr.TrainPSType_t.Staged], sparse_models=["./rows"], local_paths=["./local"])
model = hugectr.Model(solver, reader, optimizer, cache)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=2,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data", 1, True, 3)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        workspace_size_per_gpu_in_mb=MEGABYTES,
        embedding_vec_size=8,
        combiner="sum",
        sparse_embedding_name="emb",
        bottom_name="data",
        slot_size_array=SIZES,
        optimizer=optimizer,
    )
)


def dense(kind, bottoms, top, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=[top], **more))


layers = hugectr.Layer_t
dense(layers.Reshape, ["emb"], "flat", leading_dim=24)
dense(layers.Concat, ["flat", "dense"], "features")
dense(layers.InnerProduct, ["features"], "fc", num_output=1)
dense(layers.BinaryCrossEntropyLoss, ["fc", "label"], "loss")
model.compile()
model.fit(num_epochs=3, display=8, eval_interval=12)
model.save_params_to_files("etc", 72)
