"""HugeCTR before 3.1: a session over a JSON file, its loop, files and passes."""

import json
from pathlib import Path

import hugectr
from hugectr import Session, get_learning_rate_scheduler, solver_parser_helper
from hugectr.tools import DataGenerator, DataGeneratorParams

DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Norm,
        label_dim=1,
        dense_dim=2,
        num_slot=4,
        i64_input_key=False,
        source="./v2_data/file_list.txt",
        eval_source="./v2_data/file_list_test.txt",
        slot_size_array=[20, 30, 10, 15],
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=64,
    )
).generate()
CONFIG = {
    "solver": {"lr_policy": "fixed", "display": 20, "max_iter": 100, "gpu": [0], "batchsize": 32},
    "optimizer": {
        "type": "Adam",
        "global_update": True,
        "adam_hparam": {"alpha": 0.02, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7, "warmup_steps": 5},
    },
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "source": "./v2_data/file_list.txt",
            "eval_source": "./v2_data/file_list_test.txt",
            "check": "Sum",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": 2},
            "sparse": [{"top": "data1", "type": "LocalizedSlot", "max_feature_num_per_sample": 10, "slot_num": 4}],
        },
        {
            "name": "sparse_embedding1",
            "type": "LocalizedSlotSparseEmbeddingHash",
            "bottom": "data1",
            "top": "sparse_embedding1",
            "sparse_embedding_hparam": {
                "max_vocabulary_size_per_gpu": 1000,
                "load_factor": 0.75,
                "embedding_vec_size": 8,
                "combiner": 0,
            },
        },
        {"name": "reshape1", "type": "Reshape", "bottom": "sparse_embedding1", "top": "reshape1", "leading_dim": 32},
        {"name": "concat1", "type": "Concat", "bottom": ["reshape1", "dense"], "top": "concat1"},
        {"name": "slice1", "type": "Slice", "bottom": "concat1", "ranges": [[0, 34], [0, 34]], "top": ["s1", "s2"]},
        {"name": "cross", "type": "MultiCross", "bottom": "s1", "top": "cross", "mc_param": {"num_layers": 2}},
        {"name": "fc1", "type": "InnerProduct", "bottom": "s2", "top": "fc1", "fc_param": {"num_output": 16}},
        {"name": "relu1", "type": "ReLU", "bottom": "fc1", "top": "relu1"},
        {"name": "drop", "type": "Dropout", "rate": 0.1, "bottom": "relu1", "top": "drop"},
        {"name": "concat2", "type": "Concat", "bottom": ["drop", "cross"], "top": "concat2"},
        {"name": "fc2", "type": "InnerProduct", "bottom": "concat2", "top": "fc2", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
    ],
}
Path("v2.json").write_text(json.dumps(CONFIG))


def start(**files):
    solver = solver_parser_helper(
        seed=4,
        eval_batches=2,
        batchsize_eval=32,
        batchsize=32,
        vvgpu=[[0]],
        use_mixed_precision=False,
        scaler=1.0,
        i64_input_key=False,
        use_algorithm_search=True,
        use_cuda_graph=True,
        repeat_dataset=True,
        **files,
    )
    return Session(solver, "v2.json")


session = start()
schedule = get_learning_rate_scheduler("v2.json")
session.start_data_reading()
losses = []
for i in range(101):
    lr = schedule.get_next()
    session.set_learning_rate(lr)
    session.train()
    if i % 20 == 0:
        losses.append(session.get_current_loss())
        print(f"iteration {i}, lr {lr}, loss {losses[-1]}")
    if i % 50 == 0 and i:
        session.check_overflow()
        session.copy_weights_for_evaluation()
        for _ in range(2):
            session.eval()
        print(session.get_eval_metrics())
assert losses[-1] < losses[0], losses
session.download_params_to_files("./v2", 100)
session.get_data_reader_eval().set_source("./v2_data/file_list_test.txt")
metrics = session.evaluation("v2_pred.txt", "v2_label.txt")
assert len(Path("v2_pred.txt").read_text().split()) == 64

again = start(dense_model_file="./v2_dense_100.model", embedding_files=["./v20_sparse_100.model"])
assert again.evaluation("again_pred.txt", "again_label.txt") == metrics
assert Path("again_pred.txt").read_text() == Path("v2_pred.txt").read_text()
