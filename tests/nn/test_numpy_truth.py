"""Every layer against plain NumPy: forward in four precisions, backward by finite differences of the NumPy code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_examples import EXAMPLES, IDS, LOSSES, differentiable, make_inputs
from numpy_layers import REFERENCES, reference

from viviane.nn import LAYERS, Rows, RowShape, build_layer

CASES = pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)

# Half a unit in the last place, 2^-53, 2^-24, 2^-9, 2^-12, times the few dozen roundings of the deepest layer (GRU:
# four steps of products, sums and a tanh) on numbers near 1: 2^6 of them at most.
TOLERANCE = {torch.float64: 2**-40, torch.float32: 2**-18, torch.bfloat16: 2**-3, torch.float16: 2**-6}


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


def weights_of(layer):
    return {name: one.detach().double().numpy() for name, one in layer.state_dict().items() if one.is_floating_point()}


def test_every_layer_has_a_reference():
    assert set(REFERENCES) == set(LAYERS)


@CASES
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_forward_and_backward_in_every_precision(name, parameters, shapes, dtype):
    layer = build_layer(name, parameters, shapes, seed=5).to(dtype).eval()
    for buffer_name, buffer in layer.named_buffers():
        if "running" in buffer_name:  # statistics that differ from 0 and 1
            buffer.copy_(torch.linspace(0.5, 2.0, buffer.numel()))
    inputs = make_inputs(name, shapes, 3, dtype, seed=7)
    moving = [inputs[place].requires_grad_() for place in differentiable(name, inputs)]
    results = flat(layer(*inputs))
    truth = reference(name, parameters, weights_of(layer), [one.detach().double().numpy() for one in inputs])
    exact = TOLERANCE[dtype]
    if name in ("BinaryCrossEntropyLoss", "Cast"):
        exact = max(exact, TOLERANCE[torch.float32])  # computed in float32, or cast to it
    if name == "MultiHeadAttention":
        exact = max(exact, 1e-6)  # HugeCTR's divisor is larger by 1e-6
    for result, expected in zip(results, truth, strict=True):
        assert name in (*LOSSES, "Cast") or result.dtype == dtype
        scale = max(1.0, np.abs(expected).max(initial=0.0))
        np.testing.assert_allclose(result.detach().double().numpy(), expected, rtol=0, atol=exact * scale)
    if moving:
        sum(one.float().sum() for one in results).backward()
        assert all(one.grad is not None and one.grad.isfinite().all() for one in moving)


@CASES
def test_backward_equals_finite_differences_of_the_reference(name, parameters, shapes):
    layer = build_layer(name, parameters, shapes, seed=5).double().eval()
    inputs = make_inputs(name, shapes, 3, seed=7)
    places = differentiable(name, inputs)
    moving = [inputs[place].requires_grad_() for place in places] + list(layer.parameters())
    if not moving:
        pytest.skip("nothing has a gradient")
    results = flat(layer(*inputs))
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in results]
    gradients = torch.autograd.grad(
        sum((one.double() * f).sum() for one, f in zip(results, factors, strict=True)), moving
    )

    def value(arrays, weights):
        outputs = reference(name, parameters, weights, arrays)
        return sum((one * f.numpy()).sum() for one, f in zip(outputs, factors, strict=True))

    arrays, weights = [one.detach().numpy().copy() for one in inputs], weights_of(layer)
    named = [arrays[place] for place in places] + [weights[key] for key, _ in layer.named_parameters()]
    step = 1e-6
    for array, gradient in zip(named, gradients, strict=True):
        for at in np.ndindex(array.shape):
            old = array[at]
            array[at] = old + step
            above = value(arrays, weights)
            array[at] = old - step
            below = value(arrays, weights)
            array[at] = old
            # a central difference errs by step^2 = 1e-12 and by 2^-52 / step = 2e-10, both times values up to 100;
            # a loss in float32 errs by 2^-24 more
            near = 1e-5 if name in ("BinaryCrossEntropyLoss", "MultiHeadAttention") else 1e-6
            assert gradient[at].item() == pytest.approx((above - below) / (2 * step), rel=near, abs=near)


@settings(max_examples=25)
@given(st.integers(1, 9), st.sampled_from([1, 3, 7, 33]), st.sampled_from([1, 2, 3]), st.integers(0, 9))
def test_sizes(batch, width, slots, seed):
    """Odd widths and batches, drawn at random, of the layers that reshape, mix and attend."""
    cases = [
        ("GRU", {"num_output": width}, [(slots, width)]),
        ("MultiHeadAttention", {"num_attention_heads": slots}, [(slots + 1, slots * width)] * 3),
        ("FusedReshapeConcat", {}, [(slots + 1, width), (slots + 1, 1)]),
        ("FusedReshapeConcatGeneral", {}, [(slots, width)]),
        ("PairInnerProduct", {"num_output": 3}, [RowShape((width,), Rows(slots)), (width,)]),
        ("Scale", {"axis": seed % 2, "factor": slots}, [(width,)]),
        ("PReLU_Dice", {"elu_alpha": 0.1}, [(width,)]),
        ("Reshape", {"leading_dim": width}, [(slots, width)]),
        ("FmOrder2", {"out_dim": width}, [(slots, width)]),
        ("Interaction", {}, [(width,), (slots, width)]),
        ("MatrixMultiply", {}, [(slots, width), (width, 3)]),
        ("Softmax", {"factor": 2.0}, [(slots, width), (1, width)]),
        ("MultiCrossEntropyLoss", {"target_weight_vec": [0.5] * width}, [(width,), (width,)]),
        ("CrossEntropyLoss", {}, [(width + 1,), (1,)]),
    ]
    for name, parameters, shapes in cases:
        layer = build_layer(name, parameters, shapes, seed=seed).double().eval()
        inputs = make_inputs(name, shapes, batch, seed=seed)
        truth = reference(name, parameters, weights_of(layer), [one.numpy() for one in inputs])
        for result, expected in zip(flat(layer(*inputs)), truth, strict=True):
            # float64; the attention's divisor differs by 1e-6 of at least 1
            near = 2e-6 if name == "MultiHeadAttention" else 1e-9
            np.testing.assert_allclose(result.detach().numpy(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("places", [32, 33])  # the longest sequence in plain steps, the shortest in torch's kernel
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_long_sequences(places, masked):
    """Both ways to compute attention on the CPU."""
    shapes = [(places, 6)] * 3 + [(1, 1, places)] * masked
    parameters = {"num_attention_heads": 2}
    layer = build_layer("MultiHeadAttention", parameters, shapes).double()
    inputs = make_inputs("MultiHeadAttention", shapes, 3, seed=places)
    truth = reference("MultiHeadAttention", parameters, {}, [one.numpy() for one in inputs])
    # float64; the reference divides by 1e-6 more, of at least 1
    np.testing.assert_allclose(layer(*inputs).detach().numpy(), truth[0], rtol=2e-6, atol=2e-6)
