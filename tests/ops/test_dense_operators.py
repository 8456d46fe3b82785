"""The fused dense layers as torch operators, and the plain truth that they are compared with."""

import pytest
import torch
from torch.autograd import gradcheck

from viviane.core.errors import SchemaError
from viviane.nn import binary_cross_entropy, build_layer
from viviane.ops.cross_layers import cross_layers
from viviane.ops.dispatch import operations, reason, use_implementation
from viviane.ops.dot_interaction import dot_interaction, num_pairs
from viviane.ops.logistic_loss import logistic_loss
from viviane.ops.mlp import mlp

LAYERS = [
    ("Interaction", {}, [(4,), (3, 4)]),
    ("Interaction", {"self_interaction": True, "pad": False}, [(3, 4)]),
    ("MLP", {"num_outputs": [5, 1], "activations": ["relu", "none"]}, [(4,)]),
    ("MultiCross", {"num_layers": 2, "projection_dim": 3}, [(4,)]),
    ("MultiCross", {"num_layers": 2, "full_rank": True}, [(4,)]),
]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("s", [1, 2, 5])
def test_interaction_against_loops(s, itself):
    dense, embeddings = draw(3, 4), draw(3, s, 4, seed=1)
    out = dot_interaction(dense, embeddings, itself=itself)
    for b in range(3):
        z = [dense[b], *embeddings[b]]
        dots = [z[i] @ z[j] for i in range(s + 1) for j in range(i + int(itself))]
        assert len(dots) == num_pairs(s + 1, itself)
        expected = torch.cat([dense[b], torch.stack(dots), torch.zeros(1, dtype=torch.float64)])
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)  # float64 sums of four products


@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize(("itself", "pad"), [(False, True), (True, False)])
@pytest.mark.parametrize(("s", "dim"), [(1, 3), (5, 16), (26, 9)])
def test_the_kernel_of_the_interaction_equals_plain_torch(s, dim, itself, pad, has_dense):
    given, results = [draw(40, dim), draw(40, s, dim, seed=1)], []
    for name in ("auto", "reference"):
        dense, embeddings = (one.detach().float().requires_grad_() for one in given)
        with use_implementation(name):
            out = dot_interaction(dense if has_dense else None, embeddings, pad=pad, itself=itself)
        out.backward(draw(*out.shape, seed=2).detach().float())
        results.append([out.detach(), embeddings.grad, *([dense.grad] if has_dense else [])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # float32 sums of up to 27 products of about 1


@pytest.mark.parametrize("itself", [False, True])
def test_gradients_of_the_plain_truth_equal_finite_differences(itself):
    def run(d, e):
        return dot_interaction(d, e, itself=itself)

    assert gradcheck(run, (draw(2, 3), draw(2, 4, 3, seed=1)))
    ws, bs = [draw(3, 4, seed=2), draw(1, 3, seed=3)], [draw(3, seed=4), draw(1, seed=5)]
    assert gradcheck(lambda x, w, v, b, c: mlp(x, [w, v], [b, c], [True, False]), (draw(5, 4), *ws, *bs))
    v, w, b = draw(2, 4, seed=6), draw(4, 2, seed=7), draw(4, seed=8)
    assert gradcheck(lambda x, v, w, b: cross_layers(x, [v, v], [w, w], [b, b]), (draw(3, 4), v, w, b))
    labels, weight = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 2.0, 0.0])
    assert gradcheck(lambda z: logistic_loss(z, labels, weight, (0.5, 2.0), 0.1), (draw(3),))


@pytest.mark.parametrize(("name", "parameters", "shapes"), LAYERS)
def test_compiled_without_a_graph_break(name, parameters, shapes):
    layer = build_layer(name, parameters, shapes)
    values = [draw(6, *shape, seed=i).float().detach().requires_grad_() for i, shape in enumerate(shapes)]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # The same operations in the same order, but for the sums of a compiled backward.
    torch.testing.assert_close(compiled(*values), layer(*values))
    compiled(*values).sum().backward()


