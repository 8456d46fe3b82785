"""Rows of stacks on a GPU: the same as by the reference, for matrices of any width, and beyond 2^31 words."""

import pytest
import torch

from viviane.ops import row_stacks
from viviane.ops.dispatch import use_implementation
from viviane.ops.row_stacks import StackForm, gpu

WIDTHS = [[1], [1, 13, 26], [3, 0, 64, 1, 2], [17, 1025]]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("source_rows", "target_rows", "first", "count"), [(1, 1, 0, 1), (70, 200, 65, 130), (300, 64, 0, 64)]
)
def test_rows_are_those_of_the_reference(device, widths, source_rows, target_rows, first, count):
    form = StackForm(widths)
    rng = torch.Generator().manual_seed(count)
    source = torch.randint(-(2**31), 2**31, (form.num_words(source_rows),), generator=rng).int().to(device)
    order = torch.randint(0, source_rows, (count,), generator=rng).int().to(device)
    found = torch.full((form.num_words(target_rows),), 7, dtype=torch.int32, device=device)
    wanted = found.clone()
    gpu.take_rows(form, found, target_rows, first, source, source_rows, order)
    with use_implementation("reference"):
        row_stacks.take_rows(form, wanted, target_rows, first, source, source_rows, order)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, torch.full_like(found, 7))


def test_a_stack_may_have_more_words_than_32_bits_count(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: it takes 9 GB")
    form, rows = StackForm([3, 512]), (1 << 22) + 70
    source = torch.zeros(form.num_words(rows), dtype=torch.int32, device=device)
    ids = form.matrix(source, 1, rows)
    ids[:, 0] = torch.arange(rows, device=device)
    order = torch.tensor([rows - 1, 0, 1 << 22, (1 << 22) - 1], dtype=torch.int32, device=device)
    target = torch.zeros(form.num_words(4), dtype=torch.int32, device=device)
    gpu.take_rows(form, target, 4, 0, source, rows, order)
    assert form.matrix(target, 1, 4)[:, 0].tolist() == order.tolist()
