"""The fused dense layers on a GPU against plain torch in float64, forward and every gradient."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from viviane.core.errors import SchemaError
from viviane.ops import cross_layers as cross
from viviane.ops import dot_interaction as dots
from viviane.ops import logistic_loss as loss
from viviane.ops import mlp as layers
from viviane.ops.cross_layers import operator as cross_operator
from viviane.ops.cross_layers.reference import cross_layers as plain_cross
from viviane.ops.dispatch import use_implementation
from viviane.ops.dot_interaction import operator as dots_operator
from viviane.ops.dot_interaction.reference import dot_interaction as plain_dots
from viviane.ops.finished_gradients import telling_of_gradients
from viviane.ops.logistic_loss import operator as loss_operator
from viviane.ops.logistic_loss.reference import logistic_loss as plain_loss
from viviane.ops.mlp import operator as layers_operator
from viviane.ops.mlp.gpu import forward as activations_of
from viviane.ops.mlp.reference import mlp as plain_mlp
from viviane.ops.packing import packing
from viviane.ops.triton_parts.weights import pack_weights

ON_GPU = torch.cuda.is_available()
# Largest error beside the truth's norm. float32: sums of some hundred products, 2^-24 each. 16 bits: every stored
# activation and gradient is rounded, by 2^-12 (float16) and 2^-9 (bfloat16) of itself at most, a dozen times along the
# longest way.
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Triton's interpreter multiplies no bfloat16: NumPy has none.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@pytest.fixture(autouse=True)
def _kernels():
    with use_implementation("gpu"):
        yield


def draw(device, *shape, dtype=torch.float32, seed=0, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device).requires_grad_()


def near(found, truth, dtype):
    assert found.shape == truth.shape
    error = (found.double().cpu() - truth.cpu()).norm() / truth.cpu().norm().clamp_min(1e-6)
    assert error < BOUND[dtype], f"{tuple(found.shape)}: {error:.2e}"


def both(run, plain, tensors, dtype, out_dtype=None):
    """Compare outputs, and the gradients under one random gradient of the output."""
    wide = [None if one is None else one.detach().double().requires_grad_() for one in tensors]
    found, truth = run(*tensors), plain(*wide)
    assert found.dtype == (out_dtype or dtype)
    near(found.detach(), truth.detach(), dtype)
    if truth.numel() == 0:
        return
    seed = draw(found.device, *found.shape, dtype=found.dtype, seed=99).detach()
    given = [one for one in tensors if one is not None]
    grads = torch.autograd.grad(found, given, seed)
    truths = torch.autograd.grad(truth, [one for one in wide if one is not None], seed.double())
    for grad, one, true in zip(grads, given, truths, strict=True):
        assert grad.dtype == one.dtype
        near(grad, true, dtype)


SHAPES = [(1, 1, 1), (3, 2, 3), (5, 3, 16), (2, 27, 128), (7, 30, 33), (3, 9, 100), (2, 26, 300), (1, 70, 8)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("size", "s", "dim"), SHAPES)
def test_interaction(device, size, s, dim, dtype):
    assert dots.reason(None, draw(device, size, s, dim)) is None
    for itself in (False, True):
        embeddings = draw(device, size, s, dim, dtype=dtype)
        dense = draw(device, size, dim, dtype=dtype, seed=1)
        for first, pad in ((dense, True), (None, False)):
            if first is None and s == 1 and not itself:
                continue  # no pair

            def run(d, e, pad=pad, itself=itself):
                return dots.dot_interaction(d, e, pad=pad, itself=itself)

            both(run, lambda d, e, pad=pad, itself=itself: plain_dots(d, e, pad, itself), [first, embeddings], dtype)


def test_interaction_of_two_types(device):
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    dense, embeddings = draw(device, 4, 24, dtype=dtype), draw(device, 4, 5, 24, seed=1)
    both(dots.dot_interaction, lambda d, e: plain_dots(d, e, True, False), [dense, embeddings], dtype)


@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("stored", TYPES, ids=str)
@pytest.mark.parametrize(("size", "s", "dim"), [shape for shape in SHAPES if shape[1] > 1])
@torch.no_grad()
def test_interaction_of_table_rows_has_the_bits_of_looked_up_vectors(device, size, s, dim, stored, rows_dtype):
    table = draw(device, 50, dim, dtype=stored)
    drawn = torch.randint(0, 50, (size, s), generator=torch.Generator().manual_seed(1))
    drawn[0, :2] = torch.tensor([49, 0])  # the last row and the first
    for type_of_lookup in (torch.float32, TYPES[-1]):
        rows = dots.TableRows(table, drawn.to(rows_dtype).to(device), type_of_lookup)
        for first in (draw(device, size, dim, dtype=TYPES[-1], seed=1), draw(device, size, dim, seed=2), None):
            for pad, itself in ((True, False), (False, True)):
                found = dots.dot_interaction(first, rows, pad=pad, itself=itself)
                wanted = dots.dot_interaction(first, rows.vectors(), pad=pad, itself=itself)
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)


def test_interaction_of_table_rows_keeps_gradients_and_checks_shapes(device):
    table, dense = draw(device, 4, 8).detach(), draw(device, 2, 8, seed=1)
    rows = dots.TableRows(table, torch.tensor([[0, 3], [2, 2]], device=device), torch.float32)
    [found] = torch.autograd.grad(dots.dot_interaction(dense, rows).sum(), dense)
    [wanted] = torch.autograd.grad(dots.dot_interaction(dense, rows.vectors()).sum(), dense)
    assert torch.equal(found, wanted)
    with pytest.raises(SchemaError, match="the dot interaction takes"):
        dots.dot_interaction(dense.detach()[:1], rows)
    assert dots.dot_interaction(None, rows._replace(rows=rows.rows[:0])).shape == (0, 2)


def run_mlp(widths, relu, dtype, device, size, x_grad=True, weight_dtype=torch.float32):
    weights = [
        draw(device, n, k, dtype=dtype, seed=i, scale=k**-0.5).to(weight_dtype).detach().requires_grad_()
        for i, (k, n) in enumerate(pairwise(widths))
    ]
    biases = [draw(device, n, dtype=dtype, seed=7).to(weight_dtype).detach().requires_grad_() for n in widths[1:]]
    x = draw(device, size, widths[0], dtype=dtype, seed=3)
    x.requires_grad_(x_grad)
    count = len(weights)

    def fused(*given):
        rest = given if x_grad else (x, *given)
        assert layers.reason(rest[0], rest[1 : count + 1], rest[count + 1 :]) is None
        return layers.mlp(rest[0], rest[1 : count + 1], rest[count + 1 :], relu)

    def plain(*given):
        """The truth, but zero where the kernels' activation is: a rounding across zero is no error of a gradient."""
        h, *rest = given if x_grad else (x.detach().double(), *given)
        kept = activations_of(x, weights, biases, relu, dtype)[:count]
        for w, b, positive, activation in zip(rest[:count], rest[count:], relu, kept, strict=True):
            h = F.linear(h, w, b) * ((activation > 0) if positive else 1)
        return h

    wide = [[one.detach().double() for one in ones] for ones in (weights, biases)]
    near(
        fused(*([x] if x_grad else []), *weights, *biases).detach(), plain_mlp(x.detach().double(), *wide, relu), dtype
    )
    tensors = [*([x] if x_grad else []), *weights, *biases]
    both(fused, plain, tensors, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 130])
