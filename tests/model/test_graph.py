"""Checks of a graph: shapes by hand, every mistake refused by name."""

import pytest

from viviane.core.errors import ConfigError, SchemaError, VivianeError
from viviane.model import DenseLayer, Input, SparseEmbedding, plan_graph
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "price"}, {"name": "vector", "dim": 2}],
    categorical=[
        {"name": "user", "num_ids": 30},
        {"name": "item", "num_ids": 20},
        {"name": "seen", "num_ids": 20, "kind": "sequence", "vocabulary": "item", "max_length": 4},
        {"name": "tags", "num_ids": 9, "kind": "multi_hot"},
    ],
)
TWO = Schema(labels=[{"name": "click"}, {"name": "buy"}], dense=[{"name": "x"}])
EMPTY = Schema(labels=[{"name": "click"}], categorical=[{"name": "user", "num_ids": 30}])
REAL = Schema(labels=[{"name": "price", "task": "regression"}], dense=[{"name": "x"}])

INPUT = Input(label="label", dense="dense", sparse="cats")
LOGIT = DenseLayer("logit", "InnerProduct", bottom="dense", num_output=1)
LOSS = DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"])


def test_shapes_of_every_kind_of_tensor() -> None:
    nodes = [
        Input(dense={"price": "price", "both": ["vector", "price"]}, sparse={"all": ["user", "item", "seen"]}),
        SparseEmbedding("pooled", "all", 5),
        SparseEmbedding("apart", "all", 3, combiner="concat"),
        DenseLayer("halves", "Slice", bottom="both", top=["a", "b"], ranges=[[0, 1], [1, 3]]),
        DenseLayer("logit", "InnerProduct", bottom="both", num_output=1),
        LOSS,
    ]  # fmt: skip
    plan = plan_graph(nodes, SCHEMA)
    assert plan.shapes == {
        "label": (1,), "price": (1,), "both": (3,), "pooled": (3, 5), "apart": (6, 3),
        "a": (1,), "b": (2,), "logit": (1,),
    }  # fmt: skip
    assert plan.logits == {"click": "logit"}
    assert set(plan.unused) == {"price", "pooled", "apart", "a", "b"}


def test_columns_of_one_vocabulary_share_a_table_within_a_node() -> None:
    plan = plan_graph([INPUT, SparseEmbedding("a", "cats", 2), SparseEmbedding("b", "cats", 2), LOGIT, LOSS], SCHEMA)
    for node in ("a", "b"):
        assert [table.name for table in plan.tables[node].tables] == ["user", "item", "tags"]
        assert {one.name: one.table for one in plan.tables[node].features}["seen"] == "item"


def test_options_of_tables_reach_them() -> None:
    node = SparseEmbedding(
        "emb", "cats", 2, out_of_range="default", tables={"item": {"out_of_range": "hash", "init": "zero"}}
    )
    user, item, _ = plan_graph([INPUT, node, LOGIT, LOSS], SCHEMA).tables["emb"].tables
    assert (user.out_of_range, user.default_id, user.padding_id, user.init.type) == ("default", 2, 0, "uniform")
    assert (item.out_of_range, item.default_id, item.padding_id, item.init.type) == ("hash", None, 0, "zero")


def test_losses_may_come_in_any_order_and_are_put_into_the_schema_s() -> None:
    nodes = [
        Input(label={"b": "buy", "c": "click"}),
        DenseLayer("to_buy", "InnerProduct", bottom="dense", num_output=1),
        DenseLayer("to_click", "InnerProduct", bottom="dense", num_output=1),
        DenseLayer("loss_b", "BinaryCrossEntropyLoss", bottom=["to_buy", "b"]),
        DenseLayer("loss_c", "BinaryCrossEntropyLoss", bottom=["to_click", "c"]),
    ]
    assert list(plan_graph(nodes, TWO).logits.items()) == [("click", "to_click"), ("buy", "to_buy")]


def relu(name: str, bottom: str, top: str | None = None) -> DenseLayer:
    return DenseLayer(name, "ReLU", bottom=bottom, top=top)


def bce(name: str, logit: str, label: str) -> DenseLayer:
    return DenseLayer(name, "BinaryCrossEntropyLoss", bottom=[logit, label])


