"""EmbeddingBag against torch.nn.EmbeddingBag: the same numbers for every form of call, before and after an update."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import CheckpointError, ConfigError, DataError, KeyRangeError
from viviane.embedding import DynamicTableConfig, EmbeddingBag, EmbeddingCollection, FeatureConfig, TableConfig

# float32 sums of at most 5 numbers near 1, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def pair(num_embeddings, dim, **options):
    truth = nn.EmbeddingBag(num_embeddings, dim, **options)
    own = EmbeddingBag(num_embeddings, dim, **options)
    own.load_state_dict(truth.state_dict())
    assert torch.equal(own.weight, truth.weight)
    return truth, own


def assert_trains_alike(truth, own, *call):
    expected, found = truth(*call), own(*call)
    torch.testing.assert_close(found, expected, **CLOSE)
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * target).sum().backward()
    (found * target).sum().backward()
    own.step(0.5)
    torch.testing.assert_close(own.weight, truth.weight.detach() - 0.5 * truth.weight.grad, **CLOSE)


@given(
    lists=st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=6),
    mode=st.sampled_from(["sum", "mean"]),
    padding_idx=st.sampled_from([None, 0, 3, -1]),
    include_last_offset=st.booleans(),
    weighted=st.booleans(),
    dim=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(deadline=None, max_examples=80)
def test_ids_and_offsets(lists, mode, padding_idx, include_last_offset, weighted, dim, dtype):
    truth, own = pair(7, dim, mode=mode, padding_idx=padding_idx, include_last_offset=include_last_offset)
    ids = torch.tensor([key for row in lists for key in row], dtype=dtype)
    bounds = torch.tensor([0, *(len(row) for row in lists)], dtype=dtype).cumsum(0).to(dtype)
    weights = torch.linspace(0.5, 2.0, len(ids)) if weighted and mode == "sum" else None
    assert_trains_alike(truth, own, ids, bounds if include_last_offset else bounds[:-1], weights)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (3, 5)])
def test_matrix_of_ids(mode, padding_idx, shape):
    ids = torch.randint(7, shape, generator=torch.Generator().manual_seed(1))
    assert_trains_alike(*pair(7, 3, mode=mode, padding_idx=padding_idx), ids)
    if mode == "sum":
        assert_trains_alike(*pair(7, 3, mode=mode, padding_idx=padding_idx), ids, None, torch.rand(shape))


def test_the_defaults_are_those_of_torch():
    truth, own = pair(7, 3)
    assert (own.mode, own.padding_idx, own.include_last_offset) == (truth.mode, None, False)
    assert_trains_alike(truth, own, torch.tensor([1, 2, 2, 6]), torch.tensor([0, 3]))
    drawn = EmbeddingBag(1000, 100).weight
    # A hundred thousand draws from N(0, 1): five standard errors of mean and deviation.
    assert abs(float(drawn.mean())) < 5 / 100_000**0.5
    assert abs(float(drawn.std()) - 1) < 5 / 200_000**0.5


def test_no_bags():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert EmbeddingBag(3, 2)(nothing, nothing).shape == (0, 2)
    assert EmbeddingBag(3, 2)(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 2)


def test_from_pretrained_is_frozen_unless_told():
    rows = torch.arange(6.0).view(3, 2)
    for freeze in (True, False):
        bag = EmbeddingBag.from_pretrained(rows, freeze, mode="sum")
        out = bag(torch.tensor([[0, 2]]))
        assert out.tolist() == [[4.0, 6.0]]
        assert out.requires_grad == (not freeze)
    assert bag.weight.data_ptr() != rows.data_ptr()


def test_state_dicts_load_strictly_into_torch_and_back():
    own, truth = EmbeddingBag(5, 2, mode="sum", padding_idx=1, optimizer=Adam()), nn.EmbeddingBag(5, 2, mode="sum")
    own(torch.tensor([[1, 2]])).sum().backward()
    own.step(0.1)
    truth.load_state_dict(own.state_dict(), strict=True)
    assert torch.equal(truth.weight, own.weight)
    other = nn.Sequential(EmbeddingBag(5, 2, seed=1))
    other.load_state_dict(nn.Sequential(truth).state_dict(), strict=True)
    assert torch.equal(other[0].weight, truth.weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        other.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.other"):
        other.load_state_dict({**other.state_dict(), "0.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="shape"):
        other.load_state_dict({"0.weight": torch.zeros(4, 2)})


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_training_goes_on_from_both_state_dicts_in_either_order(optimizer_first):
    one, other = (EmbeddingBag(5, 2, mode="sum", optimizer=Adam(), seed=seed) for seed in range(2))
    one(torch.tensor([[1, 2]])).sum().backward()
    one.step(0.1)
    state, optimizer_state = copy.deepcopy(one.state_dict()), copy.deepcopy(one.optimizer_state_dict())
    assert sorted(optimizer_state) == ["m", "step", "v"]
    if optimizer_first:
        other.load_optimizer_state_dict(optimizer_state)
    other.load_state_dict(state)
    if not optimizer_first:
        other.load_optimizer_state_dict(optimizer_state)
    for bag in (one, other):
        bag(torch.tensor([[2, 4]])).square().sum().backward()
        bag.step(0.1)
    assert torch.equal(one.weight, other.weight)
    assert all(
        torch.equal(value, other.optimizer_state_dict()[name]) for name, value in one.optimizer_state_dict().items()
    )


def test_an_optimizer_state_that_does_not_fit_changes_nothing():
    bag = EmbeddingBag(5, 2, optimizer=AdaGrad(initial_accumulator=0.25))
    before = copy.deepcopy(bag.optimizer_state_dict())
    state = {"accumulator": torch.ones(5, 2), "step": torch.tensor(3)}
    for wrong in (
        {"step": state["step"]},
        {**state, "m": torch.ones(5, 2)},
        {**state, "accumulator": torch.ones(4, 2)},
    ):
        with pytest.raises(CheckpointError, match="bag"):
            bag.load_optimizer_state_dict(wrong)
    assert all(torch.equal(value, before[name]) for name, value in bag.optimizer_state_dict().items())
    bag.load_optimizer_state_dict(state)
    assert bag.collection.export_table("bag").step == 3


def test_a_state_dict_of_version_0_1_0_has_the_optimizer_state_too():
    one, other = (EmbeddingBag(5, 2, optimizer=AdaGrad(), seed=seed) for seed in range(2))
    one(torch.tensor([[1, 2]])).sum().backward()
    one.step(0.1)
    old = {**one.state_dict(), **one.optimizer_state_dict()}
    other.load_state_dict(old)
    assert other.optimizer_state_dict()["step"] == 1
    assert torch.equal(other.optimizer_state_dict()["accumulator"], one.optimizer_state_dict()["accumulator"])
    with pytest.raises(RuntimeError, match=r"Missing key.*accumulator"):
        other.load_state_dict({name: value for name, value in old.items() if name != "accumulator"})


def test_copies_and_pickles():
    own = EmbeddingBag(5, 2, mode="sum", optimizer=SGD())
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        twin(torch.tensor([[1]])).sum().backward()
        twin.step(1.0)
        assert (own.weight - twin.weight).tolist()[1] == pytest.approx([1.0, 1.0])
        assert twin.state_dict().keys() == own.state_dict().keys()


def test_what_is_not_supported_is_refused():
    for options, words in (
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": float("nan")}, "max_norm"),
        ({"max_norm": "1"}, "max_norm"),
        ({"max_norm": True}, "max_norm"),
        ({"max_norm": 1.0, "norm_type": None}, "norm_type"),
        ({"scale_grad_by_freq": 2}, "scale_grad_by_freq"),
        ({"include_last_offset": "no"}, "include_last_offset"),
        ({"sparse": None}, "sparse"),
        ({"padding_idx": "0"}, "padding_idx"),
        ({"padding_idx": 1.0}, "padding_idx"),
        ({"_weight": [[1.0]]}, "_weight"),
        ({"max_norm": 1.0, "norm_type": 0.0}, "norm_type"),
        ({"mode": "max", "scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"mode": "median"}, "no such mode"),
        ({"padding_idx": 9}, "padding_idx"),
        ({"dtype": torch.float64}, "type of rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            EmbeddingBag(5, 2, **options)
    for sizes in (("5", 2), (5.0, 2), (True, 2), (5, 0)):
        with pytest.raises(ConfigError, match="is no size"):
            EmbeddingBag(*sizes)
    assert EmbeddingBag(np.int64(5), np.int32(2), max_norm=np.float32(1), padding_idx=np.int64(-1)).padding_idx == 4
    bag, ids = EmbeddingBag(5, 2, mode="sum"), torch.tensor([1, 2])
    with pytest.raises(DataError, match="must be finite"):
        bag(ids, torch.tensor([0]), torch.tensor([1.0, float("inf")], requires_grad=True))
    for mode in ("mean", "max"):
        with pytest.raises(ConfigError, match="mode='sum'"):
            EmbeddingBag(5, 2, mode=mode)(ids, torch.tensor([0]), torch.ones(2, requires_grad=True))
    with pytest.raises(KeyRangeError, match="value:   5"):
        bag(torch.tensor([[1, 5]]))
    for call in (
        (ids,),
        (ids.view(1, 2), torch.tensor([0])),
        (ids, torch.tensor([1])),
        (ids, torch.tensor([0, 3])),
        (ids, torch.tensor([0, 2, 1])),
        (ids, torch.tensor([0]), torch.ones(3)),
        ([1, 2], torch.tensor([0])),
        (ids, [0]),
        (ids, torch.tensor([0]), [1.0, 1.0]),
        (None,),
    ):
        with pytest.raises(DataError):
            bag(*call)
    bag(torch.tensor([[1, 2]])).sum().backward()
    before = bag.weight.clone()
    for numbers in (("0.1",), (float("nan"),), (0.1, float("inf")), (0.1, 1.0, None)):
        with pytest.raises(ConfigError, match="finite"):
            bag.step(*numbers)
    assert torch.equal(bag.weight, before)


def test_compiled_in_one_graph():
    bag, eager = EmbeddingBag(50, 3, mode="sum"), EmbeddingBag(50, 3, mode="sum")
    fast = torch.compile(bag, backend="aot_eager", fullgraph=True)
    ids, offsets = torch.tensor([1, 2, 2, 49]), torch.tensor([0, 3])
    for call in (fast, eager):
        call(ids, offsets, torch.arange(4.0)).square().sum().backward()
    bag.step(0.1)
    eager.step(0.1)
    assert torch.equal(bag.weight, eager.weight)


@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_passes_without_a_step_are_noticed_once(dynamic: bool, caplog) -> None:
    """A torch optimizer has no parameters of tables, so a loop that forgets `step` would train nothing."""
    name = f"forgotten{dynamic}"
    table = DynamicTableConfig(name=name, dim=2) if dynamic else TableConfig(name=name, num_rows=4, dim=2)
    tables = EmbeddingCollection([table], [FeatureConfig(name=name, table=name)], SGD())
    for passes, num_messages in ((255, 0), (1, 1), (300, 1)):
        for _ in range(passes):
            tables({name: torch.tensor([1, 2])}).flat.sum().backward()
        messages = [one.getMessage() for one in caplog.records if name in one.getMessage()]
        assert len(messages) == num_messages
    assert "step(lr=...)" in messages[0]
    tables.discard_gradients()
    for _ in range(300):
        tables({name: torch.tensor([1, 2])}).flat.sum().backward()
        tables.step(0.1)
    assert len([one for one in caplog.records if name in one.getMessage()]) == 1
