"""Run the tests of the GPU's kernels in Triton's interpreter, in processes that Triton starts over in."""

import importlib.util

import pytest
import torch
from tests.ops.interpreted import SHARES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/ops/gpu runs on it"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(900),  # a minute each on two cores that do nothing else
]


@pytest.mark.parametrize(
    "number",
    range(len(SHARES)),
    ids=[",".join(path.stem.removeprefix("test_gpu_") for path in share) for share in SHARES],
)
def test_in_the_interpreter(number, interpreted):
    share = interpreted(number)
    assert share.code == 0, share.words
