"""What the operations' tests share."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.ops.interpreted import Share, run_share


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


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Share]:
    """Returns how a share of the GPU's tests ended in the interpreter, run at most once by all workers together."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "interpreted"
    folder.mkdir(exist_ok=True)
    return partial(run_share, folder, "not slow" not in request.config.option.markexpr)
