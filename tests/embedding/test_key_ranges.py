"""Keys out of range under every policy, padding, and the messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from viviane.batch import Bag, Batch
from viviane.config import SGD
from viviane.core.errors import DataError, KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, hash_keys
from viviane.schema import Schema

FAR = [-1, 4, 2**31 - 1, -(2**31)]


def collection(combiner="sum", num_features=1, **options):
    """A table of 4 rows of one number: 1, 2, 3, 4."""
    length = 3 if combiner == "concat" else None
    features = [
        FeatureConfig(name=f"f{i}", table="x", combiner=combiner, max_length=length) for i in range(num_features)
    ]
    result = EmbeddingCollection([TableConfig(name="x", num_rows=4, dim=1, init="zero", **options)], features, SGD())
    rows = result.export_table("x")
    rows.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    result.import_table("x", rows)
    return result


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("key", FAR)
def test_raise_names_everything(key, dtype):
    schema = Schema(categorical=[{"name": n, "num_ids": 4} for n in ("f0", "f1")])
    batch = Batch.from_columns(schema, {"f0": [0, 3, 1], "f1": [0, 1, key]}, origin="part-00001.parquet")
    with pytest.raises(KeyRangeError) as caught:
        collection(num_features=2)(batch)
    assert str(caught.value) == (
        "key out of range\n"
        "  where:   feature 'f1', table 'x', row 2 of the batch, part-00001.parquet\n"
        f"  value:   {key}\n"
        "  allowed: 0 <= key < 4\n"
        "  do:      raise the table's num_rows, or set its out_of_range to 'default', 'hash' or 'ignore'"
    )


def test_raise_in_a_bag_names_the_row_of_the_batch():
    bag = Bag.from_lists([[0, 1], [], [2], [3, 9]])
    with pytest.raises(KeyRangeError, match=r"feature 'f0', table 'x', row 3 of the batch\n  value:   9"):
        collection()({"f0": bag})


def test_a_neighbouring_table_is_no_excuse():
    tables = [TableConfig(name=name, num_rows=4, dim=2) for name in ("x", "y")]
    both = EmbeddingCollection(tables, [FeatureConfig(name="f", table="x")], SGD())
    with pytest.raises(KeyRangeError, match="value:   4"):
        both({"f": torch.tensor([4])})


def test_first_and_last_key():
    assert collection()({"f0": torch.tensor([0, 3])}).flat.flatten().tolist() == [1.0, 4.0]


@pytest.mark.parametrize("key", [*FAR, 2**62])
@pytest.mark.parametrize(
    ("policy", "combiner", "expected"),
    [
        ("default", "sum", [2.0]),
        ("default", "mean", [1.0]),  # counted: (2 + 0) / 2
        ("default", "concat", [2.0, 0.0, 0.0]),
        ("ignore", "sum", [2.0]),
        ("ignore", "mean", [2.0]),  # not counted
        ("ignore", "concat", [2.0, 0.0, 0.0]),
    ],
)
def test_default_and_ignore(key, policy, combiner, expected):
    emb = collection(combiner, out_of_range=policy)
    out = emb({"f0": Bag.from_lists([[1, key]])})
    assert out.flat.tolist() == [expected]
    if combiner == "concat":
        assert out.mask("f0").tolist() == [[True, policy == "default", False]]
    out.flat.sum().backward()
    emb.step(1.0)
    moved = 0.5 if (policy, combiner) == ("default", "mean") else 1.0
    assert emb.export_table("x").weight.flatten().tolist() == [1.0, 2.0 - moved, 3.0, 4.0]
    assert emb({"f0": torch.tensor([key])})["f0"].flatten()[0] == 0.0


def test_default_id_reads_and_trains_that_row():
    emb = collection("mean", out_of_range="default", default_id=2)
    out = emb({"f0": Bag.from_lists([[1, 77]])})
    assert out.flat.tolist() == [[2.5]]
    out.flat.sum().backward()
    emb.step(1.0)
    assert emb.export_table("x").weight.flatten().tolist() == [1.0, 1.5, 2.5, 4.0]
    assert emb({"f0": torch.tensor([-5])}).flat.item() == 2.5


@pytest.mark.parametrize("padding_id", [None, 0, 2])
@given(st.integers(-(2**63), 2**63 - 1))
def test_hash_is_the_documented_mix(padding_id, key):
    table = TableConfig(name="x", num_rows=5, dim=1, padding_id=padding_id, out_of_range="hash")
    mask = 2**64 - 1
    x = key & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x = (x ^ (x >> 31)) >> 1
    expected = x % 5 if padding_id is None else [r for r in range(5) if r != padding_id][x % 4]
    assert hash_keys(torch.tensor([key]), table).item() == expected


def test_hash_trains_the_row_it_reads_and_leaves_keys_in_range_alone():
    emb = collection(out_of_range="hash")
    row = int(hash_keys(torch.tensor([-7]), emb.tables["x"]))
    out = emb({"f0": torch.tensor([-7, 3])})
    assert out.flat.flatten().tolist() == [row + 1.0, 4.0]
    out.flat.backward(torch.tensor([[1.0], [0.0]]))
    emb.step(0.5)
    assert emb.export_table("x").weight[row].item() == row + 0.5


def test_hash_spreads_evenly():
    table = TableConfig(name="x", num_rows=10, dim=1, out_of_range="hash")
    counts = torch.bincount(hash_keys(torch.arange(10**6, 10**6 + 100_000), table), minlength=10)
    # 10,000 expected in each, standard deviation 95: six of them.
    assert (counts - 10_000).abs().max() < 570


@pytest.mark.parametrize("form", ["one_hot", "bag"])
def test_mixed_policies_in_one_batch(form):
    policies = ["raise", "default", "hash", "ignore"]
    tables = [TableConfig(name=p, num_rows=3, dim=2, out_of_range=p) for p in policies]
    emb = EmbeddingCollection(tables, [FeatureConfig(name=p, table=p) for p in policies], SGD())
    ids = {p: torch.tensor([0, 2 if p == "raise" else 100]) for p in policies}
    out = emb(ids if form == "one_hot" else {p: Bag(k, torch.arange(3)) for p, k in ids.items()})
    hashed = int(hash_keys(torch.tensor([100]), tables[2]))
    assert torch.equal(out["raise"], emb.export_table("raise").weight[[0, 2]])
    assert out["default"][1].tolist() == out["ignore"][1].tolist() == [0.0, 0.0]
    assert torch.equal(out["hash"][1], emb.export_table("hash").weight[hashed])


def test_padding_is_zero_never_counts_and_never_moves():
    tables = [TableConfig(name="x", num_rows=4, dim=1, init={"type": "constant", "value": 1.0}, padding_id=0)]
    features = [
        FeatureConfig(name="one", table="x"),
        FeatureConfig(name="mean", table="x", combiner="mean"),
        FeatureConfig(name="seq", table="x", combiner="concat", max_length=3),
    ]
    emb = EmbeddingCollection(tables, features, SGD(weight_decay=0.1))
    bag = Bag.from_lists([[0, 2, 0], [0, 0]])
    out = emb({"one": torch.tensor([0, 1]), "mean": bag, "seq": bag})
    assert out.flat.tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    assert out.mask("seq").tolist() == [[False, True, False], [False, False, False]]
    out.flat.sum().backward()
    assert emb.grad_norm_squared() == 1 + 4  # row 1 once, row 2 twice
    emb.step(0.5)
    assert emb.export_table("x").weight.flatten().tolist() == pytest.approx([0.0, 0.45, -0.05, 1.0])


def test_a_bag_longer_than_max_length():
    bag = Bag.from_lists([[1], [1, 2, 3, 1]])
    with pytest.raises(DataError, match=r"feature 'f0', row 1 of the batch\n  value:   4\n  allowed: at most 3 ids"):
        collection("concat")({"f0": bag})


def test_missing_features_and_uneven_sizes():
    emb = collection(num_features=2)
    with pytest.raises(DataError, match=r"the batch lacks a feature\n  value:   'f1'"):
        emb({"f0": torch.tensor([1])})
    with pytest.raises(DataError, match=r"differ in their number of rows\n  value:   .'f0': 1, 'f1': 2"):
        emb({"f0": torch.tensor([1]), "f1": torch.tensor([1, 1])})
    with pytest.raises(DataError, match=r"keys must be a Bag[\s\S]*feature 'f0'[\s\S]*\(1, 1, 1\)"):
        emb({"f0": torch.ones(1, 1, 1, dtype=torch.int64), "f1": torch.tensor([1])})
    with pytest.raises(DataError, match=r"keys must be whole numbers[\s\S]*feature 'f0'[\s\S]*torch.float32"):
        emb({"f0": torch.ones(1), "f1": torch.tensor([1])})
