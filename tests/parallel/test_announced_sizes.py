"""Sizes that other processes announce: what no tensor can have is refused, with the rank."""

from typing import Any

import pytest
import torch

from viviane.batch import Bag
from viviane.core.errors import ProcessError
from viviane.parallel.exchange import exchange_bags
from viviane.parallel.group import Group, check_sizes


class Beside(Group):
    """The first of two processes, to which the other sends given numbers."""

    def __init__(self, sent: list[int]) -> None:
        super().__init__()
        self.size, self.sent = 2, sent

    def all_to_all(self, given: torch.Tensor, given_splits: Any, taken_splits: Any) -> torch.Tensor:
        check_sizes(taken_splits)
        own = given[: given_splits[0]]
        return torch.cat([own, torch.tensor(self.sent, dtype=given.dtype)[: taken_splits[1]]])


@pytest.mark.parametrize("size", [-1, 1 << 41])
def test_a_size_that_cannot_be_is_refused_before_memory_is_allocated(size: int) -> None:
    with pytest.raises(ProcessError, match=r"(?s)of a size that cannot be.*rank 1"):
        check_sizes([3, size])


def test_a_bag_of_negative_length_is_refused() -> None:
    """Its offsets would fall, and kernels that pool bags would read before their memory."""
    bags = [Bag(torch.tensor([3, 4]), torch.tensor([0, 2])), Bag(torch.tensor([5]), torch.tensor([0, 1]))]
    found = exchange_bags(Beside([2, 7, 8]), bags, [1, 1], [1, 1], [False, False], [None, None])
    assert found[0].offsets.tolist() == [0, 2, 4]
    with pytest.raises(ProcessError, match=r"(?s)negative length.*rank 1"):
        exchange_bags(Beside([-2]), bags, [1, 1], [1, 1], [False, False], [None, None])
