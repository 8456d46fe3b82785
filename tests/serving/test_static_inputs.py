"""Packed inputs of captured forward passes: every batch keeps its predictions, whatever stands in the rows after it."""

import numpy as np
import pytest
import torch
from saved_models import ZOO

from viviane.batch import Bag, Batch
from viviane.core.errors import KeyRangeError
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.serving.batches import padding_batch
from viviane.serving.graphs import ladder
from viviane.serving.id_ranges import IdRanges
from viviane.serving.static_inputs import HostInputs, InputLayout


def schema(**tags) -> Schema:
    return Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "x"}, {"name": "v", "dim": 3}],
        categorical=[
            {"name": "a", "num_ids": 20},
            {"name": "m", "num_ids": 20, "kind": "multi_hot", "weights": "w", **tags},
            {"name": "s", "num_ids": 9, "kind": "sequence", "max_length": 3, "dtype": "int64"},
        ],
    )


def test_layout_and_refill() -> None:
    layout = InputLayout(schema(max_length=2))
    assert InputLayout.prevented(schema()) is not None
    memory = torch.zeros(layout.num_bytes(8), dtype=torch.uint8)
    inputs = HostInputs(layout, memory, 8)
    rng = np.random.default_rng(0)
    for count in (8, 3, 5):
        columns = {
            "x": rng.normal(size=count), "v": rng.normal(size=(count, 3)), "a": rng.integers(0, 20, count),
            "m": [list(range(3, 3 + n)) for n in rng.integers(0, 3, count)],
            "s": [[5] * n for n in rng.integers(0, 4, count)],
        }  # fmt: skip
        columns["w"] = [[0.5] * len(one) for one in columns["m"]]
        batch = Batch.from_columns(schema(max_length=2), columns)
        inputs.fill(batch, 0, count)
        packed = layout.batch(layout.views(memory, 8), 8)
        assert torch.equal(packed.dense[:count], batch.dense)
        assert torch.equal(packed.one_hot[:count], batch.one_hot)
        for name, places in (("m", 2), ("s", 3)):
            bag = packed.bags[name]
            assert bag.offsets.tolist() == [places * i for i in range(9)]
            rows = bag.values.view(8, places)[:count].tolist()
            wanted = [list(one) + [0] * (places - len(one)) for one in columns[name]]
            assert rows == wanted
        assert packed.bags["m"].weights.view(8, 2)[:count].tolist() == [
            [0.5] * len(one) + [0.0] * (2 - len(one)) for one in columns["m"]
        ]
    inputs.fill(batch, 2, 4)
    assert torch.equal(packed.one_hot[:2], batch.one_hot[2:4])


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"m": ([3, 4, 5], [0, 3, 3])}, False),
        ({"m": ([3, 4], [0, 2, 1])}, False),
        ({"m": ([3, 4], [1, 2, 2])}, False),
        ({"m": ([3, 4], [0, 1, 1])}, False),
        ({"m": ([3, 4], [0, 1, 2], None)}, False),
        ({"m": ([3, 4], [0, 1, 2], [1.0])}, False),
        ({"s": ([5], [0, 1, 1], [1.0])}, False),
        ({"h": ([3, 3, 3], [0, 2, 3])}, False),
    ],
)
def test_bags_without_a_place_for_each_id_and_weight_are_not_packed(change, fits) -> None:
    """Missing weights would be those of the batch before; id 0 would be added to fewer ids than the hotness."""
    own = schema(max_length=2).to_dict()
    fixed = {"name": "h", "num_ids": None, "kind": "multi_hot", "hotness": 2}
    layout = InputLayout(Schema(**{**own, "categorical": [*own["categorical"], fixed]}))
    bags = {"m": ([3, 4], [0, 1, 2], [0.5, 1.0]), "s": ([5], [0, 1, 1]), "h": ([3, 3, 3, 3], [0, 2, 4])}
    if change.get("m") and len(change["m"]) == 2:
        change = {"m": (*change["m"], [1.0] * len(change["m"][0]))}
    made = {
        name: Bag(torch.tensor(ids), torch.tensor(offsets), torch.tensor(weights[0]) if any(weights) else None)
        for name, (ids, offsets, *weights) in (bags | change).items()
    }
    assert layout.has_places_for(made) is fits


