"""torch.compile on a GPU: the bits of the collection without it, errors that wait for check(), no silent CUDA graph."""

import copy

import pytest
import torch

from viviane.batch import Bag
from viviane.config import Adam
from viviane.core.errors import KeyRangeError, VivianeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build():
    tables = [TableConfig(name="x", num_rows=50, dim=8, padding_id=0), TableConfig(name="y", num_rows=20, dim=8)]
    features = [
        FeatureConfig(name="a", table="x"),
        FeatureConfig(name="b", table="y"),
        FeatureConfig(name="c", table="x", combiner="mean"),
        FeatureConfig(name="d", table="y", combiner="concat", max_length=3),
    ]
    return EmbeddingCollection(tables, features, Adam(epsilon=1e-2), device="cuda")


def keys(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bag = Bag(torch.randint(20, (int(lengths.sum()),), generator=generator), offsets).to("cuda")
    a, b = (torch.randint(20, (size,), generator=generator).cuda() for _ in range(2))
    return {"a": a, "b": b, "c": bag, "d": bag}


def train(emb, call, steps=4):
    for i, size in enumerate((64, 48, 64, 33)[:steps]):
        call(keys(size, i)).square().sum().backward()
        emb.step(0.1)


def assert_same(one, other):
    for name in one.tables:
        assert torch.equal(one.export_table(name).weight, other.export_table(name).weight)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_gives_the_bits_of_eager(backend):
    eager = build()
    other = copy.deepcopy(eager)
    train(eager, lambda batch: eager(batch).flat)
    train(other, torch.compile(lambda batch: other(batch).flat, backend=backend, fullgraph=True))
    assert_same(eager, other)


def test_a_key_out_of_range_is_raised_by_the_step_and_moves_nothing():
    emb = build()
    before = emb.export_table("x").weight
    wild = keys(16)
    wild["a"][3] = 50
    torch.compile(lambda batch: emb(batch).flat, backend="aot_eager", fullgraph=True)(wild).sum().backward()
    with pytest.raises(KeyRangeError, match=r"feature 'a', table 'x', row 3 of the batch\n  value:   50"):
        emb.step(0.1)
    assert torch.equal(emb.export_table("x").weight, before)


def test_cuda_graphs_of_torch_are_refused_or_right():
    eager = build()
    other = copy.deepcopy(eager)
    fast = torch.compile(lambda batch: other(batch).flat.square() * 2, mode="reduce-overhead", fullgraph=True)

    def repeat(emb, call):
        for _ in range(6):  # torch warms up, records, then replays
            call(keys(64)).sum().backward()
            emb.step(0.1)

    refused = ""
    try:
        repeat(other, fast)
    except VivianeError as error:
        refused = str(error)
    if refused:
        assert "captured in a CUDA graph" in refused
        return
    repeat(eager, lambda batch: eager(batch).flat.square() * 2)
    # The gradient of a square, in generated code.
    torch.testing.assert_close(other.export_table("x").weight, eager.export_table("x").weight, rtol=1e-5, atol=1e-6)
