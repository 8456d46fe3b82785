"""Every layer against values worked out by hand or by loops, its gradient against finite differences."""

import math

import pytest
import torch
from layer_examples import EXAMPLES, IDS, LOSSES, differentiable, make_inputs, rows_of_batch
from torch.autograd import gradcheck

from viviane.core.errors import ConfigError, SchemaError
from viviane.nn import LAYERS, build_layer

T = torch.tensor


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


def test_every_registered_layer_has_an_example():
    assert {name for name, _, _ in EXAMPLES} == set(LAYERS)


@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
@pytest.mark.parametrize("batch", [3, 4])
def test_the_announced_shapes_are_the_real_ones(name, parameters, shapes, batch):
    layer = build_layer(name, parameters, shapes).eval()
    results = flat(layer(*make_inputs(name, shapes, batch, torch.float32)))
    sizes = [(rows_of_batch(shape, batch), *shape) for shape in layer.out_shapes]
    assert [tuple(result.shape) for result in results] == ([()] if name in LOSSES else sizes)


@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
@pytest.mark.parametrize("batch", [0, 1])
def test_no_row_and_one_row(name, parameters, shapes, batch):
    if name == "Gather" or (name in LOSSES and not batch):
        pytest.skip("needs the rows it gathers; the mean of no rows is not a number")
    layer = build_layer(name, parameters, shapes).eval()
    given = make_inputs(name, shapes, batch or 1, torch.float32)
    if not batch:
        given = [x if getattr(shape, "rows", None) and not shape.rows.of_batch else x[:0]
                 for x, shape in zip(given, shapes, strict=True)]  # fmt: skip
    for result, shape in zip(flat(layer(*given)), layer.out_shapes, strict=True):
        assert result.isfinite().all()
        assert name in LOSSES or tuple(result.shape) == (rows_of_batch(shape, batch), *shape)


@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
def test_gradients_equal_finite_differences(name, parameters, shapes):
    if name in ("BinaryCrossEntropyLoss", "SequenceMask", "CausalMask", "LogFrequency", "Cast"):
        pytest.skip("computed in float32 by design, checked by hand in test_losses; no gradient; changes the type")
    layer = build_layer(name, parameters, shapes, seed=3).double().eval()
    given = make_inputs(name, shapes, 3)
    places = differentiable(name, given)
    moving = [given[place].requires_grad_() for place in places]
    weights = list(layer.parameters())

    def run(*values):
        inputs = list(given)
        for place, value in zip(places, values, strict=False):
            inputs[place] = value
        return tuple(flat(layer(*inputs)))

    assert gradcheck(run, (*moving, *weights))


@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
def test_saved_weights_give_the_same_outputs(name, parameters, shapes):
    first = build_layer(name, parameters, shapes, seed=1).eval()
    second = build_layer(name, parameters, shapes, seed=2).eval()
    second.load_state_dict(first.state_dict())
    values = make_inputs(name, shapes, 3, torch.float32)
    for a, b in zip(flat(first(*values)), flat(second(*values)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "parameters", "shapes"), EXAMPLES, ids=IDS)
def test_autocast_stays_near_fp32(name, parameters, shapes, dtype):
    layer = build_layer(name, parameters, shapes, seed=1).eval()
    values = make_inputs(name, shapes, 4, torch.float32)
    exact = flat(layer(*values))
    with torch.autocast("cpu", dtype):
        rough = flat(layer(*values))
    for a, b in zip(exact, rough, strict=True):
        # bf16 rounds to 2^-9 relative (fp16 to 2^-12); products of a few such numbers and sums of ten terms stay
        # under 2^-4
        torch.testing.assert_close(a, b.float(), rtol=2**-4, atol=2**-4)


def test_weights_depend_on_seed_and_name_alone():
    make = lambda seed, name: build_layer("MLP", {"num_outputs": [7]}, [(5,)], seed=seed, name=name).layers[0].weight  # noqa: E731
    assert torch.equal(make(1, "a"), make(1, "a"))
    assert not torch.equal(make(1, "a"), make(2, "a"))
    assert not torch.equal(make(1, "a"), make(1, "b"))


def within(values, mean, std, sigmas=5):
    """Mean and deviation of n draws lie within `sigmas` standard errors (a false alarm in 2 million runs)."""
    n = values.numel()
    assert abs(values.mean().item() - mean) < sigmas * std / math.sqrt(n)
    assert abs(values.std().item() - std) < sigmas * std / math.sqrt(n)  # for a normal it is std / sqrt(2n)