@pytest.mark.parametrize(
    ("widths", "relu"),
    [
        ((13, 64, 16), [True, True]),
        ((13, 33, 7, 1), [True, True, False]),
        ((40, 136, 256, 1), [True, True, False]),
        ((16, 32, 8), [False, False]),
        ((5, 1), [True]),
        ((1, 3, 1), [True, False]),
    ],
)
def test_mlp(device, size, widths, relu, dtype):
    run_mlp(widths, relu, dtype, device, size)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_mlp_without_a_gradient_of_its_input_and_with_weights_of_the_products_type(device, dtype):
    run_mlp((13, 48, 24, 1), [True, True, False], dtype, device, 9, x_grad=False)
    run_mlp((16, 48, 24), [True, True], dtype, device, 9, weight_dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("size", "n", "k", "count"), [(1, 16, 8, 1), (3, 33, 5, 2), (130, 144, 16, 3), (5, 24, 0, 3)])
def test_cross_layers(device, size, n, k, count, dtype):
    weights = [draw(device, n, k or n, dtype=dtype, seed=i, scale=(k or n) ** -0.5) for i in range(count)]
    backs = [draw(device, k, n, dtype=dtype, seed=5 + i, scale=n**-0.5) for i in range(count)] if k else []
    weights, backs = ([one.detach().float().requires_grad_() for one in ones] for ones in (weights, backs))
    biases = [draw(device, n, dtype=dtype, seed=9).float().detach().requires_grad_() for _ in range(count)]
    x = draw(device, size, n, dtype=dtype, seed=3)

    def split(function, x, *rest):
        vs = list(rest[: len(backs)]) if k else None
        return function(x, vs, list(rest[len(backs) : len(backs) + count]), list(rest[len(backs) + count :]))

    assert cross.reason(x, weights) is None
    tensors = [x, *backs, *weights, *biases]
    both(lambda *given: split(cross.cross_layers, *given), lambda *given: split(plain_cross, *given), tensors, dtype)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        trained = split(cross.cross_layers, *tensors)
        with torch.no_grad():  # stores less, with the same bits
            assert torch.equal(split(cross.cross_layers, *tensors), trained)