@pytest.mark.parametrize("name", ["dlrm", "din", "bst", "mmoe", "wide_deep"])
def test_padded_bags_and_rows_do_not_change_predictions(name, models, raw) -> None:
    session = InferenceSession(models.path(name), device="cpu")
    batch, problems = session._encoder.encode(raw(50, seed=3), raw=True)
    assert not problems
    bags = session.schema.bags
    small = Schema(**{**session.schema.to_dict(), "categorical": [
        {**one.to_dict(), "max_length": one.max_length or 8} if one in bags else one.to_dict()
        for one in session.schema.categorical
    ]})  # fmt: skip
    layout = InputLayout(small)
    memory = torch.zeros(layout.num_bytes(64), dtype=torch.uint8)
    HostInputs(layout, memory, 64).fill(batch, 0, 50)
    packed = layout.batch(layout.views(memory, 64), 64)
    one, other = (session._instances.run(b, checked=True) for b in (batch, packed))
    np.testing.assert_allclose(other[:50], one, rtol=1e-5, atol=1e-7)


def test_matrices_of_full_bags_alone() -> None:
    columns = [
        {"name": "a", "num_ids": 20},
        {"name": "m", "num_ids": 20, "kind": "multi_hot", "hotness": 2},
        {"name": "w", "num_ids": 20, "kind": "multi_hot", "max_length": 3, "weights": "w_weight"},
    ]
    layout = InputLayout(Schema(dense=[{"name": "x"}], categorical=columns))
    values, weights = torch.arange(6, dtype=torch.int32), torch.arange(6.0)
    full = {"m": Bag(values[:4], torch.tensor([0, 2, 4])), "w": Bag(values, torch.tensor([0, 3, 6]), weights)}

    def matrices(ids=torch.int32, **changed: Bag):
        dense, one_hot = torch.tensor([[0.5], [1.5]]), torch.tensor([[3], [4]], dtype=ids)
        return layout.matrices(Batch(layout.batch_layout, torch.zeros(2, 0), dense, one_hot, {**full, **changed}))

    found = matrices()
    assert {name: one.tolist() for name, one in found.items()} == {
        "dense": [[0.5], [1.5]], "one_hot": [[3], [4]], "ids m": [[0, 1], [2, 3]], "ids w": [[0, 1, 2], [3, 4, 5]],
        "weights w": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
    }  # fmt: skip
    assert matrices(m=Bag(values[:4], torch.tensor([0, 1, 4]))) is None  # as many ids, elsewhere
    assert matrices(m=Bag(values[:5], torch.tensor([0, 2, 4]))) is None
    assert matrices(m=Bag(values[:3], torch.tensor([0, 2, 3]))) is None
    assert matrices(m=Bag(values[:4], torch.tensor([0, 2, 4]), weights[:4])) is None
    assert matrices(w=Bag(values, torch.tensor([0, 3, 6]))) is None
    assert matrices(w=Bag(values, torch.tensor([0, 3, 6]), weights[:5])) is None
    assert matrices(torch.int64) is None
    assert matrices(m=Bag(values[:4].long(), torch.tensor([0, 2, 4]))) is None


def test_ladder() -> None:
    assert ladder(65_536) == (1, 8, 32, *(2**n for n in range(6, 17)))
    assert ladder(1) == (1,)
    assert ladder(8192)[-1] == 8192


def test_id_ranges() -> None:
    own = schema()
    ranges = IdRanges(own, frozenset({"a", "m"}))
    batch = padding_batch(own, 4)
    ranges.check(batch)
    batch.one_hot[2, 0] = 20
    with pytest.raises(KeyRangeError, match="column 'a', row 2"):
        ranges.check(batch)
    batch.one_hot[2, 0] = -1
    with pytest.raises(KeyRangeError, match="-1"):
        ranges.check(batch)
    IdRanges(own, frozenset({"m"})).check(batch)
    batch = Batch.from_columns(
        own, {"x": [0, 0], "v": np.zeros((2, 3)), "a": [1, 1], "m": [[], [3, 20]], "w": [[], [1, 1]], "s": [[], []]}
    )
    with pytest.raises(KeyRangeError, match="column 'm', row 1"):
        ranges.check(batch)
    assert len(ZOO) == 12