def test_the_loss_is_compiled_without_a_graph_break():
    logits, labels = draw(7).float().detach().requires_grad_(), torch.ones(7)
    compiled = torch.compile(binary_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, labels), binary_cross_entropy(logits, labels))


def test_what_a_trace_lays_out_does_not_outlive_it():
    layer = build_layer("Interaction", {}, [(2,), (13, 2)])
    values = (torch.ones(3, 2), torch.ones(3, 13, 2))
    exported = torch.export.export(layer, values)
    assert torch.equal(exported.module()(*values), layer(*values))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dot_interaction(torch.ones(2, 3), torch.ones(2, 4, 5)), r"\(2, 3\), \(2, 4, 5\)"),
        (lambda: dot_interaction(None, torch.ones(2, 4)), r"none, \(2, 4\)"),
        (lambda: mlp(torch.ones(2, 3), [torch.ones(4, 5)], [None], [True]), r"\(2, 3\), \(4, 5\)"),
        (lambda: mlp(torch.ones(2, 3), [torch.ones(4, 3)], [None], []), "1, 1, 0"),
        (lambda: cross_layers(torch.ones(2, 3), None, [torch.ones(3, 2)], [torch.ones(3)]), r"\(3, 2\)"),
        (lambda: cross_layers(torch.ones(2, 3), None, [torch.ones(3, 3)], [torch.ones(2)]), r"\(3, 3\), \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, words):
    with pytest.raises(SchemaError, match=words):
        call()


def test_the_doctor_says_that_plain_torch_serves_on_cpus():
    dense = {"cross_layers", "logistic_loss", "mlp"}
    assert dense <= set(operations())
    for name in dense:
        assert reason(torch.device("cpu"), name).startswith("torch's own operations")
    assert reason(torch.device("cpu"), "embedding_bag") == "Numba, for CPUs"


def test_layers_say_why_they_are_not_fused():
    x = torch.ones(2, 4)
    mlp_of = lambda **options: build_layer("MLP", {"num_outputs": [3], **options}, [(4,)])  # noqa: E731
    assert "normalisation" in mlp_of(layer_norm=True).unfused(x)
    assert "dropout" in mlp_of(dropout=0.5).unfused(x)
    assert mlp_of(dropout=0.5).eval().unfused(x) is None
    assert "only float32" in mlp_of().double().unfused(x.double())
    heard = mlp_of()
    heard.layers[0].register_forward_hook(lambda *_: None)
    assert "a hook listens" in heard.unfused(x)
    with use_implementation("reference"):
        assert "VIVIANE_OPS" in mlp_of().unfused(x)


@pytest.mark.parametrize("relu", [(True, True), (True, False), (False, True)])
def test_layers_in_place_equal_layers_one_by_one(relu):
    given = [draw(9, 7), draw(5, 7, seed=1), draw(4, 5, seed=2), draw(5, seed=3), draw(4, seed=4)]
    weight, results = draw(9, 4, seed=5).float().detach(), []
    for name in ("auto", "reference"):
        x, w, v, b, c = (one.float().detach().requires_grad_() for one in given)
        with use_implementation(name):
            y = mlp(x, [w, v], [b, c], list(relu))
        kept = y.detach().clone()
        (y * weight).sum().backward()
        assert torch.equal(y, kept)  # backward writes over nothing that others read
        results.append([y.detach(), *(one.grad for one in (x, w, v, b, c))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)  # the same products of float32
    assert results[0][1].abs().sum() > 0


def test_layers_in_place_give_gradients_of_what_wants_them_alone():
    x, w, b = torch.ones(3, 4), torch.ones(2, 4, requires_grad=True), torch.ones(2)
    mlp(x, [w], [b], [True]).sum().backward()
    assert (x.grad, b.grad) == (None, None)
    assert torch.equal(w.grad, torch.full((2, 4), 3.0))
