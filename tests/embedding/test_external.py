"""Lookups whose gradients come from another framework."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.config import SGD, AdaGrad
from viviane.core.errors import DataError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.external import ExternalLookups, KeyColumns, LostUpdateError, root_weights


def lookups(rule: SGD | AdaGrad | None = None, columns: KeyColumns | None = None) -> ExternalLookups:
    tables = [TableConfig(name="a", num_rows=9, dim=2, init="xavier"), DynamicTableConfig(name="b", dim=3)]
    features = [FeatureConfig(name="x", table="a"), FeatureConfig(name="y", table="b", combiner="mean")]
    return ExternalLookups(EmbeddingCollection(tables, features, rule or AdaGrad()), "here", columns)


KEYS = KeyColumns({"x": None, "y": 2})


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12))
def test_the_numbers_are_those_of_torch(rows: list[tuple[int, int, int]]) -> None:
    own, plain = lookups(), lookups().collection
    batch = KEYS.batch(torch.tensor(rows))
    for step in range(3):
        gradient = torch.randn(len(rows), 5, generator=torch.Generator().manual_seed(step))
        number, flat = own.begin(batch)
        out = plain(batch).flat
        assert torch.equal(flat, out)
        own.end(number, gradient, lr=0.1)
        out.backward(gradient)
        plain.step(lr=0.1)
    assert torch.equal(own.read(batch), plain(batch).flat)
    assert own.num_updates == 3


def test_all_lookups_of_a_step_are_one_update() -> None:
    own = lookups(SGD())
    batch = KEYS.batch(torch.tensor([[1, 5, 6]]))
    before = own.read(batch)
    first, _ = own.begin(batch)
    second, _ = own.begin(batch)
    own.end(second, torch.ones(1, 5), lr=0.5)
    assert own.num_updates == 0
    own.end(first, torch.ones(1, 5), lr=0.5)
    assert own.num_updates == 1
    assert torch.allclose(own.read(batch)[:, :2], before[:, :2] - 1.0)


def test_lookup_and_gradient_may_come_from_two_threads() -> None:
    own = lookups(SGD())
    batch = KEYS.batch(torch.tensor([[1, 5, 6]]))
    found = []
    for work in (lambda: found.append(own.begin(batch)), lambda: own.end(found[0][0], torch.ones(1, 5), lr=0.5)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert own.num_updates == 1


def test_lookups_without_gradient_raise() -> None:
    own = lookups()
    batch = KEYS.batch(torch.tensor([[1, 5, 6]]))
    own.begin(batch)
    own.read(batch)  # one may have been a trial
    own.begin(batch)
    with pytest.raises(LostUpdateError, match="got no gradient"):
        own.read(batch)
    for _ in range(64):
        own.begin(batch)
    with pytest.raises(LostUpdateError, match="got no gradient"):
        own.begin(batch)
    assert own.num_waiting == 0
    with pytest.raises(LostUpdateError, match="does not wait"):
        own.end(12345, torch.ones(1, 5), lr=0.5)


def test_a_step_that_lacks_one_of_its_gradients_raises() -> None:
    batch = KEYS.batch(torch.tensor([[1, 5, 6]]))
    for later in ("begin", "read", "check"):
        own = lookups()
        own.begin(batch)
        number, _ = own.begin(batch)
        own.end(number, torch.ones(1, 5), lr=0.5)
        with pytest.raises(LostUpdateError, match="1 without and 1 with"):
            getattr(own, later)(*([] if later == "check" else [batch]))
        assert own.num_updates == 0
        number, _ = own.begin(batch)  # the next step is made
        own.read(batch)
        own.end(number, torch.ones(1, 5), lr=0.5)
        assert own.num_updates == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_an_overflow_is_left_out_under_loss_scaling(bad: float) -> None:
    own = lookups()
    batch = KEYS.batch(torch.tensor([[1, 5, 6]]))
    own.read(batch)
    number, before = own.begin(batch)
    own.end(number, torch.full((1, 5), bad), lr=0.5, scale=0.25)
    assert torch.equal(own.read(batch)[:, :2], before[:, :2])
    assert own.num_updates == 0


def test_padding_and_roots_of_key_columns() -> None:
    columns = KeyColumns({"y": 3}, {"y": 0}, ["y"])
    bag = columns.batch(torch.tensor([[4, 0, 5], [0, 0, 0]]), torch.tensor([[3.0, 9.0, 4.0], [1.0, 1.0, 1.0]])).bags[
        "y"
    ]
    assert bag.values.tolist() == [4, 5]
    assert bag.offsets.tolist() == [0, 2, 2]
    assert bag.weights is not None
    assert bag.weights.tolist() == pytest.approx([0.6, 0.8])
    assert root_weights(torch.tensor([0, 0]), None, 0).tolist() == []
    with pytest.raises(DataError, match=r"\(B, K\)"):
        columns.batch(torch.tensor([[1, 2]]))
