"""Concatenations in the room that lookups leave: the same bits as torch.cat, without its copy where there is room."""

import copy

import pytest
import torch

import viviane.model.module
from viviane.batch import Batch
from viviane.config import SGD, AdaGrad
from viviane.embedding import buffers
from viviane.embedding.buffers import WideRows
from viviane.model import DenseLayer, GraphModule, Input, SparseEmbedding, plan_graph
from viviane.model.module import ConcatInPlace
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "a"}, {"name": "b"}, {"name": "v", "dim": 3}],
    categorical=[{"name": "c", "num_ids": 50}, {"name": "s", "num_ids": 50, "kind": "sequence", "max_length": 3}],
)
EMB = SparseEmbedding("emb", "cats", 4)
FLAT = DenseLayer("flat", "Reshape", bottom="emb", shape=[-1])
WIDE = DenseLayer("wide", "InnerProduct", bottom="dense", num_output=6)
LOSS = [
    DenseLayer("logit", "InnerProduct", bottom="x", num_output=1),
    DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]),
]


def concat(*bottoms: str, name: str = "x") -> DenseLayer:
    return DenseLayer(name, "Concat", bottom=list(bottoms))


def last(*bottoms: str) -> list[DenseLayer]:
    return [concat(*bottoms, name="x2"), DenseLayer("logit", "InnerProduct", bottom="x2", num_output=1), LOSS[1]]


CASES = {
    "in front and behind": ([EMB, FLAT, WIDE, concat("wide", "flat", "dense"), *LOSS], 1),
    "first": ([EMB, FLAT, concat("flat", "dense"), *LOSS], 1),
    "last": ([EMB, FLAT, WIDE, concat("dense", "wide", "flat"), *LOSS], 1),
    "alone": ([EMB, FLAT, concat("flat"), *LOSS], 1),
    "by leading_dim": (
        [EMB, DenseLayer("flat", "Reshape", bottom="emb", leading_dim=8), concat("dense", "flat"), *LOSS],
        1,
    ),
    "of three axes": (
        [
            EMB,
            DenseLayer("twelve", "InnerProduct", bottom="dense", num_output=12),
            DenseLayer("more", "Reshape", bottom="twelve", shape=[3, 4]),
            concat("more", "emb", name="both"),
            DenseLayer("x", "Reshape", bottom="both", shape=[-1]),
            *LOSS,
        ],
        1,
    ),
    "two lookups in one": (
        [
            SparseEmbedding("one", "cats", 2),
            DenseLayer("thin", "Reshape", bottom="one", shape=[-1]),
            EMB, FLAT, concat("thin", "dense", "flat"), *LOSS,
        ],
        1,
    ),
    "two lookups in two": (
        [
            SparseEmbedding("one", "cats", 2),
            DenseLayer("thin", "Reshape", bottom="one", shape=[-1]),
            EMB, FLAT, concat("dense", "flat"), *last("x", "thin"),
        ],
        2,
    ),
    "masked": (
        [
            SparseEmbedding("emb", "cats", 4, combiner="concat", mask="mask"),
            FLAT, concat("flat", "mask"), *LOSS,
        ],
        1,
    ),
    "read twice by one": ([EMB, FLAT, concat("flat", "flat"), *LOSS], 0),
    "read by two": ([EMB, FLAT, concat("flat", "dense"), *last("x", "flat")], 0),
    "vectors read beside": (
        [
            EMB, FLAT, concat("dense", "flat"),
            DenseLayer("sum", "ReduceSum", bottom="emb"),
            DenseLayer("sums", "Reshape", bottom="sum", shape=[-1]), *last("x", "sums"),
        ],
        0,
    ),
    "some of the vectors": (
        [EMB, DenseLayer("flat", "Reshape", bottom="emb", selected=[1, 0]), concat("flat", "dense"), *LOSS],
        0,
    ),
    "along the last of three axes": (
        [EMB, DenseLayer("both", "Concat", bottom=["emb"], axis=2),
         DenseLayer("x", "Reshape", bottom="both", shape=[-1]), *LOSS],
        0,
    ),
}  # fmt: skip


