"""What acts in training only, or otherwise than in evaluation: dropout, batch statistics; and the losses' extremes."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from viviane import nn
from viviane.core.errors import ConfigError, SchemaError
from viviane.nn import build_layer, cross_entropy, multi_cross_entropy, squared_error

T = torch.tensor


def test_dropout_zeroes_the_share_and_scales_the_rest():
    layer = build_layer("Dropout", {"dropout_rate": 0.2}, [(1000,)])
    torch.manual_seed(0)
    x = torch.full((200, 1000), 3.0, requires_grad=True)
    y = layer(x)
    assert set(y.unique().tolist()) == {0.0, 3.75}
    share = (y == 0).double().mean().item()
    assert abs(share - 0.2) < 6 * math.sqrt(0.2 * 0.8 / x.numel())  # six standard errors: one false alarm in 10^9
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() / 3.0)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("batch", [2, 3, 33])
def test_batch_norm_trains_with_the_batch_s_statistics(batch):
    layer = build_layer("BatchNorm", {"factor": 0.25, "eps": 1e-3}, [(7,)]).double()
    torch.manual_seed(batch)
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.norm.bias)
    x = torch.randn(batch, 7, dtype=torch.float64, requires_grad=True)
    a, gamma, beta = x.detach().numpy(), layer.norm.weight.detach().numpy(), layer.norm.bias.detach().numpy()
    expected = gamma * (a - a.mean(0)) / np.sqrt(a.var(0) + 1e-3) + beta
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-9, atol=1e-12)  # float64
    running = layer.norm.running_var.double().numpy()
    np.testing.assert_allclose(running, 0.25 * a.var(0, ddof=1) + 0.75, rtol=1e-6)
    layer.norm.momentum = 0.0  # gradcheck calls forward many times
    assert gradcheck(layer, (x,))


def test_dice_follows_the_batch_or_keeps_statistics():
    x = T([[1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    plain = build_layer("PReLU_Dice", {"elu_alpha": 0.1}, [(1,)]).double()
    assert torch.equal(plain.train()(x), plain.eval()(x))
    kept = build_layer("PReLU_Dice", {"elu_alpha": 0.1, "factor": 0.5}, [(1,)]).double()
    assert torch.equal(kept.train()(x), plain(x))
    assert (kept.running_mean.item(), kept.running_var.item()) == (1.0, 1.0)  # halfway from 0 to 2, from 1 to 1
    one = kept.eval()(x[:1])
    assert one.item() == pytest.approx(0.5 * 1.0 + 0.5 * 0.1)  # x is the mean: p = 1/2
    assert torch.equal(kept(x)[:1], one)  # a row's result does not depend on the rows next to it
    assert gradcheck(plain, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits_overflow_in_no_loss(dtype):
    big = 6e4  # near the end of float16
    z = T([[big, -big], [-big, big]], dtype=dtype, requires_grad=True)
    loss = cross_entropy(z, T([0.0, 0.0]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(z.detach().float()[0, 0].item(), rel=1e-6)  # right, and wrong by 2 big
    assert z.grad.tolist() == [[0.0, 0.0], [-0.5, 0.5]]
    z = T([[big, -big]], dtype=dtype, requires_grad=True)
    loss = multi_cross_entropy(z, T([[0.0, 0.0]]), [1.0, 1.0])
    loss.backward()
    assert loss.item() == pytest.approx(z.detach().float()[0, 0].item() / 2, rel=1e-6)
    assert z.grad.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_softmax_of_extremes(dtype):
    """A row that is masked altogether is a plain softmax; large scores do not overflow; shares sum to 1."""
    layer = build_layer("Softmax", {"factor": 1.0}, [(3,), (3,)])
    x = T([[3e4, -3e4, 1.0], [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]], dtype=dtype, requires_grad=True)
    mask = T([[1, 1, 1], [0, 0, 0], [0, 1, 1]], dtype=dtype)
    y = layer(x, mask)
    # 1e-6 in the divisor, and the type's rounding of a third
    expected = [[1, 0, 0], [1 / 3] * 3, [0, 0.5, 0.5]]
    np.testing.assert_allclose(y.detach().float().numpy(), expected, atol=2**-8 if dtype != torch.float32 else 2e-6)
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()


def test_losses_with_weights_smoothing_and_class_weights_against_loops():
    rng = np.random.default_rng(0)
    z, y, w = rng.normal(size=(9, 3)), rng.integers(-1, 2, (9, 3)).astype(float), rng.random(9)
    t, c, s = [1.0, 0.5, 2.0], (0.5, 3.0), 0.2
    total = 0.0
    for b in range(9):
        for j in range(3):
            if y[b, j] >= 0:
                target = y[b, j] * (1 - s) + s / 2
                loss = np.logaddexp(0, z[b, j]) - target * z[b, j]
                total += w[b] * t[j] * (c[1] if y[b, j] else c[0]) * loss / 3
    value = multi_cross_entropy(T(z), T(y), t, T(w), c, s)
    assert value.item() == pytest.approx(total / w.sum(), rel=1e-12)  # float64
    classes = rng.integers(0, 3, 9)
    total, weights = 0.0, (0.5, 3.0, 1.5)
    for b in range(9):
        share = np.exp(z[b]) / np.exp(z[b]).sum()
        target = np.full(3, s / 3)
        target[classes[b]] += 1 - s
        total -= w[b] * weights[classes[b]] * (target * np.log(share)).sum()
    value = cross_entropy(T(z), T(classes).unsqueeze(1), T(w), weights, s)
    assert value.item() == pytest.approx(total / w.sum(), rel=1e-12)
    assert squared_error(T(z[:, 0]), T(y[:, 0]), T(w)).item() == pytest.approx(
        np.average((z[:, 0] - y[:, 0]) ** 2, weights=w), rel=1e-12
    )


@pytest.mark.parametrize("loss", ["cross", "multi", "square"])
def test_rows_that_all_weigh_nothing_give_no_loss(loss):
    w = torch.zeros(2)
    values = {
        "cross": lambda: cross_entropy(torch.ones(2, 2), torch.ones(2), w),
        "multi": lambda: multi_cross_entropy(torch.ones(2, 2), torch.ones(2, 2), [1.0, 1.0], w),
        "square": lambda: squared_error(torch.ones(2), torch.zeros(2), w),
    }
    assert values[loss]().item() == 0.0


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(SchemaError, match="one class a row"):
        cross_entropy(torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(SchemaError, match="one target weight for each label"):
        multi_cross_entropy(torch.zeros(3, 2), torch.zeros(3, 2), [1.0])
    with pytest.raises(SchemaError, match="one output per label"):
        squared_error(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize(
    ("name", "parameters", "shapes", "words"),
    [
        ("MultiHeadAttention", {"num_attention_heads": 3}, [(2, 4)] * 3, "multiple of 3 heads"),
        ("MultiHeadAttention", {}, [(2, 4), (2, 4), (3, 4)], "K and V"),
        ("MultiHeadAttention", {}, [(2, 4)] * 3 + [(2, 2)], "a mask"),
        ("MultiHeadAttention", {"transpose_b": True}, [(2, 3, 4), (2, 4, 3)], r"\(B, H, m, d\)"),
        ("SequenceMask", {"max_sequence_len": 3}, [(1,), (1,)], "max_sequence_len_from"),
        ("SequenceMask", {"max_sequence_len_from": 3}, [(1,)], "max_sequence_len_from"),
        ("Softmax", {"factor": 2.0}, [(3,)], "masked form"),
        ("Softmax", {}, [(3, 2), (2, 2)], "scores' or 1"),
        ("MatrixMultiply", {}, [(3,), (3,)], r"\(B, n\) and \(n, k\)"),
        ("MatrixMultiply", {}, [(2, 3), (2, 3)], r"\(B, m, n\)"),
        ("GRU", {"num_output": 3}, [(8,)], "with both given"),
        ("GRU", {"num_output": 3, "SeqLength": 2}, [(4, 2)], "with both given"),
        ("Select", {"dim": 1, "index": [3]}, [(3,)], "longer than 3"),
        ("Gather", {"indices": [-1]}, [(3,)], "from 0"),
        ("FusedReshapeConcat", {}, [(1, 2)], "at least 2"),
        ("FusedReshapeConcat", {}, [(3, 2), (4, 2)], "one number of slots"),
        ("Reshape", {"leading_dim": 5}, [(3, 2)], "6 elements a sample"),
        ("PairInnerProduct", {"num_output": 2}, [(3,), (2,)], r"rows \(L B, n\) and targets"),
        ("PairInnerProduct", {"num_output": 2}, [(3,), nn.RowShape((3,), nn.Rows(2))], "whole number of rows"),
        ("MeanPlaces", {}, [(3, 2)], "their mask"),
        ("LayerNorm", {}, [()], "beside the batch"),
        ("MultiCrossEntropyLoss", {}, [(3,), (2,)], r"labels \(B, L\)"),
        ("CrossEntropyLoss", {}, [(1,), (1,)], r"a logit \(B, 2\)"),
        ("MeanSquaredErrorLoss", {}, [(2,), (1,)], "an output"),
    ],
)
def test_shapes_that_do_not_fit_say_what_is_allowed(name, parameters, shapes, words):
    with pytest.raises(SchemaError, match=words):
        build_layer(name, parameters, shapes, name="x")


def test_parameters_and_batches_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="needs pos_type 'tail'"):
        build_layer("FusedInnerProduct", {"num_output": 2, "act_type": "none"}, [(3,)])
    with pytest.raises(ConfigError, match="belong together"):
        build_layer("Reshape", {"selected": True, "leading_dim": 2}, [(3, 2)])
    with pytest.raises(SchemaError, match="another size than the layer"):
        build_layer("GRU", {"num_output": 2, "batchsize": 4}, [(3, 2)])(torch.zeros(3, 3, 2))
    with pytest.raises(SchemaError, match=r"one row has no variance[\s\S]*drop_last=True"):
        build_layer("BatchNorm", {}, [(2,)])(torch.zeros(1, 2))
    with pytest.raises(SchemaError, match=r"one row has no variance[\s\S]*layer 'top'[\s\S]*drop_last=True"):
        build_layer("MLP", {"num_outputs": [3], "batch_norm": True}, [(2,)], name="top")(torch.zeros(1, 2))
    with pytest.raises(SchemaError, match="row to gather is not in the batch"):
        build_layer("Gather", {"indices": [0, 3]}, [(2,)])(torch.zeros(3, 2))


@pytest.mark.parametrize("spelling", ["XavierUniform", "xavier_uniform"])
def test_initializers_in_hugectr_s_spelling(spelling):
    weight = build_layer("InnerProduct", {"num_output": 30, "weight_init_type": spelling}, [(50,)]).weight
    same = build_layer("InnerProduct", {"num_output": 30, "weight_init_type": "xavier_uniform"}, [(50,)]).weight
    assert torch.equal(weight, same)
    bias = build_layer("InnerProduct", {"num_output": 300, "bias_init_type": "Uniform"}, [(50,)]).bias
    assert 0.9 / 300 < bias.abs().max() <= 1 / 300  # a bias has no inputs
    assert 0.9 * math.sqrt(6 / 80) < weight.abs().max() <= math.sqrt(6 / 80)  # 1500 draws reach near the bound
    with pytest.raises(ConfigError, match="xavier_normal"):
        build_layer("InnerProduct", {"num_output": 3, "weight_init_type": "XavierNormal"}, [(5,)])


def test_parameters_are_given_once():
    assert nn.Scale([(2,)], axis=0, factor=3).out_shapes == [(6,)]
    with pytest.raises(ConfigError, match="give parameters once"):
        nn.Scale([(2,)], nn.Scale.Parameters(), factor=3)
    with pytest.raises(ConfigError, match="did you mean 'factor'"):
        nn.Scale([(2,)], facter=3)


def test_layers_with_other_rows_survive_copies_and_pickles():
    layer = nn.FusedReshapeConcat([(4, 2)])
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert [str(getattr(shape, "rows", "B")) for shape in twin.out_shapes] == ["3 B", "B"]
        assert twin.out_shapes == layer.out_shapes


def test_pairs_of_an_empty_batch_and_of_many_places():
    layer = nn.PairInnerProduct([nn.RowShape((3,), nn.Rows(4)), (3,)], num_output=2).double()
    assert layer(torch.zeros(0, 3).double(), torch.zeros(0, 3).double()).shape == (0, 2)
    h, t = torch.randn(400, 3, dtype=torch.float64), torch.randn(100, 3, dtype=torch.float64)
    many = t.repeat_interleave(4, 0)
    plain = torch.cat([h, many, h - many, h * many], 1) @ layer.weight.T + layer.bias
    # float64, a few roundings of numbers near 1
    torch.testing.assert_close(layer(h, t), plain, rtol=1e-13, atol=1e-13)


def test_ages_at_the_bounds_of_their_buckets():
    layer = nn.TimeEmbedding([(4, 1), (4,)], num_buckets=63)
    layer.load_state_dict({"weight": torch.arange(63.0).unsqueeze(1)})
    for k in range(1, 62):
        ages = torch.tensor([[2**k - 2, 2**k - 1, -5, 0]])
        assert layer(torch.zeros(1, 4, 1), 2**61 - ages).flatten().tolist() == [k - 1, k, 0, 0]
    no_target = torch.tensor([[1, 2, 3, nn.EMPTY_ID]])
    assert layer(torch.ones(1, 4, 1), no_target).flatten().tolist() == [1, 1, 1, 1]
