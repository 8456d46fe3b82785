"""Every layer on a GPU gives what it gives on the CPU, forward and backward, in three precisions."""

import pytest
import torch
from layer_examples import EXAMPLES, IDS, LOSSES, MASKED, differentiable, make_inputs

from viviane.nn import build_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Rounding of the type, 2^-24, 2^-9 and 2^-12, times the 2^6 roundings of the deepest layer; in float32 the products
# may be summed in another order.
TOLERANCE = {torch.float32: 2**-16, torch.bfloat16: 2**-3, torch.float16: 2**-6}


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
def test_the_gpu_equals_the_cpu(name, parameters, shapes, dtype):
    truth = build_layer(name, parameters, shapes, seed=2).to(dtype).float().eval()
    layer = build_layer(name, parameters, shapes, seed=2).to("cuda", dtype).eval()
    given = make_inputs(name, shapes, 33, torch.float32)
    if (name, len(shapes)) in MASKED:
        given[-1][..., 0] = 1.0  # where all is masked, scores 10,000 below keep 2^-10 of their differences
    rounded = [one.to(dtype).float() if one.is_floating_point() else one for one in given]
    here, there = [one.clone() for one in rounded], [one.cuda() for one in rounded]
    there = [one.to(dtype) if one.is_floating_point() else one for one in there]
    for place in differentiable(name, here):
        here[place].requires_grad_()
        there[place].requires_grad_()
    expected, results = flat(truth(*here)), flat(layer(*there))
    for a, b in zip(results, expected, strict=True):
        assert a.device.type == "cuda"
        assert name in (*LOSSES, "Cast") or a.dtype == dtype
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.float().cpu(), b.float(), rtol=0, atol=TOLERANCE[dtype] * scale)
    if not differentiable(name, here):
        return
    sum(one.float().sin().sum() for one in expected).backward()
    sum(one.float().sin().sum() for one in results).backward()
    for place in differentiable(name, here):
        a, b = there[place].grad.float().cpu(), here[place].grad
        assert a.isfinite().all()
        if dtype != torch.float32:
            continue  # a rectifier whose input is near 0 may switch by rounding, and a gradient with it
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=0, atol=4 * TOLERANCE[dtype] * scale)  # sums over outputs besides
