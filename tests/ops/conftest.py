"""What the operations' tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def on_threads() -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Run a function with one, two, two and three of torch's threads."""
    before = torch.get_num_threads()

    def run(function: Callable[[], Any]) -> list[Any]:
        results = []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(function())
        return results

    yield run
    torch.set_num_threads(before)