@pytest.mark.parametrize("kind", ["cross", "mlp"])
def test_gradients_of_matrices_are_told_of_while_others_are_computed(device, kind):
    """In the order in which they are finished, in the memory that autograd then takes over, before it takes any."""
    matrices = [draw(device, *shape, dtype=torch.float32, seed=i, scale=0.2) for i, shape in enumerate([(48, 32)] * 3)]
    if kind == "cross":
        backs = [draw(device, 32, 48, dtype=torch.float32, seed=9 + i, scale=0.2) for i in range(3)]
        finished = [one for pair in zip(reversed(matrices), reversed(backs), strict=True) for one in pair]
    else:
        matrices = [
            draw(device, n, k, dtype=torch.float32, seed=n, scale=0.2) for n, k in ((32, 48), (64, 32), (1, 64))
        ]
        backs, finished = [], list(reversed(matrices))
    matrices, backs, finished = (
        [one.detach().requires_grad_() for one in ones] for ones in (matrices, backs, finished)
    )
    parameters = {one.data_ptr(): one for one in (*matrices, *backs)}
    assert {one.data_ptr() for one in finished} == parameters.keys()
    biases = [torch.zeros(len(one), device=device, requires_grad=True) for one in matrices]
    x = draw(device, 40, 48, dtype=torch.float32, seed=3).requires_grad_()
    told: list[tuple[int, torch.Tensor, int]] = []

    def hear(parameter, gradient):
        assert all(one.grad is None for one in parameters.values())
        told.append((parameter.data_ptr(), gradient, gradient._version))

    with use_implementation("auto" if device.type == "cuda" else "gpu"):
        if kind == "cross":
            out = cross.cross_layers(x, backs, matrices, biases)
        else:
            out = layers.mlp(x, matrices, biases, [True, True, False])
        with telling_of_gradients(x.device, hear):
            out.square().sum().backward()
    assert [pointer for pointer, *_ in told] == [one.data_ptr() for one in finished]
    for pointer, gradient, version in told:
        found = parameters[pointer].grad
        assert torch.equal(found, gradient)
        assert (found.data_ptr(), gradient._version) == (gradient.data_ptr(), version)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("size", [1, 3, 1500])
