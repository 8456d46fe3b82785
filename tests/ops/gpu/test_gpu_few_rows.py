"""Layers of a few rows in one launch: the results of the layers one by one, whatever the number of rows."""

from itertools import pairwise

import pytest
import torch

from viviane.ops import mlp as layers
from viviane.ops.dispatch import use_implementation
from viviane.ops.mlp.gpu_few_rows import forward as few_rows
from viviane.ops.mlp.reference import mlp as plain_mlp

ON_GPU = torch.cuda.is_available()
TYPES = [torch.float16, *([torch.bfloat16] if ON_GPU else [])]  # the interpreter multiplies no bfloat16
ROWS = 16
BOUND = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
CHAINS = [
    ((13, 64, 16), [True, True]),
    ((13, 33, 7, 1), [True, True, False]),
    ((480, 24, 300, 40, 1), [True, False, True, False]),
    ((101, 9, 33), [False, True]),
    ((264, 1, 5), [True, True]),
]


def chain(widths, dtype, device):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, k, generator=generator).to(device) * k**-0.5 for k, n in pairwise(widths)]
    biases = [torch.randn(n, generator=generator).to(device) for n in widths[1:]]
    return weights, biases, torch.randn(ROWS, widths[0], generator=generator).to(device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("widths", "relu"), CHAINS)
def test_few_rows(device, widths, relu, dtype):
    weights, biases, x = chain(widths, dtype, device)
    wide = [[one.to(dtype).double() for one in ones] for ones in (weights, biases)]
    for given in (x, x.to(dtype)):
        truth = plain_mlp(given.to(dtype).double(), *wide, relu)
        whole = few_rows(given, weights, biases, relu, dtype, None)
        assert whole.shape == truth.shape
        assert whole.dtype == dtype
        assert (whole.double() - truth).norm() / truth.norm() < BOUND[dtype]
        for size in (1, 5):  # the same bits; the interpreter's products are NumPy's
            part = few_rows(given[:size].contiguous(), weights, biases, relu, dtype, None)
            assert torch.equal(part, whole[:size]) if ON_GPU else torch.allclose(part, whole[:size], atol=BOUND[dtype])


def test_predictions_take_it_and_training_does_not(device):
    weights, biases, x = chain((13, 24, 9, 7, 1), torch.float16, device)
    x, relu = x.half(), [True, True, True, False]
    with use_implementation("gpu"), torch.no_grad():
        found = layers.mlp(x[:8], weights, biases, relu)
        assert torch.equal(found, few_rows(x[:8], weights, biases, relu, torch.float16, None))
        more = layers.mlp(x, weights, biases, relu)[:8]
    with use_implementation("gpu"):
        again = layers.mlp(x[:8], weights, biases, relu)
    for one in (more, again):
        torch.testing.assert_close(one, found, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not ON_GPU, reason="programs of the interpreter run one after another")
def test_launches_follow_one_another_on_every_stream(device):
    weights, biases, x = chain((64, 512, 512, 256, 1), torch.bfloat16, device)
    relu = [True, True, True, False]
    truth = few_rows(x, weights, biases, relu, torch.bfloat16, None)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(few_rows(x, weights, biases, relu, torch.bfloat16, None))
    torch.cuda.synchronize()
    assert all(torch.equal(one, truth) for one in found)
