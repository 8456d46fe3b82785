"""Steps on a CPU whose dense part is recorded and replayed: the bits of eager steps, and every change is noticed."""

import copy

import pytest
import torch

import viviane as vv
from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import KeyRangeError, NumericsError
from viviane.core.ranges import recording
from viviane.nn import Concat, Dropout
from viviane.ops.pair_sums import cpu as pair_sums_cpu
from viviane.training.step import recording as step_recording
from viviane.training.step.program import HostExecutor
from viviane.training.step.recorded_steps import MAX_ROWS, ReplayExecutor
from viviane.zoo import BST, DCN, DIN, DLRM, DeepFM, MMoE, SASRec, WideDeep

SIZE, STEPS, WARM = 24, 10, 6  # replays begin after three eager steps, a recorded one and two that are verified


def schema_of(bags=0, labels=1):
    columns = [{"name": f"c{i}", "num_ids": 40 + 9 * i} for i in range(3)]
    columns += [{"name": f"b{i}", "num_ids": 30, "kind": "multi_hot", "max_length": 4} for i in range(bags)]
    dense = [{"name": f"x{i}"} for i in range(3)]
    return vv.Schema(labels=[{"name": f"y{i}"} for i in range(labels)], dense=dense, categorical=columns)


HISTORY = vv.Schema(
    labels=[{"name": "y0"}],
    categorical=[
        {"name": "seen", "num_ids": 30, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        {"name": "item", "num_ids": 30},
    ],
)


def draw(schema, seed, size=SIZE, weighted=False):
    generator = torch.Generator().manual_seed(seed)
    singles = [torch.randint(3, 30, (size,), generator=generator) for _ in schema.one_hot]
    bags = {}
    for column in schema.bags:
        lengths = torch.randint(0, 5, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        bags[column.name] = Bag(torch.randint(3, 30, (int(offsets[-1]),), generator=generator), offsets)
    labels = torch.randint(2, (size, len(schema.labels)), generator=generator).float()
    dense = torch.rand(size, len(schema.dense), generator=generator)
    weight = torch.rand(size, generator=generator) + 0.5 if weighted else None
    return Batch(Layout.of(schema), labels, dense, torch.stack(singles, 1), bags, weight)


def layers(model):
    """Dropout, batch statistics, a regularizer, an input that is joined to a lookup and a native operator."""
    model.add(vv.Input(label="y0", dense="dense", sparse="cats"))
    model.add(vv.DenseLayer("norm", "BatchNorm", bottom="dense"))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=4))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("x0", "Concat", bottom=["norm", "flat"]))
    model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=2, projection_dim=4))
    model.add(vv.DenseLayer("drop", "Dropout", bottom="cross", dropout_rate=0.3))
    model.add(vv.DenseLayer("pairs", "FmOrder2", bottom="flat", out_dim=4))
    model.add(vv.DenseLayer("read", "Concat", bottom=["drop", "pairs"]))
    model.add(vv.DenseLayer("top", "MLP", bottom="read", num_outputs=[8, 1], activations=["relu", "none"]))
    penalty = {"use_regularizer": True, "regularizer_type": "L2", "lambda_": 0.1}
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["top", "y0"], **penalty))


def compiled(add, schema, dense=None, tables=None, **solver):
    model = vv.Model(vv.Solver.from_dict({"device": "cpu", "num_threads": 1, "lr": 0.05, **solver}), schema)
    add(model) if callable(add) else model.add(add)
    model.compile(dense or vv.Adam(), embedding_optimizer=tables or vv.AdaGrad())
    return model.trainer


def state_of(trainer):
    tensors = {name: one.clone() for name, one in trainer.module.state_dict().items()}
    for name, parameter in trainer.stepper.parameters.items():
        tensors |= {f"{name}.{key}": one.clone() for key, one in trainer.stepper.optimizer.state[parameter].items()}
    return tensors


def eager(trainer):
    """Let all steps run eagerly."""
    trainer.stepper.recorded = None
    return trainer


