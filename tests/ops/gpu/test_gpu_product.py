"""Hopper's product with its tiles' partners beside Triton's kernels: the same bits, whatever the sizes."""

import pytest
import torch

from viviane.ops.cross_layers import gpu as cross
from viviane.ops.cross_layers.operator import cross_layers_kernels
from viviane.ops.cuda_parts import product

DEVICE = torch.device("cuda")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or product.nvrtc() is None:
    pytest.skip("the kernel is for GPUs of compute capability 9.0, and compiled by NVRTC", allow_module_level=True)

# Bands of 128 rows, halves of 64, columns by 64 and sums by 64 and 16: one, a few, and those that fill none of them.
SHAPES = [(1, 8, 8), (63, 64, 64), (65, 72, 136), (128, 200, 512), (300, 1000, 72), (5000, 128, 392), (40_000, 8, 512)]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(product, "_LEAST_ROWS", 1)


def draw(*shape, dtype, seed, scale=1.0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def filled(like):
    return torch.full_like(like, 7.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "width", "depth"), SHAPES)
def test_the_same_bits_as_tritons(size, width, depth, dtype):
    left = draw(size, depth, dtype=dtype, seed=0)
    down = draw(width, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    up = draw(depth, width, dtype=dtype, seed=2, scale=depth**-0.5)
    bias, one, other = (draw(*n, width, dtype=dtype, seed=3 + i) for i, n in enumerate([(), (size,), (size,)]))
    assert product.serves(left, down, up)

    found, truth = filled(one), filled(one)
    out = filled(one)
    product.multiply(product.FORWARD, left, down, [one, other, found, out], bias=bias)
    assert torch.equal(out, cross.fused_cross_forward(left, down, bias, one, other, truth, cross.FORWARD))
    assert torch.equal(found, truth)
    wanted, out = out, filled(one)
    product.multiply(product.FORWARD, left, down, [one, other, None, out], bias=bias)
    assert torch.equal(out, wanted)
    assert torch.equal(cross.fused_cross_forward(left, down, bias, one, other, None, cross.FORWARD), wanted)

    scaled = filled(one)
    sums = product.multiply(product.BACKWARD, left, up, [one, other, scaled, out])
    true_out, true_scaled, true_sums = cross.fused_cross_backward(left, up, one, other, truth, cross.BACKWARD)
    assert torch.equal(out, true_out)
    assert torch.equal(scaled, true_scaled)
    # Sums of 64 and of 128 rows in float32, added here in float64: each rounds by 2^-24 of what it adds up to.
    worst = 128 * 2.0**-24 * other.float().abs().max() * out.float().abs().max()
    assert (sums.double().sum(0) - true_sums.double().sum(0)).abs().max() <= worst * -(-size // 64)

    for layers in (1, 2, 3):
        grads = draw(max(1, layers - 1), size, width, dtype=dtype, seed=9)
        ys = draw(layers, size, width, dtype=dtype, seed=10)
        out = filled(one)
        product.multiply(product.LAST, left, up, [one, grads, ys, out], layers=layers)
        assert torch.equal(out, cross.fused_cross_last(left, up, one, grads, ys, cross.LAST))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", [None, (0, 0), (299, 71), (128, 64)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_bad_sets_the_status(place, bad, dtype):
    left, up = draw(300, 40, dtype=dtype, seed=0), draw(40, 72, dtype=dtype, seed=1)
    top, ys = draw(300, 72, dtype=dtype, seed=2), draw(2, 300, 72, dtype=dtype, seed=3)
    grads, out = draw(1, 300, 72, dtype=dtype, seed=4), torch.empty(300, 72, dtype=dtype, device=DEVICE)
    status = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    if place is not None:
        top[place] = bad
    product.multiply(product.LAST, left, up, [top, grads, ys, out], layers=2, status=status)
    assert status.tolist() == [int(place is not None), 0, 0]
    assert bool(torch.isfinite(out).all()) == (place is None)


def test_what_it_does_not_serve(monkeypatch):
    fine = draw(256, 512, dtype=torch.bfloat16, seed=0)
    assert product.serves(fine)
    assert not product.serves(draw(256, 520, dtype=torch.bfloat16, seed=0))
    assert not product.serves(fine.float())
    assert not product.serves(fine[:, :100])
    assert not product.serves(fine.cpu())
    monkeypatch.setattr(product, "_LEAST_ROWS", 257)
    assert not product.serves(fine)


def test_layers_of_a_large_batch_take_it(monkeypatch):
    """The whole operator, forward and backward, gives the same bits with it as without."""
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(product, "_LEAST_ROWS", least)
        x = draw(3000, 192, dtype=torch.bfloat16, seed=0).requires_grad_()
        projections = [draw(64, 192, dtype=torch.float32, seed=i, scale=0.1).requires_grad_() for i in (1, 2, 3)]
        weights = [draw(192, 64, dtype=torch.float32, seed=i, scale=0.1).requires_grad_() for i in (4, 5, 6)]
        biases = [draw(192, dtype=torch.float32, seed=i).requires_grad_() for i in (7, 8, 9)]
        y = cross_layers_kernels(x, projections, weights, biases, torch.bfloat16)
        grads = torch.autograd.grad(y.square().sum(), [x, *projections, *weights])
        found.append([y.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
