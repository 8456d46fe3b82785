"""Graphs of layers on a GPU: recorded steps, whose lookups run beside layers, give the bits of steps from Python."""

import pytest
import torch
from click_model import assert_same_bits, tensors_of

import viviane as vv
from viviane.batch import Bag, Batch, Layout
from viviane.embedding import EmbeddingCollection
from viviane.training.graph import captured_step
from viviane.zoo import DCN, DLRM, DeepFM, WideDeep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZE, STEPS = 96, 12


def schema_of(bags):
    columns = [{"name": f"c{i}", "num_ids": 50 + 900 * i} for i in range(4)]
    columns += [{"name": f"b{i}", "num_ids": 70, "kind": "multi_hot", "max_length": 5} for i in range(bags)]
    dense = [{"name": f"x{i}"} for i in range(3)]
    return vv.Schema(labels=[{"name": "click"}], dense=dense, categorical=columns)


def draw(schema, seed):
    generator = torch.Generator().manual_seed(seed)
    singles, bags = [], {}
    for column in schema.categorical:
        if column.name.startswith("c"):
            singles.append(torch.randint(column.num_ids, (SIZE,), generator=generator))
        else:  # one length in all batches, so that all of them are one shape
            lengths = torch.arange(SIZE) % 4
            values = torch.randint(column.num_ids, (int(lengths.sum()),), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            bags[column.name] = Bag(values.cuda(), offsets.cuda())
    labels = torch.randint(2, (SIZE, 1), generator=generator).float()
    dense = torch.rand(SIZE, 3, generator=generator)
    batch = Batch(Layout.of(schema), labels.cuda(), dense.cuda(), torch.stack(singles, 1).cuda(), bags)
    there = torch.cuda.Event()
    there.record()
    return batch.ready_after(there)


def crossed(model):
    """What DLRM-DCNv2 is: an input joined to a lookup, with dropout in what waits for it and in what does not."""
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.DenseLayer("bottom", "MLP", bottom="dense", num_outputs=[24, 16], dropout=0.1))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=16))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("x0", "Concat", bottom=["bottom", "flat"]))
    model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=2, projection_dim=8))
    model.add(vv.DenseLayer("drop", "Dropout", bottom="cross", dropout_rate=0.2))
    model.add(vv.DenseLayer("top", "MLP", bottom="drop", num_outputs=[32, 1], activations=["relu", "none"]))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["top", "label"]))


MODELS = {
    "crossed": (crossed, 3),
    "DLRM": (lambda model: model.add(DLRM(dim=16, bottom_mlp=(24,), top_mlp=(32, 16))), 0),
    "DCN": (lambda model: model.add(DCN(dim=16)), 2),
    "DeepFM": (lambda model: model.add(DeepFM(dim=16)), 0),
    "WideDeep": (lambda model: model.add(WideDeep(dim=16)), 0),
}


def train(name, precision, graph):
    """Train a model; returns its trainer, losses and all that it has."""
    add, bags = MODELS[name]
    schema = schema_of(bags)
    batches = [draw(schema, seed) for seed in range(STEPS)]
    solver = vv.Solver.from_dict({"lr": 0.05, "device": "cuda", "precision": precision, "cuda_graph": graph})
    model = vv.Model(solver, schema)
    add(model)
    model.compile(optimizer=vv.Adam(), embedding_optimizer=vv.AdaGrad())
    losses = [model.trainer.train_step(batch) for batch in batches]  # nothing waits: steps follow on one another
    model.trainer.settle()
    tensors = {key: one.cpu() for key, one in tensors_of(model.trainer).items()}
    return model.trainer, [loss.item() for loss in losses], tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_layers_is_recorded_with_the_bits_of_eager_steps(name, precision):
    _, losses, tensors = train(name, precision, False)
    trainer, recorded_losses, recorded = train(name, precision, True)
    assert trainer.cuda_graph.startswith("replayed: 1 shape(s) captured")
    assert losses == recorded_losses
    assert_same_bits(tensors, recorded)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("name", ["crossed", "DCN"])
def test_updates_read_nothing_of_the_batch(name, monkeypatch):
    """Over several GPUs the next batch is filled beside them, and would change them now and then; here another is."""
    losses, tensors = train(name, "fp32", False)[1:]
    seen, written = [], []
    look_up, update = EmbeddingCollection.forward, captured_step.update_status

    def forward(self, batch):
        seen[:] = [self, batch]
        return look_up(self, batch)

    def update_and_write(*given):
        update(*given)
        tables, batch = seen
        tables.settle_rows()
        written.extend(tensor.fill_(1) for tensor in batch.tensors())

    monkeypatch.setattr(EmbeddingCollection, "forward", forward)
    monkeypatch.setattr(captured_step, "update_status", update_and_write)
    trainer, recorded_losses, recorded = train(name, "fp32", True)
    assert trainer.stepper.captured.num_replays > STEPS // 2
    assert len(written) == 3 + 2 * MODELS[name][1]  # labels, dense numbers, ids; ids and offsets of each bag: once
    assert losses == recorded_losses
    assert_same_bits(tensors, recorded)