def assert_same(one, other):
    ours, truth = state_of(one), state_of(other)
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[name], truth[name]) for name in truth)


CASES = {
    "layers": (layers, schema_of(), {}),
    "layers, bf16": (layers, schema_of(), {"precision": "bf16"}),
    "layers, clipped, running mean": (layers, schema_of(), {"clip_grad_norm": 0.05, "ema_decay": 0.9}),
    "DCN": (DCN(dim=4, deep_mlp=[8]), schema_of(), {"class_weights": (1.0, 2.0), "label_smoothing": 0.1}),
    "WideDeep, bags": (WideDeep(dim=4), schema_of(bags=2), {}),
    "MMoE, two labels": (MMoE(), schema_of(labels=2), {}),
    "DIN": (DIN(), HISTORY, {}),
    "BST": (BST(), HISTORY, {}),
    "DLRM": (DLRM(dim=4, bottom_mlp=[8], top_mlp=[8]), schema_of(), {}),
    "DLRM, bags and vectors": (DLRM(dim=4, bottom_mlp=[8], top_mlp=[8], concat_embeddings=True), schema_of(bags=2), {}),
    "DLRM, without dense columns": (DLRM(dim=4, top_mlp=[8]), HISTORY, {}),
    "DeepFM": (DeepFM(dim=4, deep_mlp=[8]), schema_of(), {}),
    "DeepFM, bags, clipped": (DeepFM(dim=4, deep_mlp=[8]), schema_of(bags=2), {"clip_grad_norm": 0.05}),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", CASES)
def test_replays_give_the_bits_of_eager_steps(name, weighted):
    add, schema, solver = CASES[name]
    ours, truth = compiled(add, schema, **solver), eager(compiled(add, schema, **solver))
    torch.manual_seed(5)
    batches = [draw(schema, seed, weighted=weighted) for seed in range(STEPS)]
    losses = [[trainer.train_step(batch).item() for batch in batches] for trainer in (ours, truth)]
    assert losses[0] == losses[1]
    assert ours.stepper.recorded.num_replays == STEPS - WARM - ("class_weights" in solver)  # its warning is a change
    assert_same(ours, truth)


def train(trainer, seeds, sizes=()):
    """Train on batches of some seeds; both of a pair draw the same random numbers."""
    torch.manual_seed(9)
    sizes = list(sizes) or [SIZE] * len(seeds)
    return [trainer.train_step(draw(schema_of(), *given)).item() for given in zip(seeds, sizes, strict=True)]


def replaying(add=layers, schema=None, **solver):
    """A trainer whose next step is a replay, and its twin that runs eagerly."""
    schema = schema or schema_of()
    pair = compiled(add, schema, **solver), eager(compiled(add, schema, **solver))
    for trainer in pair:
        for seed in range(WARM + 1):
            trainer.train_step(draw(schema, seed))
    assert pair[0].stepper.recorded.num_replays == 1
    return pair


def dropout_of(trainer):
    return next(one for one in trainer.module.modules() if isinstance(one, Dropout))


def set_frozen(trainer):
    next(iter(trainer.stepper.parameters.values())).requires_grad_(False)


def freeze_table(trainer):
    next(iter(trainer.stepper.collections.values())).freeze("c1")


def replace_weight(trainer):
    weight = list(trainer.stepper.parameters.values())[-1]
    weight.data = weight.data * 0.5


def write_weight(trainer):
    with torch.no_grad():
        list(trainer.stepper.parameters.values())[-1].mul_(0.5)


def evaluate_layers(trainer):
    trainer.module.eval()


def replace_forward(trainer):
    dropout_of(trainer).forward = lambda x: x * 0.5


def add_hook(trainer):
    dropout_of(trainer).register_forward_hook(lambda module, inputs, output: output * 0.5)


def add_weight_hook(trainer):
    next(iter(trainer.stepper.parameters.values())).register_hook(lambda gradient: gradient * 0.5)


def set_learning_rate(trainer):
    trainer.stepper.optimizer.param_groups[0].update(own_lr=True, initial_lr=0.5)


def keep_a_gradient(trainer):
    weight = next(iter(trainer.stepper.parameters.values()))
    weight.grad = torch.ones_like(weight)


def set_dropout_rate(trainer):
    layer = dropout_of(trainer)
    layer.settings = layer.settings.model_copy(update={"dropout_rate": 0.6})


CHANGES = [
    set_frozen, freeze_table, replace_weight, write_weight, evaluate_layers, replace_forward, add_hook,
    add_weight_hook, set_learning_rate, keep_a_gradient, set_dropout_rate,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_change_between_steps_is_noticed(change):
    ours, truth = replaying()
    before = state_of(ours)
    for trainer in (ours, truth):
        change(trainer)
        train(trainer, range(20, 20 + WARM + 2))
    assert_same(ours, truth)
    assert any(not torch.equal(before[name], one) for name, one in state_of(ours).items())


def test_another_batch_size_has_a_program_of_its_own():
    ours, truth = replaying()
    sizes = [SIZE, 7] * (WARM + 2)
    for trainer in (ours, truth):
        train(trainer, range(50, 50 + len(sizes)), sizes)
    assert_same(ours, truth)
    assert ours.stepper.recorded.describe().startswith("replayed: 2 shape(s)")


OPTIMIZERS = {
    "SGD": (vv.SGD(), vv.SGD()),
    "momentum": (vv.SGD(momentum=0.9, nesterov=True), vv.SGD(momentum=0.9)),
    "Ftrl": (vv.Ftrl(), vv.Ftrl()),
    "AdamW, Adam global": (vv.AdamW(weight_decay=0.1), vv.Adam(update="global")),
    "LAMB, Adam lazy": (vv.Lamb(), vv.Adam(update="lazy_global")),
    "RMSProp, row-wise Adam": (vv.RMSProp(), vv.RowWiseAdam()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "model", [DLRM(dim=4, bottom_mlp=[8], top_mlp=[8]), DeepFM(dim=4, deep_mlp=[8])], ids=["DLRM", "DeepFM"]
)
def test_native_operators_with_each_optimizer_as_sizes_and_freezing_change(name, model):
    pair = compiled(model, schema_of(), *OPTIMIZERS[name]), compiled(model, schema_of(), *OPTIMIZERS[name])
    ours, truth = pair[0], eager(pair[1])
    sizes = [SIZE, 7] * (WARM + 1)
    losses = [train(one, range(len(sizes)), sizes) for one in pair]
    assert ours.stepper.recorded.num_replays == 2
    for one in pair:
        set_frozen(one)
        freeze_table(one)
    losses += [train(one, range(30, 30 + WARM + 1)) for one in pair]
    assert ours.stepper.recorded.num_replays == 3
    assert losses[0::2] == losses[1::2]
    assert_same(ours, truth)


def test_what_observes_a_step_sees_an_eager_one():
    ours, _ = replaying()
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        ours.train_step(draw(schema_of(), 30))
    assert seen
    with recording(), torch.autograd.profiler.profile() as profile:
        ours.train_step(draw(schema_of(), 31))
    assert {"viviane: forward", "viviane: backward"} <= {event.name for event in profile.function_events}
    assert ours.stepper.recorded.num_replays == 1
    ours.train_step(draw(schema_of(), 32))
    assert ours.stepper.recorded.num_replays == 2


@pytest.mark.parametrize("error", [KeyRangeError, NumericsError])
def test_errors_of_a_replay_are_those_of_an_eager_step_and_change_nothing(error):
    ours, truth = replaying()
    bad = draw(schema_of(), 40)
    if error is KeyRangeError:
        bad.one_hot[5, 1] = 10_000
    else:
        for trainer in (ours, truth):
            next(iter(trainer.stepper.collections.values())).all_storages()[0].weight[:] = float("inf")
    messages = []
    for trainer in (ours, truth):
        with pytest.raises(error) as caught:
            trainer.train_step(bad)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert ours.stepper.recorded.num_replays == 2
    if error is KeyRangeError:
        for trainer in (ours, truth):
            train(trainer, [41])
    assert_same(ours, truth)


def test_reasons_of_eager_steps(monkeypatch):
    class Scorer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, batch):
            return self.layer(batch.dense)

    def reason(trainer, schema, count=WARM, size=SIZE):
        for seed in range(count):
            trainer.train_step(draw(schema, seed, size))
        return trainer.stepper.recorded.describe()

    schema = schema_of()
    custom = vv.training.Trainer(Scorer(), schema, vv.Solver(device="cpu"), vv.Adam())
    assert "a custom module (Scorer) runs Python" in reason(custom, schema)
    assert "solver.cuda_graph is False" in reason(compiled(layers, schema, cuda_graph=False), schema, 1)
    masks = compiled(SASRec(dim=4), HISTORY)
    assert "neither a weight, a buffer, nor of the batch's columns" in reason(masks, HISTORY)
    with monkeypatch.context() as patch:  # a kernel that is no native operator
        patch.setattr(pair_sums_cpu, "sums_of_pairs", pair_sums_cpu.sums_of_pairs.__wrapped__)
        kernels = compiled(DeepFM(dim=4), schema)
        assert "kernel that torch's dispatcher does not see" in reason(kernels, schema)
    large = compiled(layers, schema)
    assert reason(large, schema, size=MAX_ROWS + 1).startswith("eager so far")
    executor = large.stepper.recorded.executor(draw(schema, 0, MAX_ROWS + 1), 1, large.precision, None)
    assert type(executor) is HostExecutor
    in_place = compiled(layers, schema)
    in_place.module.compile(backend="eager", fullgraph=True)  # raises an error where its operators are recorded
    executor = in_place.stepper.recorded.executor(draw(schema, 0), 1, in_place.precision, None)
    assert type(executor) is HostExecutor
    assert "is compiled by torch.compile" in in_place.stepper.recorded.describe()


def test_a_program_that_gives_other_bits_is_not_used(monkeypatch):
    """What the recorder cannot see: a layer whose result depends on a counter that is not its attribute."""
    counter = iter(range(1, 1000))
    plain = Concat.forward
    monkeypatch.setattr(Concat, "forward", lambda self, *inputs: plain(self, *inputs) * next(counter))
    Concat.forward.__module__ = "viviane.nn.shape"
    trainer = compiled(DCN(dim=4, deep_mlp=[8]), schema_of())
    for seed in range(STEPS):
        trainer.train_step(draw(schema_of(), seed))
    assert trainer.stepper.recorded.num_replays == 0
    assert "other bits" in trainer.stepper.recorded.describe()


@pytest.mark.parametrize("name", ["compile_program", "_Operation"])
def test_a_step_that_cannot_be_recorded_trains_all_the_same(name, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    ours, truth = (compiled(layers, schema_of()) for _ in range(2))
    eager(truth)
    with monkeypatch.context() as patch:
        patch.setattr(step_recording, name, fail)
        train(ours, range(STEPS))
    train(truth, range(STEPS))
    assert "RuntimeError: no memory" in ours.stepper.recorded.describe()
    assert_same(ours, truth)


def test_a_copy_has_no_programs():
    ours, _ = replaying()
    assert copy.copy(ours.stepper.recorded).describe().startswith("eager so far")


def test_steps_are_recorded_once_a_hook_is_gone():
    ours, truth = replaying()
    for trainer in (ours, truth):
        hook = dropout_of(trainer).register_forward_hook(lambda module, inputs, output: output * 0.5)
        train(trainer, [20, 21])
        hook.remove()
        train(trainer, range(22, 22 + 80))
    assert "has hooks" not in ours.stepper.recorded.describe()
    assert ours.stepper.recorded.num_replays > 2
    assert_same(ours, truth)


def test_the_program_of_a_step_is_used():
    ours, _ = replaying()
    executor = ours.stepper.recorded.executor(draw(schema_of(), 1), 9, ours.precision, None)
    assert type(executor) is ReplayExecutor
