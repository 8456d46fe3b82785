"""Wrong offsets and weights are found on a GPU as by the reference, and kernels stay inside their memory."""

from itertools import pairwise

import pytest
import torch

from viviane.ops.bag_checks import gpu, place_of, reference
from viviane.ops.embedding_bag import gpu as lookup

FAR = 2**40
RIGHT = [0, 2, 2, 5]
CASES = [
    [RIGHT],
    [RIGHT, [0, 2, 7, 5]],
    [RIGHT, RIGHT, [0, 3, 2, 5]],
    [[0, -1, 2, 5]],
    [[1, 2, 3, 5], [0, 9, 9, 9]],
    [[0, 1, 2, 4]],
    [[0, FAR, FAR, FAR]],
    [[-(2**63), 0, 2**63 - 1, 5]],
]


@pytest.mark.parametrize("offsets", CASES)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_equals_the_reference(device, offsets, bad):
    ends = [torch.tensor(own, device=device) for own in offsets]
    weights = [torch.linspace(-3.4e38, 3.4e38, 5, device=device) if f % 2 == 0 else None for f in range(len(ends))]
    if bad is not None:
        weights[0][3] = bad
    counts = [5] * len(ends)
    found, truth = gpu.check_bags(ends, counts, weights), reference.check_bags(ends, counts, weights)
    assert place_of(found) == (None if truth is None else place_of(truth))


def test_more_bags_than_a_launch_takes(device):
    ends = [torch.tensor(own, device=device) for own in [RIGHT] * 64 + [[0, 2, 1, 5]]]
    found = gpu.check_bags(ends, [5] * 65, [None] * 65)
    assert place_of(found) == 64 * 4 + 2


def test_many_offsets_and_a_kept_record(device):
    size = 5001
    ends, weights = torch.arange(size, device=device), torch.ones(size - 1, device=device)
    kept = torch.zeros(3, dtype=torch.int64, device=device)
    assert place_of(gpu.check_bags([ends, ends], [size - 1] * 2, [None, weights], kept)) is None
    weights[4321] = float("nan")
    assert place_of(gpu.check_bags([ends, ends], [size - 1] * 2, [None, weights], kept)) == 2 * size + size - 1 + 4321
    wrong = ends.clone()
    wrong[4000] = 3998
    assert place_of(gpu.check_bags([ends, wrong], [size - 1] * 2, [None, weights], kept)) == size + 4000
    assert place_of(gpu.check_bags([ends, ends], [size - 1] * 2, [None, None], kept)) == size + 4000


@pytest.mark.parametrize("offsets", [[0, FAR, -FAR, 3], [-5, 9, 2, 1], [-(2**63), 2**63 - 1, 0, 3]])
def test_pooling_stays_inside_the_entries(device, offsets):
    ends = torch.tensor(offsets, device=device)
    table, rows = torch.ones(4, 8, device=device), torch.tensor([0, 1, 2], device=device)
    out, sources = torch.empty(3, 8, device=device), torch.full((3,), -1, dtype=torch.int32, device=device)
    lookup.pool_rows(table, rows, ends, out, (0,), None)
    lookup.entry_sources(ends, (0,), 3, 8, sources)
    inside = [max(0, min(stop, 3) - max(start, 0)) for start, stop in pairwise(offsets)]
    assert out[:, 0].tolist() == [float(count) for count in inside]
    assert set(sources.tolist()) <= {-1, 0, 8, 16}
