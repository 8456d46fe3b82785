"""The module that runs a graph: values by hand, names in the state dict, any number of readers."""

import logging

import torch

from viviane.batch import Batch
from viviane.config import SGD, Solver
from viviane.model import DenseLayer, GraphModule, Input, Model, SparseEmbedding, plan_graph
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "a"}, {"name": "b"}],
    categorical=[{"name": "c", "num_ids": 5}, {"name": "s", "num_ids": 5, "kind": "sequence", "max_length": 3}],
)
BATCH = Batch.from_columns(SCHEMA, {"a": [1.0, 2.0], "b": [10.0, 20.0], "c": [3, 4], "s": [[3, 4], []]})


def run(*nodes, batch: Batch = BATCH, schema: Schema = SCHEMA) -> torch.Tensor:
    module = GraphModule(plan_graph(nodes, schema), SGD())
    return module.eval()(batch)


def loss(logit: str = "logit", label: str = "label") -> DenseLayer:
    return DenseLayer(f"loss_{label}", "BinaryCrossEntropyLoss", bottom=[logit, label])


def test_dense_columns_come_in_the_order_of_the_input() -> None:
    out = run(
        Input(dense={"d": ["b", "a"]}),
        DenseLayer("first", "Slice", bottom="d", top="logit", ranges=[[0, 1]]),
        loss(),
    )
    assert out.tolist() == [[10.0], [20.0]]


def test_a_batch_whose_columns_stand_in_another_order_gives_the_same() -> None:
    other = Schema(labels=[{"name": "y"}], dense=[{"name": "b"}, {"name": "a"}], categorical=SCHEMA.categorical)
    batch = Batch.from_columns(other, {"a": [1.0, 2.0], "b": [10.0, 20.0], "c": [3, 4], "s": [[3, 4], []]})
    first = DenseLayer("first", "Slice", bottom="dense", top="logit", ranges=[[0, 1]])
    assert run(Input(), first, loss(), batch=batch).tolist() == [[1.0], [2.0]]


def test_embeddings_pool_or_stand_apart() -> None:
    one = {"type": "constant", "value": 1.0}
    pooled = SparseEmbedding("e", "cats", 2, init=one)
    total = DenseLayer("flat", "Reshape", bottom="e", shape=[-1])
    logit = DenseLayer("logit", "ReduceSum", bottom="flat")
    # row 0: one id of c, two of s, of width 2 each; row 1: one id, and an empty bag
    assert run(Input(), pooled, total, logit, loss()).tolist() == [[6.0], [2.0]]
    apart = SparseEmbedding("e", "cats", 2, init=one, combiner="concat")
    module = GraphModule(plan_graph([Input(), apart, total, logit, loss()], SCHEMA), SGD())
    assert module.eval()(BATCH).tolist() == [[6.0], [2.0]]
    assert module._modules["e"](BATCH).flat.view(2, 4, 2)[:, :, 0].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_a_tensor_may_have_any_number_of_readers() -> None:
    nodes = [Input(), DenseLayer("x", "ReduceSum", bottom="dense")]
    nodes += [DenseLayer(f"r{i}", "ReLU", bottom="x") for i in range(7)]
    nodes += [DenseLayer("logit", "Add", bottom=["x", *(f"r{i}" for i in range(7))]), loss()]
    assert run(*nodes).tolist() == [[88.0], [176.0]]


def test_several_outputs_and_several_labels() -> None:
    schema = Schema(labels=[{"name": "y"}, {"name": "z"}], dense=SCHEMA.dense)
    batch = Batch.from_columns(schema, {"a": [1.0], "b": [2.0]})
    nodes = [
        Input(label={"first": "y", "second": "z"}),
        DenseLayer("cut", "Slice", bottom="dense", top=["left", "right"], ranges=[[0, 1], [1, 2]]),
        loss("left", "second"),
        loss("right", "first"),
    ]
    assert run(*nodes, batch=batch, schema=schema).tolist() == [[2.0, 1.0]]  # the schema's order: y, z


def test_weights_carry_the_names_of_nodes_even_awkward_ones() -> None:
    nodes = [
        Input(),
        SparseEmbedding("train", "cats", 2),
        DenseLayer("flat", "Reshape", bottom="train", shape=[-1]),
        DenseLayer("type", "InnerProduct", bottom="flat", num_output=1),
        loss("type"),
    ]
    module = GraphModule(plan_graph(nodes, SCHEMA), SGD())
    assert set(module.state_dict()) == {
        "type.weight", "type.bias", "train.c.weight", "train.s.weight", "train.c.step", "train.s.step",
    }  # fmt: skip
    assert module.train().training
    assert all(one.training for one in module.modules())
    assert not module.eval().training


def test_what_no_loss_needs_is_not_computed_and_said(caplog) -> None:
    nodes = [
        Input(dense="dense"),
        DenseLayer("logit", "ReduceSum", bottom="dense"),
        SparseEmbedding("spare", "cats", 2),
        loss(),
    ]
    model = Model(Solver(device="cpu"), SCHEMA)
    model.nodes.extend(nodes)
    with caplog.at_level(logging.WARNING, "viviane.model"):
        model.compile()
    assert "nothing reads the tensor(s) 'spare'" in caplog.text
    model.module._modules["spare"] = None  # would fail if it ran
    assert model.module(BATCH).tolist() == [[11.0], [22.0]]


def test_initial_values_depend_on_seed_and_node_alone() -> None:
    def weights(seed: int, *extra) -> dict:
        nodes = [
            Input(),
            SparseEmbedding("e", "cats", 2),
            SparseEmbedding("f", "cats", 2),
            *extra,
            DenseLayer("flat", "Reshape", bottom="e", shape=[-1]),
            DenseLayer("logit", "InnerProduct", bottom="flat", num_output=1),
            loss(),
        ]
        return GraphModule(plan_graph(nodes, SCHEMA, seed=seed), SGD(), seed=seed).state_dict()

    first, second, other = weights(1), weights(1, DenseLayer("more", "ReLU", bottom="dense")), weights(2)
    for name in ("logit.weight", "e.c.weight"):
        assert torch.equal(first[name], second[name])
        assert not torch.equal(first[name], other[name])
    assert not torch.equal(first["e.c.weight"], first["f.c.weight"])


def test_state_dict_of_one_module_loads_into_another() -> None:
    nodes = [Input(), SparseEmbedding("e", "cats", 2), DenseLayer("flat", "Reshape", bottom="e", shape=[-1])]
    nodes += [DenseLayer("logit", "MLP", bottom="flat", num_outputs=[3, 1], activations=["relu", "none"]), loss()]
    one, two = (GraphModule(plan_graph(nodes, SCHEMA, seed=s), SGD(), seed=s).eval() for s in (1, 2))
    assert not torch.equal(one(BATCH), two(BATCH))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(BATCH), two(BATCH))
