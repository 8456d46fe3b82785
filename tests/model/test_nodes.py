"""Nodes: the same from Python and JSON; every mistake is named."""

import json

import pytest

from viviane.config import AdaGrad
from viviane.config.base import validate
from viviane.core.errors import ConfigError
from viviane.model import DenseLayer, Input, Node, SparseEmbedding

NODES = [
    Input(),
    Input(label={"y": "click"}, dense={"age": "age", "rest": ["a", "b"]}, sparse={"cats": ["c"]}),
    SparseEmbedding("emb", "cats", 16),
    SparseEmbedding(
        "emb", bottom="cats", dim=4, combiner="mean", init={"type": "normal", "std": 0.1}, out_of_range="hash",
        optimizer=AdaGrad(lr=0.1), tables={"item": {"init": "zero", "trainable": False}},
    ),
    DenseLayer("deep", "MLP", bottom="x", num_outputs=[64, 1], dropout=0.5),
    DenseLayer("cut", "Slice", bottom="x", top=["a", "b"], ranges=[[0, 2], [2, 4]]),
    DenseLayer("sum", "Add", bottom=["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize("node", NODES, ids=str)
def test_json_gives_the_same_node(node: Node) -> None:
    again = validate(Node, json.loads(json.dumps(node.to_dict())))
    assert again == node
    assert type(again) is type(node)


def test_the_top_is_by_default_the_name() -> None:
    assert DenseLayer("deep", "ReLU", bottom="x").top == ("deep",)
    data = {"node": "DenseLayer", "name": "deep", "type": "ReLU", "bottom": "x"}
    assert validate(Node, data).top == ("deep",)
    assert validate(Node, {**data, "top": []}).top == ("deep",)


MISTAKES = [
    (lambda: DenseLayer("a", "MPL", bottom="x"), "unknown layer.*layer 'a'.*did you mean 'MLP'"),
    (lambda: DenseLayer("a", "MLP", bottom="x", num_outputs=[4], dropot=0.1), "layer 'a', dropot.*'dropout'"),
    (lambda: DenseLayer("a", "MLP", bottom="x"), "required key is missing.*layer 'a', num_outputs"),
    (lambda: DenseLayer("a", "Concat", bottom="x", params={"axis": 1}, axis=2), "given twice.*axis"),
    (lambda: DenseLayer("a", "ReLU"), "bottom"),
    (lambda: DenseLayer("a.b", "ReLU", bottom="x"), "name.*'a.b'"),
    (lambda: SparseEmbedding("e", "x", 0), "dim"),
    (lambda: SparseEmbedding("e", "x", 3, combinr="sum"), "did you mean 'combiner'"),
    (lambda: SparseEmbedding("e", "x", 3, tables={"c": {"initt": "zero"}}), r"tables\.c\.initt.*did you mean 'init'"),
    (lambda: Input(labels="y"), "did you mean 'label'"),
    (lambda: validate(Node, {"node": "Dense"}), "DenseLayer"),
    (lambda: validate(Node, {"node": "DenseLayer", "name": "a", "type": "ReLU", "botom": "x"}), "bottom"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()