MISTAKES = [
    ([], SCHEMA, "begins with an Input"),
    ([LOGIT], SCHEMA, "begins with an Input"),
    ([INPUT, INPUT], SCHEMA, "one Input"),
    ([INPUT, LOGIT], SCHEMA, "no loss"),
    ([INPUT, relu("a", "dence"), LOGIT, LOSS], SCHEMA, "layer 'a' .*'dence'.*did you mean 'dense'"),
    ([INPUT, relu("a", "b"), relu("b", "a")], SCHEMA, "no tensor of this name is defined before the layer.*layer 'a'"),
    ([INPUT, relu("a", "cats")], SCHEMA, "cannot read categorical columns.*'a'.*SparseEmbedding"),
    ([INPUT, relu("a", "dense"), relu("a", "dense")], SCHEMA, "two nodes of one name.*'a'"),
    ([INPUT, relu("a", "dense"), relu("b", "dense", "a")], SCHEMA, "two tensors of one name.*layer 'b'.*'a'"),
    ([INPUT, relu("dense", "dense")], SCHEMA, "two tensors of one name.*'dense'"),
    ([INPUT, relu("cats", "dense")], SCHEMA, "two tensors of one name.*'cats'"),
    ([INPUT, SparseEmbedding("dense", "cats", 2)], SCHEMA, "two tensors of one name.*'dense'"),
    ([INPUT, relu("a", "dense", ["p", "q"])], SCHEMA, r"as many tops.*layer 'a'.*1 name\(s\)"),
    ([Input(label="x", dense="x")], SCHEMA, "two tensors of one name.*'x'"),
    ([Input(dense={"d": ["price", "price"]})], SCHEMA, "twice in one tensor.*dense 'd'.*price"),
    ([Input(dense={"d": []})], SCHEMA, "at least one column.*dense 'd'"),
    ([Input(dense={"d": "prize"})], SCHEMA, "no such column.*'prize'.*did you mean 'price'"),
    ([Input(dense={"d": "user"})], SCHEMA, "not a dense column.*tensor 'd'.*'user'"),
    ([Input(sparse={"s": "click"})], SCHEMA, "not a categorical column.*'click'"),
    ([INPUT, SparseEmbedding("e", "dense", 2)], SCHEMA, "embedding 'e'.*'dense'.*cats"),
    ([INPUT, SparseEmbedding("e", "cats", 2, tables={"itm": {}})], SCHEMA, "table that is not there.*'itm'.*'item'"),
    ([INPUT, SparseEmbedding("e", "cats", 2, combiner="concat")], SCHEMA, "longest bag.*column 'tags'.*max_length"),
    ([INPUT, DenseLayer("c", "Concat", bottom=["dense", "label"], axis=2)], SCHEMA, r"layer 'c' .*\(B, 3\), \(B, 1\)"),
    ([INPUT, relu("a", "label"), LOGIT, LOSS], SCHEMA, "only a loss reads labels.*layer 'a' .*'label'"),
    ([INPUT, DenseLayer("c", "Concat", bottom=["dense", "label"])], SCHEMA, "only a loss reads labels.*layer 'c' "),
    ([INPUT, LOGIT, bce("l", "label", "logit")], SCHEMA, "logit, then a label.*layer 'l'"),
    ([INPUT, LOGIT, bce("l", "label", "label")], SCHEMA, "logit, then a label.*layer 'l'"),
    ([INPUT, LOGIT, bce("l", "dense", "label")], SCHEMA, r"layer 'l' .*\(B, 3\).*a logit \(B, 1\)"),
    ([INPUT, LOGIT, LOSS, bce("again", "logit", "label")], SCHEMA, "two losses of one label.*'click'"),
    ([INPUT, LOGIT, LOSS, relu("after", "loss")], SCHEMA, "layer 'after'.*'loss'"),
    ([Input(label={"c": "click"}), LOGIT, bce("l", "logit", "c")], TWO, "label has no loss.*'buy'.*select"),
    ([INPUT, LOGIT, LOSS], TWO, r"\(B, 1\), \(B, 2\).*a logit \(B, 1\) and a label"),
    ([INPUT, LOGIT, LOSS], EMPTY, "no dense columns.*layer 'logit'"),
    ([INPUT, SparseEmbedding("e", "cats", 2)], TWO, "no categorical columns.*embedding 'e'"),
    ([INPUT, LOGIT, LOSS], REAL, "needs a binary label.*'price'"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "schema", "message"), MISTAKES)
def test_mistakes_are_named(nodes, schema, message) -> None:
    with pytest.raises((ConfigError, SchemaError), match=f"(?s){message}") as caught:
        plan_graph(nodes, schema)
    assert isinstance(caught.value, VivianeError)


def test_empty_inputs_that_nothing_reads_are_not_reported_as_unused() -> None:
    nodes = [
        INPUT,
        SparseEmbedding("e", "cats", 1),
        DenseLayer("logit", "Reshape", bottom="e", leading_dim=1),
        LOSS,
    ]
    assert plan_graph(nodes, EMPTY).unused == ()
