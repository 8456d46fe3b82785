"""torch.compile around a collection: one graph, the bits of eager, and every gradient counted once."""

import copy
import gc
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from viviane.batch import Bag, Batch, Layout
from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import KeyRangeError, VivianeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.operators import _TICKETS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of its caches and of deprecated parts


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


def build(seed=0, output_dtype=torch.float32):
    tables = [
        TableConfig(name="x", num_rows=50, dim=8, padding_id=0),
        TableConfig(name="y", num_rows=20, dim=3),
    ]
    features = [
        FeatureConfig(name="a", table="x"),
        FeatureConfig(name="b", table="y"),
        FeatureConfig(name="c", table="x", combiner="mean"),
        FeatureConfig(name="d", table="y", combiner="concat", max_length=3),
        FeatureConfig(name="e", table="x"),
    ]
    return EmbeddingCollection(tables, features, Adam(epsilon=1e-2), seed=seed, output_dtype=output_dtype)


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.emb = build(seed)
        self.linear = nn.Linear(self.emb.width, 1)

    def forward(self, keys):
        out = self.emb(keys)
        first = (out["d"].sum(2) * out.mask("d")).sum(1, keepdim=True)
        return self.linear(out.flat.relu()) + first


def bags(generator, num_rows, size, weighted):
    lengths = torch.randint(0, 4, (size,), generator=generator)
    count = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(count, generator=generator) if weighted else None
    return Bag(torch.randint(num_rows, (count,), generator=generator), offsets, weights)


def mapping(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randint(50, (size,), generator=generator),
        "b": torch.randint(20, (size,), generator=generator),
        "c": bags(generator, 50, size, weighted=False),
        "d": bags(generator, 20, size, weighted=True),
        "e": torch.randint(50, (size, 3), generator=generator),
    }


def batch(size, seed=0):
    keys = mapping(size, seed)
    layout = Layout((), (), ("unused", "b", "a"), ("c", "d", "e", "also_unused"))
    ids = torch.stack([torch.full((size,), 99), keys["b"], keys["a"]], 1).to(torch.int32)
    held = {"c": keys["c"], "d": keys["d"], "e": keys["c"], "also_unused": keys["c"]}
    return Batch(layout, torch.zeros(size, 0), torch.zeros(size, 0), ids, held, origin=f"rows of seed {seed}")


def assert_same(one, other):
    for name in one.tables:
        left, right = one.export_table(name), other.export_table(name)
        assert left.step == right.step
        assert torch.equal(left.weight, right.weight), name
        assert all(torch.equal(left.state[part], right.state[part]) for part in left.state)


@pytest.mark.parametrize("form", [mapping, batch])
def test_training_gives_the_bits_of_eager_in_one_graph(form):
    eager = Net()
    other = copy.deepcopy(eager)
    fast = compiled(other)
    start = eager.emb.export_table("x").weight
    rules = [torch.optim.SGD(net.parameters(), 0.1) for net in (eager, other)]
    for i, size in enumerate((6, 9, 12, 4)):  # the second size makes the sizes symbolic, and no other graph follows
        keys = form(size, i)
        for net, call, rule in ((eager, eager, rules[0]), (other, fast, rules[1])):
            call(keys).square().sum().backward()
            net.emb.step(0.1)
            rule.step()
            rule.zero_grad()
    assert counters["stats"]["unique_graphs"] == 2
    assert_same(eager.emb, other.emb)
    assert torch.equal(eager.linear.weight, other.linear.weight)
    assert not torch.equal(start, eager.emb.export_table("x").weight)
    assert torch.equal(eager.eval()(keys), fast.eval()(keys))


def test_equal_lookups_in_one_graph_each_count():
    """A graph pass that merges equal calls would halve the gradient."""
    eager, other = build(), build()

    def loss(emb, keys):
        return (emb(keys).flat * emb(keys).flat).sum() + emb(mapping_of_one(keys)).flat.sum()

    fast = compiled(lambda keys: loss(other, keys))
    for i in range(2):  # two passes, then one step
        loss(eager, mapping(5, i)).backward()
        fast(mapping(5, i)).backward()
    eager.step(0.1)
    other.step(0.1)
    assert_same(eager, other)


def mapping_of_one(keys):
    return {**keys, "b": keys["b"].clamp(max=3)}


def test_a_whole_step_in_one_graph():
    eager, other = build(), build()

    def train(emb, keys, lr):
        loss = emb(keys).flat.square().sum()
        loss.backward()
        emb.check()
        emb.step(lr, scale=(1.0 / emb.grad_norm_squared().sqrt()).clamp(max=1.0))
        emb(keys).flat.sum().backward()
        emb.discard_gradients()
        return loss.detach(), emb(keys).flat.detach()  # the second lookup sees the moved rows

    fast = compiled(lambda keys, lr: train(other, keys, lr))
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for i, lr in enumerate((0.1, 0.05, 0.02)):
            expected, found = train(eager, mapping(6, i), lr), fast(mapping(6, i), lr)
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
    assert_same(eager, other)


def test_a_step_that_breaks_at_backward():
    """Without that option torch ends a graph before `backward`; the update is in the next one."""
    eager, other = build(), build()

    def train(emb, keys):
        emb(keys).flat.square().sum().backward()
        emb.step(0.1)

    broken = torch.compile(lambda keys: train(other, keys), backend="aot_eager")
    for seed in (0, 1):
        train(eager, mapping(6, seed))
        broken(mapping(6, seed))
    assert_same(eager, other)


