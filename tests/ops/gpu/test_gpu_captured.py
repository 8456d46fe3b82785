"""What a recorded training step asks of kernels: gates of updates, bad numbers found on the way, fused neighbours."""

import numpy as np
import pytest
import torch

from viviane.config import SGD, AdaGrad, Adam
from viviane.model.fusion import FusedMLP, fuse
from viviane.nn import build_layer
from viviane.ops.cross_layers import cross_layers
from viviane.ops.dispatch import use_implementation
from viviane.ops.dot_interaction import dot_interaction
from viviane.ops.mlp import mlp, zeros_behind
from viviane.ops.row_update import Entries, initial_state, state_shape, update_rows
from viviane.ops.watch import watching


@pytest.fixture(autouse=True)
def _kernels():
    with use_implementation("gpu"):
        yield


def draw(device, *shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.to(device).requires_grad_()


@pytest.mark.parametrize(
    "rule", [SGD(), AdaGrad(row_wise=True), Adam(), Adam(update="global"), SGD(momentum=0.9, update="global")]
)
@pytest.mark.parametrize("count", [1, 300])
def test_a_closed_gate_leaves_rows_and_state(device, rule, count):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 9, (count,), generator=generator).to(device)
    entries = Entries(rows, draw(device, count, 8).detach().view(-1))
    weight = draw(device, 20, 8, seed=2).detach()
    state = {
        name: torch.full(state_shape(name, weight, rule), value, device=device)
        for name, value in initial_state(rule).items()
    }
    before = [weight.clone(), *(one.clone() for one in state.values())]
    gate = torch.zeros((), dtype=torch.int32, device=device)
    update_rows(weight, state, entries, rule, lr=0.1, step=1, gate=gate)
    assert all(torch.equal(a, b) for a, b in zip(before, [weight, *state.values()], strict=True))
    gate.fill_(1)
    update_rows(weight, state, entries, rule, lr=0.1, step=1, gate=gate)
    again, fresh = before[0].clone(), {name: one.clone() for name, one in zip(state, before[1:], strict=True)}
    update_rows(again, fresh, entries, rule, lr=0.1, step=1)
    assert torch.equal(again, weight)
    assert not torch.equal(before[0], weight)


@pytest.mark.parametrize("with_dense", [True, False])
def test_the_interaction_says_when_its_gradients_are_bad(device, with_dense):
    dense, embeddings = draw(device, 5, 16), draw(device, 5, 3, 16, seed=1)
    given = [embeddings, dense] if with_dense else [embeddings]
    out = dot_interaction(dense if with_dense else None, embeddings, pad=True)
    for bad in (False, True):
        status = torch.zeros(3, dtype=torch.int64, device=device)
        seed = torch.ones_like(out)
        seed[4, -2] = float("nan") if bad else 1.0  # of the last pair
        with watching(status) as watch:
            grads = torch.autograd.grad(out, given, seed, retain_graph=True)
            assert watch.covers(grads[0].view(5, -1))
            assert not watch.covers(grads[0].clone())
        assert status.tolist() == [int(bad), 0, 0]
        assert all(bool(torch.isfinite(one).all()) for one in grads) != bad


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("place", [(0, 0), (69, 23), (33, 5)])
def test_cross_layers_say_when_their_gradient_is_bad(device, rank, place):
    """Rows and columns that fill no tile, and columns of the gradient, as a concatenation gives them to a lookup."""
    size, width, layers = 70, 24, 2
    x = draw(device, size, width, seed=3).detach().half().requires_grad_()
    projections = [draw(device, rank, width, seed=i).half() for i in range(layers)] if rank else None
    weights = [draw(device, width, rank or width, seed=5 + i).half() for i in range(layers)]
    out = cross_layers(x, projections, weights, [draw(device, width, seed=9).half() for _ in range(layers)])
    for bad in (None, float("nan"), float("inf")):
        status = torch.zeros(3, dtype=torch.int64, device=device)
        seed = torch.full_like(out, 1e-3)
        if bad is not None:
            seed[place] = bad
        with watching(status) as watch, np.errstate(invalid="ignore"):  # the interpreter computes with the bad one
            [grad] = torch.autograd.grad(out, [x], seed, retain_graph=True)
            assert watch.covers(grad)
            assert watch.covers(grad[:, 3:20])
            assert not watch.covers(grad.clone())
        assert status.tolist() == [int(bad is not None), 0, 0]
        assert bool(torch.isfinite(grad).all()) == (bad is None)


def test_an_mlp_reads_an_input_with_zeros_behind(device):
    x, weights = draw(device, 9, 31), [draw(device, 8, 31, seed=1), draw(device, 1, 8, seed=2)]
    biases = [draw(device, 8, seed=3), draw(device, 1, seed=4)]
    assert zeros_behind(31, x) == 1
    wide = torch.cat([x.detach(), torch.zeros(9, 1, device=device)], 1).requires_grad_()
    leaves = [*weights, *biases]
    results = []
    for given in (x, wide):
        out = mlp(given, weights, biases, [True, False])
        results.append([out, *torch.autograd.grad(out.sum(), [given, *leaves])])
    results[1][1] = results[1][1][:, :31]
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        # The same products in another order at most.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_pairs", [True, False])
@pytest.mark.parametrize("with_last", [True, False])
def test_fused_neighbours_give_what_the_layers_give(device, with_pairs, with_last):
    pairs = build_layer("Interaction", {"pad": False}, [(16,), (5, 16)]).to(device)
    width = 16 + 15 if with_pairs else 31
    deep = build_layer("MLP", {"num_outputs": [24, 8]}, [(width,)]).to(device)
    last = build_layer("InnerProduct", {"num_output": 1}, [(8,)]).to(device)
    given = [draw(device, 7, 16), draw(device, 7, 5, 16, seed=1)] if with_pairs else [draw(device, 7, 31)]
    fused = FusedMLP(pairs if with_pairs else None, deep, last if with_last else None)
    leaves = [*given, *deep.parameters(), *(last.parameters() if with_last else [])]
    results = []
    for run in (fused, fused._one_by_one):
        out = run(*given)
        seed = draw(device, *out.shape, seed=5).detach()
        results.append([out, *torch.autograd.grad(out, leaves, seed)])
    for one, other in zip(*results, strict=True):
        # Sums of some thirty products of about 1, in another order.
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    heard = []
    handle = deep.register_forward_hook(lambda *_: heard.append(1))
    fused(*given)
    handle.remove()
    assert heard == [1]


def test_only_sole_readers_are_fused():
    pairs = build_layer("Interaction", {"pad": False}, [(4,), (2, 4)])
    deep = build_layer("MLP", {"num_outputs": [3]}, [(7,)])
    last = build_layer("InnerProduct", {"num_output": 1}, [(3,)])
    steps = [(pairs, (0, 1), (2,)), (deep, (2,), (3,)), (last, (3,), (4,))]
    (one,) = fuse(steps, [4])
    assert (type(one[0]), one[1], one[2]) == (FusedMLP, (0, 1), (4,))
    assert [step[0] for step in fuse(steps, [4, 3])][-1] is last
    kept = fuse(steps, [4, 2])
    assert (kept[0][0], kept[1][1], kept[1][2]) == (pairs, (2,), (4,))
    assert fuse(steps[:1], [2]) == steps[:1]