def test_inner_product_starts_xavier_normal_with_a_truncated_normal_bias():
    layer = build_layer("InnerProduct", {"num_output": 400}, [(600,)])
    within(layer.weight.detach(), 0.0, math.sqrt(2 / 1000))
    limit = math.sqrt(1 / 400)
    assert layer.bias.abs().max() <= 2 * limit
    within(layer.bias.detach(), 0.0, limit * 0.8796)  # deviation of a normal cut at two sigma


def test_mlp_starts_uniform():
    weight = build_layer("MLP", {"num_outputs": [300]}, [(400,)]).layers[0].weight.detach()
    assert weight.abs().max() <= 0.05
    within(weight, 0.0, 0.05 / math.sqrt(3))


def test_other_initial_values():
    def weight(kind):
        return build_layer("InnerProduct", {"num_output": 200, "weight_init_type": kind}, [(400,)]).weight.detach()

    assert weight("zero").abs().max() == 0
    assert weight("uniform").abs().max() <= 1 / 600
    within(weight("xavier_uniform"), 0.0, math.sqrt(2 / 600))


def test_inner_product_and_mlp_by_hand():
    layer = build_layer("InnerProduct", {"num_output": 2}, [(2,)])
    layer.load_state_dict({"weight": T([[1.0, 2.0], [-3.0, 4.0]]), "bias": T([0.5, -0.5])})
    assert layer(T([[1.0, 1.0]])).tolist() == [[3.5, 0.5]]
    mlp = build_layer("MLP", {"num_outputs": [2, 1], "activations": ["relu", "none"]}, [(2,)])
    mlp.load_state_dict(
        {
            "layers.0.weight": T([[1.0, 2.0], [-3.0, 1.0]]),
            "layers.0.bias": T([0.0, 0.0]),
            "layers.2.weight": T([[-1.0, 5.0]]),
            "layers.2.bias": T([0.25]),
        }
    )
    assert mlp(T([[1.0, 1.0]])).tolist() == [[-2.75]]  # relu([3, -2]) = [3, 0]; -3 + 0.25


def test_mlp_dropout_acts_in_training_only_and_not_on_an_output():
    mlp = build_layer("MLP", {"num_outputs": [50, 4], "activations": ["relu", "none"], "dropout": 0.5}, [(3,)])
    kinds = [type(step).__name__ for step in mlp.layers]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear"]
    x = torch.randn(8, 3)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))


