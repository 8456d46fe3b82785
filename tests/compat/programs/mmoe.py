"""MMoE: two tasks, gates over experts, losses weighed by label, a callback that is told of evaluations."""

import hugectr
from hugectr.tools import DataGenerator, DataGeneratorParams

SIZES = [9, 52, 47, 17]
DataGenerator(
    DataGeneratorParams(
        format=hugectr.DataReaderType_t.Parquet,
        label_dim=2,
        dense_dim=0,
        num_slot=4,
        i64_input_key=False,
        source="./mmoe/train/_file_list.txt",
        eval_source="./mmoe/val/_file_list.txt",
        slot_size_array=SIZES,
        num_files=2,
        eval_num_files=1,
        num_samples_per_file=32,
    )
).generate()


class Watch(hugectr.TrainingCallback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_training_start(self):
        self.seen.append("start")

    def on_training_end(self, current_iter):
        self.seen.append(f"end {current_iter}")

    def on_eval_start(self, current_iter):
        return False

    def on_eval_end(self, current_iter, eval_results):
        self.seen.append(f"eval {current_iter} {sorted(eval_results)[0]}")
        return current_iter >= 100


watch = Watch()
solver = hugectr.CreateSolver(
    max_eval_batches=2,
    batchsize_eval=32,
    batchsize=32,
    lr=0.02,
    vvgpu=[[0]],
    repeat_dataset=True,
    seed=8,
    metrics_spec={hugectr.MetricsType.AUC: 1.0},
    training_callbacks=[watch],
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=["./mmoe/train/_file_list.txt"],
    eval_source="./mmoe/val/_file_list.txt",
    check_type=hugectr.Check_t.Non,
    slot_size_array=SIZES,
)
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Local)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dims=[1, 1],
        label_names=["50k_label", "married_label"],
        dense_dim=0,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data", 1, True, 4)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        workspace_size_per_gpu_in_mb=1,
        embedding_vec_size=4,
        combiner="sum",
        sparse_embedding_name="sparse_embedding",
        bottom_name="data",
        slot_size_array=SIZES,
        optimizer=optimizer,
    )
)


def dense(kind, bottoms, tops, **more):
    model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=tops, **more))


L = hugectr.Layer_t
dense(L.Reshape, ["sparse_embedding"], ["embedding"], leading_dim=16)
model.add(
    hugectr.GroupDenseLayer(
        group_layer_type=hugectr.GroupLayer_t.GroupFusedInnerProduct,
        bottom_name_list=["embedding"],
        top_name_list=["shared1", "shared2"],
        num_outputs=[32, 16],
        last_act_type=hugectr.Activation_t.Relu,
    )
)
for expert in range(3):
    dense(L.MLP, ["shared2"], [f"expert{expert}"], num_outputs=[16, 8], act_type=hugectr.Activation_t.Relu)
dense(L.Concat, ["expert0", "expert1", "expert2"], ["experts_flat"])
dense(L.Reshape, ["experts_flat"], ["experts"], leading_dim=8, time_step=3)
for task, label in (("A", "50k_label"), ("B", "married_label")):
    dense(L.InnerProduct, ["shared2"], [f"{task}_gate_fc"], num_output=3)
    dense(L.Softmax, [f"{task}_gate_fc"], [f"{task}_gate"])
    dense(L.Reshape, [f"{task}_gate"], [f"{task}_gate3"], leading_dim=3, time_step=1)
    dense(L.MatrixMultiply, [f"{task}_gate3", "experts"], [f"{task}_mixed"])
    dense(L.Reshape, [f"{task}_mixed"], [f"{task}_in"], leading_dim=8)
    dense(L.InnerProduct, [f"{task}_in"], [f"{task}_fc1"], num_output=8)
    dense(L.ELU, [f"{task}_fc1"], [f"{task}_elu"], elu_alpha=1.0)
    dense(L.InnerProduct, [f"{task}_elu"], [f"{task}_fc2"], num_output=1)
    dense(L.BinaryCrossEntropyLoss, [f"{task}_fc2", label], [f"loss{task}"])
model.compile(loss_names=["50k_label", "married_label"], loss_weights=[0.5, 0.5])
model.fit(max_iter=200, display=20, eval_interval=50, snapshot=1000000)
assert watch.seen == ["start", "eval 50 AUC", "eval 100 AUC", "end 100"], watch.seen