@pytest.mark.parametrize("options", [{}, {"class_weights": (0.5, 3.0), "label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_logistic_loss(device, size, dtype, options, weighted):
    logits = draw(device, size, dtype=dtype, scale=4)
    labels = (draw(device, size, seed=1) > 0).float()
    weight = draw(device, size, seed=2).detach().abs() if weighted else None
    assert loss.reason(logits, labels, weight) is None
    wide = {"class_weights": (1.0, 1.0), "label_smoothing": 0.0, **options}

    def plain(z):
        given = None if weight is None else weight.double()
        return plain_loss(z, labels.double(), given, wide["class_weights"], wide["label_smoothing"])

    both(lambda z: loss.logistic_loss(z, labels, weight, **options), plain, [logits], dtype, torch.float32)


def test_logistic_loss_of_huge_and_tiny_numbers(device):
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4, -20.0, 0.0], device=device, requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0], device=device)
    both(
        lambda z: loss.logistic_loss(z, labels),
        lambda z: plain_loss(z, labels.double(), None, (1.0, 1.0), 0.0),
        [logits],
        torch.float32,
    )
    alone = loss.logistic_loss(logits[4:5], labels[4:5]).item()
    assert alone == pytest.approx(2.0611536e-9, rel=1e-6)  # log(1 + e^-20): 1 + e^-20 rounds to 1
    assert loss.logistic_loss(logits[:1], labels[:1], torch.zeros(1, device=device)).item() == 0.0


def test_two_runs_give_the_same_bits(device):
    """No sum depends on the order in which programs end."""
    x, w, b = draw(device, 700, 40), draw(device, 24, 40), draw(device, 24)
    top, bias = draw(device, 1, 24), draw(device, 1)
    runs = []
    for _ in range(2):
        y = layers.mlp(x, [w, top], [b, bias], [True, False])
        runs.append(
            [
                y,
                *torch.autograd.grad(
                    loss.logistic_loss(y.flatten(), y.detach().flatten().sigmoid()), [x, w, b, top, bias]
                ),
            ]
        )
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def small_model(device):
    """A DLRM and a DCN in little: every operator, forward and backward."""
    given = {"dense": draw(device, 6, 13).detach(), "embeddings": draw(device, 6, 3, 8, seed=1)}
    shapes = [(16, 13), (8, 16), (24, 15), (1, 24)]
    weights = [draw(device, *shape, seed=i, scale=0.3) for i, shape in enumerate(shapes)]
    biases = [draw(device, shape[0], seed=9) for shape in shapes]
    v, w, b = draw(device, 4, 15, seed=5, scale=0.3), draw(device, 15, 4, seed=6, scale=0.3), draw(device, 15, seed=7)
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], device=device)
    leaves = [given["embeddings"], *weights, *biases, v, w, b]

    def run():
        x = layers.mlp(given["dense"], weights[:2], biases[:2], [True, True])
        x = dots.dot_interaction(x, given["embeddings"])
        x = cross.cross_layers(x, [v], [w], [b])
        return loss.logistic_loss(layers.mlp(x, weights[2:], biases[2:], [True, False]).flatten(), labels)

    return run, leaves