def batch(size: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(1, 50, (count,), generator=rng).tolist()

    columns = {"a": torch.randn(size, generator=rng), "b": torch.randn(size, generator=rng)}
    lists = [ids(i % 4) for i in range(size)]  # every fourth bag is empty
    return Batch.from_columns(SCHEMA, {**columns, "v": torch.randn(size, 3, generator=rng), "c": ids(size), "s": lists})


def build(nodes, monkeypatch, *, room: bool, rule=None, frozen=False) -> GraphModule:
    with monkeypatch.context() as patch:
        if not room:
            patch.setattr(viviane.model.module, "plan_in_place_concats", lambda steps, *rest: (list(steps), {}))
        module = GraphModule(plan_graph([Input(), *nodes], SCHEMA, seed=1), rule or AdaGrad(), seed=1)
    if frozen:
        module._modules["emb"].freeze("c")
    return module


def joins(module: GraphModule) -> list[ConcatInPlace]:
    return [layer for layer, _, _ in module._fused if isinstance(layer, ConcatInPlace)]


def trained(module: GraphModule, sizes, lookups_a_step: int = 1) -> list[torch.Tensor]:
    """Train; return all that a user can see."""
    seen = []
    for step, size in enumerate(sizes):
        outs = [module(batch(size, 10 * step + i)) for i in range(lookups_a_step)]  # all before the first backward
        for out in outs:
            seen.append(out.detach())
            out.square().sum().backward()
        grads = [one.grad.clone() for one in module.parameters()]
        with torch.no_grad():
            for weight, grad in zip(module.parameters(), grads, strict=True):
                weight.sub_(grad, alpha=0.05)
        module.zero_grad()
        for name in ("emb", "one"):
            if name in module._modules:
                seen.append(module._modules[name].grad_norm_squared())
                module._modules[name].step(0.1, 0.5)  # multiplied, as a clipped gradient is
        seen += grads
    with torch.no_grad():
        seen.append(module.eval()(batch(6, 99)))
    seen.append(module(batch(5, 98)).detach())
    state = module.state_dict()
    return [*seen, *(state[key] for key in sorted(state))]


def same(one, two) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_a_plain_concatenation(name, monkeypatch) -> None:
    nodes, count = CASES[name]
    plain, own = (build(nodes, monkeypatch, room=room) for room in (False, True))
    assert len(joins(own)) == count
    assert not joins(plain)
    same(trained(plain, (8, 1, 300)), trained(own, (8, 1, 300)))


@pytest.mark.parametrize("options", [{"frozen": True}, {"rule": SGD()}])
def test_frozen_tables_and_several_lookups_before_a_backward(options, monkeypatch) -> None:
    nodes, _ = CASES["in front and behind"]
    plain, own = (build(nodes, monkeypatch, room=room, **options) for room in (False, True))
    same(trained(plain, (8, 70_000), 3), trained(own, (8, 70_000), 3))  # so long that memory is used again


def test_in_a_recording_other_inputs_are_put_beside_the_lookup_before_it_is_waited_for(monkeypatch) -> None:
    nodes, _ = CASES["in front and behind"]
    plain, own = (build(nodes, monkeypatch, room=room) for room in (False, True))
    truth, put, order = trained(plain, (8, 1, 300)), WideRows.put, []
    monkeypatch.setattr(WideRows, "put", lambda self, *parts: (order.append("put"), put(self, *parts)))
    monkeypatch.setattr(viviane.model.module, "_records", lambda batch: True)
    same(truth, trained(own, (8, 1, 300)))
    assert order == ["put"] * 5
    wide = buffers._Join.forward
    monkeypatch.setattr(buffers._Join, "forward", lambda ctx, memory, wanted, *parts: (
        order.append(wanted), wide(ctx, memory, wanted, *parts))[1])  # fmt: skip
    own(batch(8, 0))
    assert order[5:] == ["put", (False, False, False)]


def no_cat(*arguments, **options):
    raise AssertionError("torch.cat is called")


@pytest.mark.parametrize("training", [True, False])
def test_the_result_lies_where_the_lookup_wrote(training, monkeypatch) -> None:
    nodes, _ = CASES["in front and behind"]
    module = build(nodes, monkeypatch, room=True).train(training)
    one, [join] = batch(8, 0), joins(module)
    plain, seen = build(nodes, monkeypatch, room=False)(one), []
    join.register_forward_hook(lambda _, inputs, out: seen.append((inputs[1], out)))
    with monkeypatch.context() as patch:
        patch.setattr("viviane.nn.shape.torch.cat", no_cat)
        assert torch.equal(module(one), plain)
    [(vectors, out)] = seen
    assert out.is_contiguous()
    assert not out._is_view()
    assert vectors.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert out.untyped_storage().nbytes() == 8 * 4 * out.shape[1]


def test_hooks_a_copy_a_tensor_by_name_and_the_tables_themselves(monkeypatch) -> None:
    nodes, _ = CASES["in front and behind"]
    module, one = build(nodes, monkeypatch, room=True), batch(8, 0)
    want = module(one)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(one), want)
    assert joins(twin)[0]._concat[0] is twin._modules["x"]
    heard = []
    handle = twin._modules["x"].register_forward_hook(lambda _, inputs, out: heard.append(out))
    assert torch.equal(twin(one), want)
    assert len(heard) == 1
    handle.remove()
    x = module.tensor("x", one)
    assert torch.equal(x, heard[0])
    assert torch.equal(module.tensor("flat", one), x[:, 6:14])
    out = module._modules["emb"](one)
    assert torch.equal(out.flat, x[:, 6:14])
    assert torch.equal(torch.cat([out[name] for name in out], 1), x[:, 6:14])
    assert torch.equal(out.stacked.flatten(1), x[:, 6:14])


def test_gradient_hooks_and_second_gradients(monkeypatch) -> None:
    nodes, _ = CASES["in front and behind"]
    ends = []
    for room in (False, True):
        module, seen, strides = build(nodes, monkeypatch, room=room), [], []

        def look(gradient, seen=seen, strides=strides) -> None:
            seen.append(gradient.detach().clone())
            strides.append(gradient.stride())

        def listen(layer, inputs, out, look=look) -> None:
            out.register_hook(look)

        module._modules["emb"].gradient_watch = look
        module._modules["flat"].register_forward_hook(listen)
        weight = module._modules["wide"].weight
        [grad] = torch.autograd.grad(module(batch(8, 0)).square().sum(), weight, create_graph=True)
        [second] = torch.autograd.grad(grad.square().sum(), weight)
        module(batch(8, 0)).sum().backward()
        ends.append([grad, second, *seen])
        assert len(seen) == 2  # of the flat form, and of the vectors
        assert strides[-1] == (19, 1)  # columns of the whole gradient, not copied
    same(*ends)
