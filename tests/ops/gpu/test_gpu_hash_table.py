"""The index on a GPU against a dict: random calls, every order, growth, duplicates, initial values by their formula."""

import pytest
import torch

from viviane.ops.dispatch import use_implementation
from viviane.ops.hash_table import distinct, initial_rows, make_index, reference, stamp_of

EDGES = (-(2**63), 2**63 - 1, 0, -1)


@pytest.fixture(autouse=True)
def _gpu():
    with use_implementation("gpu"):
        yield


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("order", ["none", "stamp", "uses", "epoch_uses"])
def test_equals_a_dict(order, custom, device):
    random = torch.Generator().manual_seed(3)
    uses = custom or order in ("uses", "epoch_uses")
    fast = make_index(70, order=order, with_uses=uses, device=device)
    truth = reference.Index(70, order, uses)
    for clock in range(1, 100 if device.type == "cuda" else 16):
        keys = torch.randint(-60, 60, (int(torch.randint(0, 40, (), generator=random)),), generator=random)
        keys = torch.cat([keys, torch.tensor(EDGES), keys[:3]])
        scores = torch.randint(-9, 9, (len(keys),), generator=random) if custom else None
        stamp = stamp_of(clock // 10, clock)
        on_device = None if scores is None else scores.to(device)
        rows, true = fast.touch(keys.to(device), stamp, on_device), truth.touch(keys, stamp, scores)
        assert torch.equal(rows.cpu(), true)
        missing = (true < 0).nonzero().squeeze(1)
        new = fast.insert(keys.to(device), rows, missing.to(device), stamp, scores=on_device)
        expected = truth.insert(keys, true, missing, stamp, scores=scores)
        assert new.complete == expected.complete
        for own, other in ((new.rows, expected.rows), (new.entries, expected.entries), (rows, true)):
            assert torch.equal(own.cpu(), other)
        if clock % 4 == 0:
            assert fast.erase(keys[::3].to(device)) == truth.erase(keys[::3])
        if clock % 7 == 0:
            own = fast.rows_in_use()
            kept = None if fast.uses is None else fast.uses[own]
            fast.restore(fast.keys[own], own, fast.stamps[own], kept, fast.free_rows())
        own, other = fast.rows_in_use(), truth.rows_in_use()
        assert torch.equal(own.cpu(), other)
        assert torch.equal(fast.keys[own].cpu(), truth.keys[other])
        assert torch.equal(fast.stamps[own].cpu(), truth.stamps[other])
        assert torch.equal(fast.free_rows().cpu(), truth.free_rows())
        assert (len(fast), fast.num_evicted) == (len(truth), truth.num_evicted)
        if uses:
            assert torch.equal(fast.uses[own].cpu(), truth.uses[other])


def test_growth_and_crowded_lines(device):
    count = 30_000 if device.type == "cuda" else 600
    index = make_index(count, device=device)
    keys = torch.arange(count, device=device) * 2**40
    for clock, part in enumerate(keys.split(count // 6), 1):
        rows = index.find(part)
        index.insert(part, rows, torch.arange(len(part), device=device), stamp_of(0, clock))
    assert index.find(keys).tolist() == list(range(count))
    assert index.erase(keys[count // 3 :]) == count - count // 3
    assert index.find(keys).tolist() == list(range(count // 3)) + [-1] * (count - count // 3)
    assert index.find(keys[-1:], count + 5).tolist() == [count + 5]


def test_keys_of_one_line(device):
    """Keys whose hash names one line: long chains that give way and close again."""
    candidates = torch.arange(60_000)
    lines = (reference_bits(candidates) & 15).to(device)
    keys = candidates.to(device)[lines == 3][:60]
    index = make_index(60, order="stamp", initial_rows=60, device=device)
    rows, _ = index.find_or_insert(keys, stamp_of(0, 1))
    assert rows.tolist() == list(range(60))
    assert index.erase(keys[::2]) == 30
    assert index.find(keys)[1::2].tolist() == list(range(1, 60, 2))
    again, _ = index.find_or_insert(keys, stamp_of(0, 2), narrow=True)
    assert again.dtype == torch.int32
    assert again.unique().numel() == 60
    assert index.find(keys).tolist() == again.tolist()


def reference_bits(keys):
    return torch.tensor([reference.mix64(key) >> 17 for key in keys.tolist()]).to(torch.int64)


def test_a_call_without_room_takes_nothing_or_a_part(device):
    for partial, expected in ((False, [0, 1, -1, -1, -1, 1]), (True, [0, 1, 2, -1, -1, 1])):
        index = make_index(3, device=device)
        index.find_or_insert(torch.tensor([10, 20], device=device), stamp_of(0, 1))
        keys = torch.tensor([10, 20, 30, 40, 50, 20], device=device)
        rows, added = index.find_or_insert(keys, stamp_of(0, 2), partial=partial)
        assert rows.tolist() == expected
        assert (added.given, added.wanted, len(index)) == (int(partial), 3, 2 + partial)
        assert index.find(keys).tolist() == expected
        allowed = torch.tensor([False, True, False], device=device)
        other = make_index(3, device=device)
        rows, added = other.find_or_insert(torch.tensor([1, 2, 1], device=device), stamp_of(0, 1), allowed=allowed)
        assert (rows.tolist(), int(added.count), added.entries[:1].tolist()) == ([-1, 0, -1], 1, [1])


def test_distinct_keys(device):
    keys = torch.tensor([5, -1, 5, 2**62, -1], device=device)
    assert [part.tolist() for part in distinct(keys)] == [[5, -1, 2**62], [0, 1, 0, 2, 1], [2, 2, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uniform", "normal", "constant"])
def test_initial_values_equal_the_formula(kind, dtype, device):
    keys = torch.tensor([*EDGES, *range(30)])
    rows = torch.arange(len(keys)).flip(0)
    own, true = torch.zeros(len(keys), 7, dtype=dtype, device=device), torch.zeros(len(keys), 7, dtype=dtype)
    initial_rows(own, rows.to(device), keys.to(device), kind, -0.3, 0.7, -5)
    reference.initial_rows(true, rows, keys, kind, -0.3, 0.7, 2**64 - 5)
    if kind == "normal":
        # A logarithm or cosine that differs in its last bit can move one rounding of the type.
        torch.testing.assert_close(own.cpu(), true, rtol=torch.finfo(dtype).eps, atol=0)
    elif dtype == torch.bfloat16 and device.type == "cpu":
        # Triton's interpreter cuts where a GPU rounds to nearest: one step.
        torch.testing.assert_close(own, true, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(own.cpu(), true)