def test_operators_keep_their_promises_to_torch(device):
    """Schema, fake implementation and autograd registration agree with what the operators do."""
    x, w, b = draw(device, 3, 8), draw(device, 8, 8), draw(device, 8)
    packed = pack_weights([w, b], torch.float32)
    calls = [
        (torch.ops.viviane.dot_interaction, (x, draw(device, 3, 2, 8), True, False, torch.float32)),
        (torch.ops.viviane.mlp, (x, [w], [b], [True], torch.float16, None)),
        (torch.ops.viviane.mlp, (x, [w], [b], [True], torch.float32, packed)),
        (torch.ops.viviane.cross_layers, (x, [], [w], [b], torch.float32, None)),
        (torch.ops.viviane.cross_layers, (x, [], [w], [b], torch.float32, packed)),
        (torch.ops.viviane.cross_layers_predict, (x, [], [w], [b], torch.float32, None)),
        (torch.ops.viviane.cross_layers_predict, (x, [w], [w], [b], torch.float16, None)),
        (torch.ops.viviane.logistic_loss, (draw(device, 3), torch.ones(3, device=device), None, 1.0, 1.0, 0.0)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_an_eager_call_gives_the_bits_of_the_library_operator(device, monkeypatch):
    """An eager step does without torch's dispatcher; what is traced goes through it."""
    run, leaves = small_model(device)
    for leaf in leaves:
        leaf.requires_grad_()
    found = []
    for traced in (False, True):
        if traced:
            for operator in (layers_operator, dots_operator, cross_operator, loss_operator):
                monkeypatch.setattr(operator, "is_traced", lambda *_: True)
        value = run()
        assert ("_Node" in type(value.grad_fn).__name__) != traced
        found.append([value, *torch.autograd.grad(value, leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_that_are_columns_of_a_wider_one(device, relu):
    """What a concatenation hands back is read where it stands."""
    x, w, b = draw(device, 130, 16), draw(device, 24, 16).requires_grad_(), draw(device, 24).requires_grad_()
    wide = draw(device, 130, 40, seed=5)
    grads = []
    for gradient in (wide[:, 8:32], wide[:, 8:32].contiguous(), wide.t().contiguous().t()[:, :24]):
        grads.append(torch.autograd.grad(layers.mlp(x, [w], [b], [relu]), [w, b], gradient))
    for one, other in zip(*grads[:2], strict=True):
        assert torch.equal(one, other)
    alike = torch.autograd.grad(layers.mlp(x, [w], [b], [relu]), [w, b], wide[:, :24].contiguous())
    for one, other in zip(grads[2], alike, strict=True):
        assert torch.equal(one, other)


def test_weights_of_more_blocks_than_there_are_programs(device):
    """Programs take several blocks each; of a matrix whose rows are padded, too."""
    tensors = [draw(device, 90, 100), draw(device, 700, 13), *(draw(device, 5, seed=i) for i in range(7))]
    packed = pack_weights(tensors, torch.float16)
    parts = packing([one.shape for one in tensors], torch.float16).parts(packed)
    for part, one in zip(parts, tensors, strict=True):
        assert torch.equal(part[..., : one.shape[-1]], one.half())
        assert not part[..., one.shape[-1] :].any()


@pytest.mark.parametrize("rank", [0, 3])
def test_weights_packed_ahead_give_the_same_bits(device, rank):
    width, layers = 13, 2  # rows of no multiple of 16 bytes: matrices have zeros behind
    x = draw(device, 5, width).requires_grad_()
    ws = [draw(device, width, rank or width).requires_grad_() for _ in range(layers)]
    vs = [draw(device, rank, width).requires_grad_() for _ in range(layers)] if rank else []
    bs = [draw(device, width).requires_grad_() for _ in range(layers)]
    leaves = [x, *ws, *vs, *bs]
    dtype = torch.float16
    packed = pack_weights([one.detach() for one in (*ws, *vs, *bs)], dtype)
    found = [torch.ops.viviane.cross_layers(x, vs, ws, bs, dtype, one)[layers - 1] for one in (None, packed)]
    if not rank:
        found += [torch.ops.viviane.mlp(x, ws, bs, [True, False], dtype, one)[layers - 1] for one in (None, packed)]
    results = [[one, *torch.autograd.grad(one.float().square().sum(), leaves)] for one in found]
    for plain, ahead in zip(results[::2], results[1::2], strict=True):
        for one, other in zip(plain, ahead, strict=True):
            assert torch.equal(one, other)


def test_compiled_whole(device):
    run, leaves = small_model(device)
    expected = [run(), *torch.autograd.grad(run(), leaves)]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = [compiled(), *torch.autograd.grad(compiled(), leaves)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums of gradients in another order


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_captured_in_a_cuda_graph_without_waiting_for_the_device(device, autocast):
    run, leaves = small_model(device)

    def step():
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            value = run()
        value.backward()
        return value

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [step().detach().clone(), *(leaf.grad.clone() for leaf in leaves)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()
    for leaf in leaves:
        leaf.grad.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip([value, *(leaf.grad for leaf in leaves)], expected, strict=True))
