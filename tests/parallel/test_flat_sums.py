"""Sums of flat tensors over the ranks: the same bits over mapped memory, over exchanged parts, and as written down."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes
from test_peers import MappedMemory

from viviane.parallel import Group, flat_sums
from viviane.parallel.flat_sums import FlatSums

SIZES = [(2, torch.float32), (1000, torch.bfloat16), (64, torch.float16), (1, torch.bfloat16), (0, torch.float32)]


def sums_of(group, folder, name, *, ordered):
    """Flat sums over a mapped file, or over exchanged parts; the machine's own rule would take Gloo's all-reduce."""

    def open_mapped(num_bytes, group, device):
        return MappedMemory(Path(folder) / name, num_bytes, group), None

    flat_sums.ineligible_reason = lambda group, device: None
    flat_sums.open_peer_memory = open_mapped
    made = FlatSums(group, SIZES, torch.device("cpu"), uses_peers=not ordered)
    assert made.has_peers != ordered
    made._is_ordered = ordered
    return made


def numbers(rank, step, count, dtype):
    """Numbers of very different sizes, so that any other order or rounding of their sum shows; zeros of both signs."""
    rng = torch.Generator().manual_seed(100 * rank + step)
    drawn = torch.randn(count, generator=rng) * 10.0 ** torch.randint(-3, 4, (count,), generator=rng)
    drawn[::7] = -0.0
    return drawn.to(dtype)


def everything(folder):
    group = Group.world()
    group.open_second_group()
    mapped = sums_of(group, folder, "mapped", ordered=False)
    parts = sums_of(group, folder, "parts", ordered=True)
    assert all(not one.count_nonzero() for one in [*mapped.tensors, *parts.tensors])
    assert [(len(one), one.dtype) for one in mapped.tensors] == SIZES
    for step in range(3):
        for made, through in ((mapped, True), (parts, True), (parts, False)):
            for one in made.tensors:
                one.copy_(numbers(group.rank, step, len(one), one.dtype))
            waits = [made.start(i, through_peers=through) for i in range(len(SIZES))]
            for wait in [*waits, *waits]:  # the second time nothing is left to do
                wait()
            for tensor in made.tensors:
                given = [numbers(rank, step, len(tensor), tensor.dtype).float() for rank in range(group.size)]
                total = given[0].clone()
                for one in given[1:]:
                    total += one
                truth = total.to(tensor.dtype)
                assert torch.equal(tensor, truth), (step, through)
                assert torch.equal(tensor.signbit(), truth.signbit()), (step, through)


@pytest.mark.parametrize("size", [2, 3])
def test_every_way_gives_the_sum_in_order_of_rank(size, tmp_path):
    processes.run(size, everything, str(tmp_path))


def test_a_process_alone_sums_nothing():
    made = FlatSums(Group(), [(3, torch.float32)], torch.device("cpu"), uses_peers=True)
    [tensor] = made.tensors
    tensor.copy_(torch.tensor([1.0, 2.0, 3.0]))
    made.start(0)()
    assert tensor.tolist() == [1, 2, 3]
    assert not made.has_peers