@pytest.mark.parametrize("kind", ["v1", "low", "full"])
def test_multi_cross_against_loops(kind):
    parameters = {"v1": {}, "low": {"projection_dim": 2}, "full": {"full_rank": True}}[kind]
    layer = build_layer("MultiCross", {"num_layers": 2, **parameters}, [(3,)]).double()
    torch.manual_seed(1)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x0 = torch.randn(4, 3, dtype=torch.float64)
    for b in range(4):
        x = x0[b].tolist()
        for i in range(2):
            w, bias = layer.weights[i].tolist(), layer.biases[i].tolist()
            if kind == "v1":
                dot = sum(x[j] * w[j] for j in range(3))
                x = [x0[b, j].item() * dot + bias[j] + x[j] for j in range(3)]
            else:
                u = x
                if kind == "low":
                    u = [sum(layer.projections[i][k][j].item() * x[j] for j in range(3)) for k in range(2)]
                y = [sum(w[j][k] * u[k] for k in range(len(u))) + bias[j] for j in range(3)]
                x = [x0[b, j].item() * y[j] + x[j] for j in range(3)]
        # float64 sums of a few terms: rounding stays far under 1e-12
        torch.testing.assert_close(layer(x0)[b], T(x, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_fm_order_2_is_the_sum_of_pairwise_products():
    e = T([[[1.0, 2.0], [3.0, -4.0], [0.5, 1.0]]])
    layer = build_layer("FmOrder2", {"out_dim": 2}, [(3, 2)])
    assert layer(e).tolist() == [[3 + 0.5 + 1.5, -8 + 2 - 4]]
    flat_layer = build_layer("FmOrder2", {"out_dim": 2}, [(6,)])
    assert torch.equal(flat_layer(e.flatten(1)), layer(e))


def test_interaction_order_is_dense_then_lower_triangle_then_zero():
    dense = T([[1.0, 2.0]])
    e = T([[[3.0, 4.0], [5.0, 6.0]]])
    layer = build_layer("Interaction", {}, [(2,), (2, 2)])
    # z = [dense, e1, e2]: z1.z0 = 11, z2.z0 = 17, z2.z1 = 39
    assert layer(dense, e).tolist() == [[1, 2, 11, 17, 39, 0]]
    alone = build_layer("Interaction", {"pad": False}, [(2, 2)])
    assert alone(e).tolist() == [[39]]


def test_weight_multiply_scale_concat_slice_reduce_by_hand():
    layer = build_layer("WeightMultiply", {"weight_dims": [2, 2]}, [(2,)])
    layer.load_state_dict({"weight": T([[1.0, 2.0], [3.0, 4.0]])})
    assert layer(T([[10.0, 100.0]])).tolist() == [[10, 20, 300, 400]]
    a, b = build_layer("Slice", {"ranges": [[0, 2], [1, 3]]}, [(3,)])(T([[1.0, 2.0, 3.0]]))
    assert (a.tolist(), b.tolist()) == ([[1, 2]], [[2, 3]])
    x = T([[[1.0, 2.0], [3.0, 4.0]]])
    assert build_layer("ReduceSum", {"axis": 1}, [(2, 2)])(x).tolist() == [[[4, 6]]]
    assert build_layer("ReduceMean", {"axis": 2}, [(2, 2)])(x).tolist() == [[[1.5], [3.5]]]
    assert build_layer("Reshape", {"selected": [1]}, [(2, 2)])(x).tolist() == [[3, 4]]
    assert build_layer("Sub", {}, [(1,), (1,)])(T([[1.0]]), T([[3.0]])).tolist() == [[-2]]
    assert build_layer("ELU", {"elu_alpha": 2.0}, [(1,)])(T([[-1.0]])).item() == pytest.approx(2 * (math.exp(-1) - 1))


def test_batch_norm_keeps_factor_of_the_newest_batch():
    x = T([[1.0], [3.0]])  # mean 2, biased variance 1, unbiased 2
    layer = build_layer("BatchNorm", {"factor": 0.25}, [(1,)])
    assert layer(x).flatten().tolist() == pytest.approx([-1, 1], abs=1e-5)  # eps 1e-5 beside a variance of 1
    assert layer.norm.running_mean.item() == pytest.approx(0.25 * 2)
    assert layer.norm.running_var.item() == pytest.approx(0.25 * 2 + 0.75 * 1)
    default = build_layer("BatchNorm", {}, [(1,)])
    default(x)
    assert default.norm.running_mean.item() == 2.0


def test_an_unknown_layer_or_parameter_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown layer[\s\S]*did you mean 'InnerProduct'"):
        build_layer("InerProduct", {}, [(3,)])
    with pytest.raises(ConfigError, match=r"unknown key[\s\S]*num_ouput[\s\S]*did you mean 'num_output'"):
        build_layer("InnerProduct", {"num_ouput": 3}, [(3,)])


@pytest.mark.parametrize(
    ("name", "parameters", "shapes", "words"),
    [
        ("Interaction", {}, [(3,), (4, 5)], r"'x' \(Interaction\)[\s\S]*\(B, 3\), \(B, 4, 5\)[\s\S]*\(B, d\) and"),
        ("Concat", {}, [(3, 2), (3,)], "of one rank"),
        ("Concat", {"axis": 2}, [(3, 2), (4, 2)], "differ in axis 2 only"),
        ("Add", {}, [(3,), (4,)], "of one shape"),
        ("Sub", {}, [(3,)], "two inputs"),
        ("MLP", {"num_outputs": [2]}, [(3, 4)], r"one input of shape \(B, n\)"),
        ("FmOrder2", {"out_dim": 4}, [(9,)], r"\(B, s \* 4\)"),
        ("Slice", {"ranges": [[0, 9]]}, [(5,)], "inside the last dimension"),
        ("Reshape", {"leading_dim": 4}, [(3, 2)], "6 elements"),
        ("Reshape", {"selected": [3]}, [(3, 2)], "s > 3"),
        ("WeightMultiply", {"weight_dims": [4, 2]}, [(3,)], "first of weight_dims"),
        ("ReduceSum", {"axis": 3}, [(3, 2)], "has axis 3"),
        ("BinaryCrossEntropyLoss", {}, [(2,), (1,)], "a logit"),
    ],
)
def test_shapes_that_do_not_fit_name_the_layer_and_what_is_allowed(name, parameters, shapes, words):
    with pytest.raises(SchemaError, match=words):
        build_layer(name, parameters, shapes, name="x")


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("MLP", {"num_outputs": [2, 3], "activations": ["relu"]}, "activations has 1 entries, num_outputs has 2"),
        ("MLP", {"num_outputs": [2], "batch_norm": True, "layer_norm": True}, "choose one"),
        ("MLP", {"num_outputs": [0]}, "greater than or equal to 1"),
        ("MultiCross", {"full_rank": True, "projection_dim": 2}, "choose one"),
        ("Reshape", {}, "exactly one"),
        ("Reshape", {"selected": [1], "time_step": 2}, "time_step needs leading_dim"),
        ("Dropout", {"dropout_rate": 1.0}, "less than 1"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(name, parameters, words):
    with pytest.raises(ConfigError, match=words):
        build_layer(name, parameters, [(4,)])
