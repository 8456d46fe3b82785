"""Small batches take a shorter way: rows, state and errors are those of the collection's own steps, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.external import ExternalLookups, KeyColumns
from viviane.embedding.small_steps import SmallStep

NUM_ROWS = 13
RULES = [SGD(), SGD(momentum=0.9), AdaGrad(row_wise=True), Adam(weight_decay=0.1), Adam(lr=0.5), Adam(update="global")]
FEATURES = {"a": "t", "b": "u", "c": "t"}


def collection(rule=RULES[0], own=None, dtype="float32", policy="raise", padding=None, dim=4):
    tables = [
        TableConfig(name="t", num_rows=NUM_ROWS, dim=dim, dtype=dtype, out_of_range=policy, padding_id=padding),
        TableConfig(name="u", num_rows=NUM_ROWS, dim=dim, dtype=dtype, out_of_range=policy, optimizer=own),
    ]
    return EmbeddingCollection(tables, [FeatureConfig(name=f, table=t) for f, t in FEATURES.items()], rule, seed=3)


def content(own):
    found = {}
    for name in own.tables:
        state = own.export_table(name)
        found |= {f"{name}.weight": state.weight, **{f"{name}.{part}": one for part, one in state.state.items()}}
        found[f"{name}.step"] = torch.tensor(state.step)
    return found


def assert_same(one, other):
    for name, tensor in content(one).items():
        assert torch.equal(tensor, content(other)[name]), name


def batches(seed, count, sizes, dtype, low=0, high=NUM_ROWS):
    rng = torch.Generator().manual_seed(seed)
    for n in range(count):
        size = sizes[n % len(sizes)]
        keys = torch.randint(low, high, (size, len(FEATURES)), generator=rng, dtype=dtype)
        yield keys, torch.randn(size, 12, generator=rng)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(RULES), st.sampled_from([None, *RULES[:4]]), st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["hash", "default", "ignore"]), st.sampled_from([None, 2]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 99),
)  # fmt: skip
def test_steps_are_those_of_the_collection(rule, own, dtype, policy, padding, sizes, key_type, seed):
    one, other = (collection(rule, own, dtype, policy, padding) for _ in range(2))
    columns = KeyColumns(dict.fromkeys(FEATURES))
    lookups = ExternalLookups(one, columns=columns)
    for keys, gradient in batches(seed, 5, sizes, key_type, low=-3, high=NUM_ROWS + 3):
        number, found = lookups.begin(columns.batch(keys))
        wanted, take = other.look_up_apart(columns.batch(keys))
        assert torch.equal(found, wanted)
        lookups.end(number, gradient, lr=0.3, scale=0.5)
        take(gradient)
        other.step(0.3, 0.5)
    assert_same(one, other)
    assert lookups.num_updates == 5


def test_what_takes_the_shorter_way():
    columns = KeyColumns(dict.fromkeys(FEATURES))
    batch = columns.batch(torch.zeros(4, 3, dtype=torch.int32))
    assert SmallStep.of(collection(), batch) is not None
    assert SmallStep.of(collection(Adam(update="global")), batch) is None  # it moves every row
    assert SmallStep.of(collection(dim=64), batch) is None  # it sums and moves in one pass
    assert SmallStep.of(collection(), columns.batch(torch.zeros(10_000, 3, dtype=torch.int32))) is None
    assert SmallStep.of(collection(), columns.batch(torch.zeros(0, 3, dtype=torch.int32))) is None


@pytest.mark.parametrize("between", ["frozen", "followed", "second", "copied"])
def test_what_comes_up_between_lookup_and_step_is_looked_after(between):
    one, other = collection(), collection()
    columns = KeyColumns(dict.fromkeys(FEATURES))
    lookups = ExternalLookups(one, columns=columns)
    for n, (keys, gradient) in enumerate(batches(1, 4, [5], torch.int32)):
        number, _ = lookups.begin(columns.batch(keys))
        _, take = other.look_up_apart(columns.batch(keys))
        if n == 1 and between == "frozen":
            one.freeze("u")
            other.freeze("u")
        if n == 1 and between == "followed":
            one.fixed_storages()[0].follow_changes()
        if between == "copied":
            gradient = gradient.t().contiguous().t()  # noqa: PLW2901 - the rows of a column beside one another in memory
        if between == "second":
            second, _ = lookups.begin(columns.batch(keys.flip(0)))
            _, take_second = other.look_up_apart(columns.batch(keys.flip(0)))
            lookups.end(second, 2 * gradient, lr=0.3)
            take_second(2 * gradient)
        lookups.end(number, gradient, lr=0.3)
        take(gradient)
        other.step(0.3)
    assert_same(one, other)
    if between == "followed":
        assert len(one.fixed_storages()[0].changed_rows("t"))


def test_a_key_out_of_range_is_named_and_nothing_waits():
    own = collection()
    columns = KeyColumns(dict.fromkeys(FEATURES))
    lookups = ExternalLookups(own, columns=columns)
    before = content(own)
    with pytest.raises(KeyRangeError, match="feature 'b', table 'u', row 1 of the batch"):
        lookups.begin(columns.batch(torch.tensor([[0, 0, 0], [0, NUM_ROWS, 0]])))
    assert lookups.num_waiting == 0
    assert all(torch.equal(before[name], one) for name, one in content(own).items())
