"""Interactions that look rows up themselves: the bits of lookups whose vectors are written to memory."""

import pytest
import torch

from viviane.batch import Batch
from viviane.config import SGD
from viviane.core.errors import KeyRangeError
from viviane.embedding import EmbeddingCollection
from viviane.model import DenseLayer, GraphModule, Input, SparseEmbedding, plan_graph
from viviane.ops.dispatch import use_implementation
from viviane.ops.dot_interaction import TableRows
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "a"}, {"name": "b"}],
    categorical=[{"name": "c", "num_ids": 50}, {"name": "d", "num_ids": 7}, {"name": "e", "num_ids": 9}],
)
EMB = SparseEmbedding("emb", "cats", 8)
BOTTOM = DenseLayer("bottom", "MLP", bottom="dense", num_outputs=[8])
PAIRS = DenseLayer("pairs", "Interaction", bottom=["bottom", "emb"])
ALONE = DenseLayer("pairs", "Interaction", bottom=["emb"], pad=False)
TOP = DenseLayer("top", "MLP", bottom="pairs", num_outputs=[16, 4])
LOGIT = DenseLayer("logit", "InnerProduct", bottom="top", num_output=1)
THIN = DenseLayer("logit", "InnerProduct", bottom="pairs", num_output=1)
LOSS = DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"])
READ_TWICE = [
    EMB, BOTTOM, PAIRS, DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]),
    DenseLayer("both", "Concat", bottom=["pairs", "flat"]),
    DenseLayer("logit", "InnerProduct", bottom="both", num_output=1), LOSS,
]  # fmt: skip
CASES = {
    "before an MLP": [EMB, BOTTOM, PAIRS, TOP, LOGIT, LOSS],
    "embeddings alone": [EMB, ALONE, TOP, LOGIT, LOSS],
    "before another layer": [EMB, BOTTOM, PAIRS, THIN, LOSS],
}


@pytest.fixture(autouse=True)
def _kernels():
    with use_implementation("gpu"):
        yield


def build(nodes, device, schema=SCHEMA) -> GraphModule:
    return GraphModule(plan_graph([Input(), *nodes], schema, seed=1), SGD(), seed=1, device=device).eval()


def batch(size: int, device, schema=SCHEMA) -> Batch:
    rng = torch.Generator().manual_seed(size)
    columns = {name: torch.randn(size, generator=rng) for name in ("a", "b")}
    ids = {one.name: torch.randint(0, one.num_ids, (size,), generator=rng) for one in schema.categorical}
    return Batch.from_columns(schema, {**columns, **ids}).to(device)


@pytest.fixture
def found(monkeypatch) -> list[bool]:
    """Whether each lookup gave rows in place of vectors."""
    seen: list[bool] = []
    own = EmbeddingCollection.lookup_rows

    def noted(self, one):
        rows = own(self, one)
        seen.append(isinstance(rows, TableRows))
        return rows

    monkeypatch.setattr(EmbeddingCollection, "lookup_rows", noted)
    return seen


def written(module: GraphModule, one: Batch, monkeypatch) -> torch.Tensor:
    """Compute with vectors in memory."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(EmbeddingCollection, "lookup_rows", lambda self, batch: None)
        return module(one)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_written_vectors(name, device, monkeypatch, found) -> None:
    module = build(CASES[name], device)
    for size in (1, 5):
        one = batch(size, device)
        with torch.no_grad():
            own = module(one)
        assert torch.equal(own, written(module, one, monkeypatch))
    assert found == [True, True]
    with torch.no_grad():
        assert module(batch(0, device)).shape == (0, 1)


def test_tensors_asked_for_by_name_are_tensors(device, found) -> None:
    module = build(CASES["before an MLP"], device)
    with torch.no_grad():
        assert module.tensor("emb", batch(3, device)).shape == (3, 3, 8)
        assert module.tensor("pairs", batch(3, device)).shape == (3, 8 + 6 + 1)
    assert found == []


def test_vectors_are_written_where_others_read_them_or_gradients_or_hooks_need_them(device, monkeypatch, found) -> None:
    with torch.no_grad():
        build(READ_TWICE, device)(batch(3, device))
    module = build(CASES["before an MLP"], device)
    module(batch(3, device)).sum().backward()
    assert found == []
    seen = []
    for part in ("emb", "pairs", "top"):
        handle = module._modules[part].register_forward_hook(lambda _, inputs, out: seen.append(out))
        with torch.no_grad():
            assert torch.equal(module(batch(3, device)), written(module, batch(3, device), monkeypatch))
        handle.remove()
    assert len(seen) == 6
    assert found == [True]  # beside the hook of the MLP alone


def test_bags_are_looked_up_as_before(device, found) -> None:
    bags = Schema(
        labels=[{"name": "y"}], dense=[{"name": "a"}, {"name": "b"}],
        categorical=[{"name": "c", "num_ids": 50}, {"name": "s", "num_ids": 9, "kind": "multi_hot"}],
    )  # fmt: skip
    module = build(CASES["before an MLP"], device, bags)
    rows = {"a": [0.5, 1.0], "b": [1.0, 2.0], "c": [1, 2], "s": [[1, 2], []]}
    with torch.no_grad():
        module(Batch.from_columns(bags, rows).to(device))
    assert found == [False]


def test_keys_out_of_range_are_named(device) -> None:
    module = build(CASES["before an MLP"], device)
    one = batch(3, device)
    one.one_hot[1, 1] = 7
    with pytest.raises(KeyRangeError, match="d"), torch.no_grad():  # noqa: PT012 - a GPU names it in the second call
        module(one)
        module._modules["emb"].check()