def test_scale_may_be_a_tensor_and_the_update_comes_between_lookups():
    emb, other = build(), build()
    for one in (emb, other):
        one(mapping(4)).flat.sum().backward()

    @compiled
    def around(keys, scale):
        before = other(keys).flat
        other.step(0.1, scale)
        return before, other(keys).flat

    with torch.no_grad():
        before = emb(mapping(4)).flat
        emb.step(0.1, torch.tensor(0.25))
        found = around(mapping(4), torch.tensor(0.25))
        assert torch.equal(found[0], before)
        assert torch.equal(found[1], emb(mapping(4)).flat)


def test_eval_no_grad_and_frozen_tables_keep_nothing():
    emb = build()
    fast = compiled(lambda keys: emb(keys).flat)
    keys = mapping(5)
    assert fast(keys).requires_grad
    with torch.no_grad():
        assert not fast(keys).requires_grad
    emb.eval()
    assert not fast(keys).requires_grad
    emb.train().freeze("x")
    fast(keys).sum().backward()
    before = emb.export_table("x").weight
    emb.step(0.1)
    assert torch.equal(emb.export_table("x").weight, before)
    assert emb.export_table("x").step == 0
    assert emb.export_table("y").step == 1
    emb.freeze("y")
    assert not fast(keys).requires_grad
    emb.unfreeze("x")
    fast(keys).sum().backward()
    emb.step(0.1)
    assert emb.export_table("x").step == 1
    assert emb.export_table("y").step == 1


def test_a_key_out_of_range_is_named_and_the_graph_serves_on():
    emb = build()
    fast = compiled(lambda keys: emb(keys).flat)
    good = mapping(5)
    bad = {**good, "a": torch.tensor([1, 2, 3, 50, 4])}
    assert torch.equal(fast(good), emb(good).flat)
    with pytest.raises(KeyRangeError, match=r"feature 'a', table 'x', row 3 of the batch\n  value:   50"):
        fast(bad)
    assert torch.equal(fast(good), emb(good).flat)


def test_copies_train_apart():
    emb = build()
    fast = compiled(lambda one, keys: one(keys).flat)
    twins = [copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))]
    fast(emb, mapping(5)).sum().backward()
    emb.step(0.1)
    for twin in twins:
        assert not torch.equal(twin.export_table("x").weight, emb.export_table("x").weight)
        assert not any(storage.has_gradients for storage in twin.all_storages())
        fast(twin, mapping(5)).sum().backward()
        twin.step(0.1)
        assert_same(twin, emb)


def test_what_backward_needs_is_dropped_with_its_graph():
    emb = build()
    fast = compiled(lambda keys: emb(keys).flat)
    gc.collect()
    before = len(_TICKETS)
    out = fast(mapping(5))
    assert len(_TICKETS) == before + 1
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    del out
    gc.collect()
    assert len(_TICKETS) == before
    emb.step(0.1)
    twice = build()
    for _ in range(2):
        twice(mapping(5)).flat.sum().backward()
    twice.step(0.1)
    assert_same(emb, twice)


def test_saved_tensors_that_are_copied_are_an_error():
    emb = build()
    fast = compiled(lambda keys: emb(keys).flat.square())
    fast(mapping(5)).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = fast(mapping(5))
    with pytest.raises(VivianeError, match="leave out saved_tensors_hooks"):
        out.sum().backward()


def test_output_type_under_autocast():
    emb, other = build(output_dtype=torch.bfloat16), build(output_dtype=torch.bfloat16)
    linear = nn.Linear(emb.width, 1)
    fast = compiled(lambda keys: linear(other(keys).flat))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = linear(emb(mapping(5)).flat), fast(mapping(5))
    assert found.dtype == torch.bfloat16
    assert torch.equal(expected, found)
    expected.sum().backward()
    found.sum().backward()
    emb.step(0.1)
    other.step(0.1)
    assert_same(emb, other)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch's generated code needs C++")
def test_inductor():
    """Two equal nets with tables of their own; generated kernels use memory again, which waiting gradients survive."""
    eager = [Net(seed) for seed in (0, 1)]
    others = copy.deepcopy(eager)
    fast = [compiled(net, "inductor") for net in others]
    for i, size in enumerate((6, 9, 7)):
        for net, other, call in zip(eager, others, fast, strict=True):
            expected, found = net(batch(size, i)), call(batch(size, i))
            # Sums of 24 float32 near 1 in another order.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            expected.square().sum().backward()
            found.square().sum().backward()
            net.emb.step(0.1)
            other.emb.step(0.1)
    for net, other in zip(eager, others, strict=True):
        for name in net.emb.tables:
            torch.testing.assert_close(
                other.emb.export_table(name).weight, net.emb.export_table(name).weight, rtol=1e-4, atol=1e-5
            )


def test_rules_differ_by_table():
    tables = [
        TableConfig(name="x", num_rows=9, dim=4, optimizer=AdaGrad()),
        TableConfig(name="y", num_rows=9, dim=4, dtype="bfloat16"),
    ]
    features = [FeatureConfig(name="a", table="x"), FeatureConfig(name="b", table="y", combiner="mean")]
    emb, other = (EmbeddingCollection(tables, features, SGD()) for _ in range(2))
    fast = compiled(lambda keys: other(keys).stacked)
    keys = {"a": torch.tensor([8, 8, 0]), "b": Bag.from_lists([[1, 8], [], [1]])}
    for call in (lambda keys: emb(keys).stacked, fast):
        call(keys).square().sum().backward()
    emb.step(0.1)
    other.step(0.1)
    assert_same(emb, other)
