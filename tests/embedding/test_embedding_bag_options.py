"""The options of EmbeddingBag that pool vectors one by one, or change rows at a lookup, against torch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import DataError, KeyRangeError
from viviane.embedding import EmbeddingBag, RowMean

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
RATE = 0.3


class Counted(nn.Module):
    """What scale_grad_by_freq is documented to do, from nn.Embedding: nn.EmbeddingBag takes counts of other rows."""

    def __init__(self, num_embeddings, dim, *, mode, include_last_offset, **options):
        super().__init__()
        self.table = nn.Embedding(num_embeddings, dim, **options)
        self.mode, self.closed = mode, include_last_offset

    @property
    def weight(self):
        return self.table.weight

    def state_dict(self):
        return self.table.state_dict()

    def forward(self, ids, offsets, weights=None):
        bounds = offsets.tolist() if self.closed else [*offsets.tolist(), len(ids)]
        vectors, pooled = self.table(ids), []
        for start, stop in itertools.pairwise(bounds):
            kept = [i for i in range(start, stop) if int(ids[i]) != self.table.padding_idx]
            total = (vectors[kept] if weights is None else vectors[kept] * weights[kept, None]).sum(0)
            pooled.append(total / max(1, len(kept)) if self.mode == "mean" else total)
        return torch.stack(pooled)


bags = st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=6)
options = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["sum", "mean", "max"]),
        "padding_idx": st.sampled_from([None, 0, 3, -1]),
        "include_last_offset": st.booleans(),
        "max_norm": st.sampled_from([None, 0.0, 0.7, 1.5]),
        "norm_type": st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
        "scale_grad_by_freq": st.booleans(),
    }
)


@given(
    batches=st.lists(bags, min_size=2, max_size=3),
    options=options,
    learns_weights=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(deadline=None, max_examples=120)
def test_several_steps_give_the_numbers_of_torch(batches, options, learns_weights, dtype):
    counts = options["scale_grad_by_freq"] = options["scale_grad_by_freq"] and options["mode"] != "max"
    truth = (Counted if counts else nn.EmbeddingBag)(7, 3, **options)
    own = EmbeddingBag(7, 3, **options)
    own.load_state_dict(truth.state_dict())
    rule = torch.optim.SGD(truth.parameters(), RATE)
    for lists in batches:
        ids = torch.tensor([key for row in lists for key in row], dtype=dtype)
        bounds = torch.tensor([0, *(len(row) for row in lists)], dtype=dtype).cumsum(0).to(dtype)
        offsets = bounds if options["include_last_offset"] else bounds[:-1]
        weights = twins = None
        if options["mode"] == "sum" and learns_weights:
            weights, twins = (torch.linspace(-1.0, 2.0, len(ids)).requires_grad_() for _ in range(2))
        expected, found = truth(ids, offsets, weights), own(ids, offsets, twins)
        torch.testing.assert_close(found, expected, **CLOSE)
        target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
        rule.zero_grad()
        for out in (expected, found):
            (out * target).sum().backward()
        rule.step()
        own.step(RATE)
        torch.testing.assert_close(own.weight, truth.weight.detach(), **CLOSE)
        if twins is not None:
            torch.testing.assert_close(twins.grad, weights.grad, **CLOSE)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_adagrad_gives_the_numbers_of_torch(mode):
    truth = nn.EmbeddingBag(7, 3, mode=mode, max_norm=1.2)
    own = EmbeddingBag(7, 3, mode=mode, max_norm=1.2, optimizer=AdaGrad(epsilon=1e-10))
    own.load_state_dict(truth.state_dict())
    rule = torch.optim.Adagrad(truth.parameters(), 0.1)
    for ids in (torch.tensor([[1, 1, 4], [6, 0, 1]]), torch.tensor([[1, 2, 2]])):
        rule.zero_grad()
        for bag in (truth, own):
            bag(ids).square().sum().backward()
        rule.step()
        own.step(0.1)
        torch.testing.assert_close(own.weight, truth.weight.detach(), **CLOSE)


def test_of_equal_maxima_the_first_gets_the_gradient():
    rows = torch.tensor([[1.0, 2.0], [1.0, 3.0], [0.5, 3.0]])
    truth = nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="max")
    own = EmbeddingBag.from_pretrained(rows, freeze=False, mode="max")
    for bag in (truth, own):
        bag(torch.tensor([[0, 1, 2], [2, 1, 1]])).sum().backward()
    own.step(1.0)
    assert torch.equal(own.weight, rows - truth.weight.grad)


def test_max_norm_changes_only_looked_up_rows_and_does_so_in_eval_mode():
    own = EmbeddingBag.from_pretrained(torch.full((4, 4), 2.0), max_norm=1.0, mode="sum").eval()
    own(torch.tensor([[1, 1]]))
    assert own.weight.norm(dim=1).tolist() == pytest.approx([4.0, 1.0, 4.0, 4.0])
    before = own.weight.clone()
    with pytest.raises(KeyRangeError):
        own(torch.tensor([[1, 4]]))
    with pytest.raises(DataError, match="whole numbers"):
        own(torch.tensor([[0.0, 2.0]]))
    assert torch.equal(own.weight, before)


def test_max_norm_and_the_running_mean_of_rows():
    """Rows rest for some steps; the mean of those steps is that of the rows before a lookup scales them."""
    own = EmbeddingBag.from_pretrained(torch.full((3, 2), 4.0), freeze=False, max_norm=1.0, mode="sum")
    (storage,) = own.collection.fixed_storages()
    storage.row_mean = mean = RowMean(own.weight)
    truth = own.weight.double().clone()
    for step, decay in enumerate((0.9, 0.5, 0.8, 0.7, 0.6)):
        if step in (2, 3):
            own(torch.tensor([[step - 1, step - 1]])).sum().backward()
        mean.advance(decay)
        if step in (2, 3):
            own.step(0.25)
        truth = decay * truth + (1 - decay) * own.weight.double()
    torch.testing.assert_close(mean.catch_up(own.weight).mean.double(), truth, rtol=1e-6, atol=1e-6)
    assert float(truth[0, 0]) == 4.0


def test_weights_of_a_frozen_table_learn():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    weights, twins = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    ids = torch.tensor([[1, 4], [4, 4]])
    nn.EmbeddingBag.from_pretrained(rows, mode="sum", padding_idx=1)(ids, None, weights).square().sum().backward()
    own = EmbeddingBag.from_pretrained(rows, mode="sum", padding_idx=1)
    own(ids, None, twins).square().sum().backward()
    torch.testing.assert_close(twins.grad, weights.grad, **CLOSE)
    assert twins.grad[0, 0] == 0
    with torch.no_grad():
        assert not own(ids, None, twins).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "mean", "scale_grad_by_freq": True, "max_norm": 1.0}])
def test_rows_of_16_bits(dtype, options):
    own, ids = EmbeddingBag(5, 2, dtype=dtype, **options), torch.tensor([[1, 2], [2, 2]])
    wide = EmbeddingBag(5, 2, _weight=own.weight.float(), **options)
    out = own(ids)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wide(ids), rtol=1e-2, atol=1e-2)
    out.float().sum().backward()
    own.step(0.1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_no_bags_and_no_ids(mode):
    nothing = torch.zeros(0, dtype=torch.int64)
    own = EmbeddingBag(3, 2, mode=mode, max_norm=1.0, scale_grad_by_freq=mode != "max")
    assert own(nothing, nothing).shape == (0, 2)
    assert own(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 2)
    out = own(nothing, torch.tensor([0, 0]))
    assert out.tolist() == [[0.0, 0.0]] * 2
    out.sum().backward()
    own.step(0.1)


@pytest.mark.parametrize("offsets", [[0, 2**62], [0, -1], [0, 3, 2], [1, 2]])
def test_wrong_offsets_are_refused(offsets):
    with pytest.raises(DataError, match="offsets"):
        EmbeddingBag(9, 2, mode="max")(torch.arange(3), torch.tensor(offsets))


@pytest.mark.parametrize(
    "options", [{"mode": "max"}, {"mode": "sum", "max_norm": 1.0}, {"mode": "mean", "scale_grad_by_freq": True}]
)
def test_compiled_in_one_graph(options):
    bag, eager = (EmbeddingBag(50, 3, optimizer=SGD(), **options) for _ in range(2))
    fast = torch.compile(bag, backend="aot_eager", fullgraph=True)
    ids, offsets = torch.tensor([1, 2, 2, 49]), torch.tensor([0, 3])
    for call in (fast, eager):
        call(ids, offsets).square().sum().backward()
    bag.step(0.1)
    eager.step(0.1)
    torch.testing.assert_close(bag.weight, eager.weight)


def test_a_row_that_is_never_the_greatest_keeps_its_value_without_momentum():
    own = EmbeddingBag.from_pretrained(torch.tensor([[1.0], [2.0]]), freeze=False, mode="max", optimizer=Adam())
    own(torch.tensor([[0, 1]])).sum().backward()
    own.step(0.1)
    assert own.weight[0].item() == 1.0
    assert own.weight[1].item() < 2.0
