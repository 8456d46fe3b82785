"""The same numbers as TorchRec's modules from the same KeyedJaggedTensor; skipped where torchrec is not installed."""

import warnings

import pytest
import torch

from viviane.config import SGD, AdaGrad
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, TableState

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import, about its own parts
    pytest.importorskip("torchrec", reason="needs torchrec, a peer to compare with", exc_type=ImportError)
    from torchrec.modules import embedding_configs, embedding_modules
    from torchrec.optim import apply_optimizer_in_backward
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

pytestmark = pytest.mark.filterwarnings("ignore")

# float32 sums of at most 7 numbers near 1, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
POOLING = {"sum": embedding_configs.PoolingType.SUM, "mean": embedding_configs.PoolingType.MEAN}


def pair(combiner, rule, is_weighted=False):
    """Two tables, three features; the collection takes over the rows of TorchRec's."""
    peer = embedding_modules.EmbeddingBagCollection(
        tables=[
            embedding_configs.EmbeddingBagConfig(
                name="x", num_embeddings=50, embedding_dim=8, feature_names=["a", "c"], pooling=POOLING[combiner]
            ),
            embedding_configs.EmbeddingBagConfig(
                name="y", num_embeddings=20, embedding_dim=4, feature_names=["b"], pooling=POOLING[combiner]
            ),
        ],
        is_weighted=is_weighted,
    )
    tables = [TableConfig(name="x", num_rows=50, dim=8), TableConfig(name="y", num_rows=20, dim=4)]
    features = [FeatureConfig(name=n, table=t, combiner=combiner) for n, t in (("a", "x"), ("c", "x"), ("b", "y"))]
    own = EmbeddingCollection(tables, features, rule)
    for name in own.tables:
        own.import_table(name, TableState(peer.state_dict()[f"embedding_bags.{name}.weight"]))
    return peer, own


def keyed(size, seed, weighted=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (4 * size,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=["c", "extra", "a", "b"],
        values=torch.randint(20, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if weighted else None,
    )


@pytest.mark.parametrize(("combiner", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_trains_as_an_embedding_bag_collection(combiner, weighted, rule):
    # The same epsilon as torch's; the accumulator begins at zero in both.
    settings = SGD() if rule == "sgd" else AdaGrad(epsilon=1e-10, initial_accumulator=0.0)
    peer, own = pair(combiner, settings, weighted)
    kind = torch.optim.SGD if rule == "sgd" else torch.optim.Adagrad
    apply_optimizer_in_backward(kind, peer.parameters(), {"lr": 0.1})
    for seed, size in enumerate((5, 1, 9)):
        keys = keyed(size, seed, weighted)
        expected, found = peer(keys), own(keys)
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        assert found.offset_per_key() == expected.offset_per_key()
        torch.testing.assert_close(found.values(), expected.values(), **CLOSE)
        for name, part in expected.to_dict().items():
            torch.testing.assert_close(found[name], part, **CLOSE)
        expected.values().square().sum().backward()
        found.values().square().sum().backward()
        own.step(0.1)
        for name in own.tables:
            weight = peer.state_dict()[f"embedding_bags.{name}.weight"]
            # AdaGrad divides by the root of sums that were rounded in another order.
            torch.testing.assert_close(own.export_table(name).weight, weight, rtol=1e-4, atol=1e-5)


def test_concat_equals_the_padded_output_of_an_embedding_collection():
    peer = embedding_modules.EmbeddingCollection(
        tables=[embedding_configs.EmbeddingConfig(name="x", num_embeddings=20, embedding_dim=8, feature_names=["a"])]
    )
    feature = FeatureConfig(name="a", table="x", combiner="concat", max_length=7)
    own = EmbeddingCollection([TableConfig(name="x", num_rows=20, dim=8)], [feature], SGD())
    own.import_table("x", TableState(peer.state_dict()["embeddings.x.weight"]))
    keys = keyed(6, 0)
    found, expected = own(keys), peer(keys)["a"]
    assert torch.equal(found["a"], expected.to_padded_dense(7))
    assert torch.equal(found.mask("a").sum(1), expected.lengths())


def test_compiled_in_one_graph():
    _, own = pair("sum", SGD())
    fast = torch.compile(lambda keys: own(keys).flat, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        assert torch.equal(fast(keyed(5, seed)), own(keyed(5, seed)).flat)
