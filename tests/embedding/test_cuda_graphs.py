"""Recorded iterations: replays give the bits that eager steps give, and range errors are found after them."""

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam, Ftrl
from viviane.core.errors import ConfigError, DataError, KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZE, STEPS = 300, 20
RULES = {
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    "nesterov, global": SGD(momentum=0.9, nesterov=True, update="global"),
    "adagrad": AdaGrad(),
    "row-wise": AdaGrad(row_wise=True),
    "adam": Adam(),
    "adam, lazy": Adam(update="lazy_global"),
    "ftrl": Ftrl(lambda1=1e-4, lambda2=0.1, beta=1.0),
}


def build(rule, dtype="float32", policy="raise"):
    tables = [
        TableConfig(name="x", num_rows=500, dim=16, dtype=dtype, padding_id=0, out_of_range=policy),
        TableConfig(name="y", num_rows=20, dim=16, dtype=dtype, out_of_range=policy),
        TableConfig(name="z", num_rows=70_000, dim=16, dtype=dtype, optimizer=SGD(), out_of_range=policy),
    ]
    features = [
        FeatureConfig(name="a", table="x"),
        FeatureConfig(name="b", table="y"),
        FeatureConfig(name="c", table="z", combiner="mean"),
        FeatureConfig(name="d", table="y", combiner="concat", max_length=3),
        FeatureConfig(name="e", table="x"),
    ]
    return EmbeddingCollection(tables, features, rule, device="cuda", seed=3)


def draw(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = {"a": 500, "b": 20, "c": 70_000, "d": 20, "e": 500}
    shapes = {"a": (SIZE,), "b": (SIZE,), "c": (SIZE, 4), "d": (SIZE, 2), "e": (SIZE, 3)}
    return {
        name: torch.randint(rows[name], shape, generator=generator, device="cuda") for name, shape in shapes.items()
    }


class Twin:
    """A collection, its static keys and rate, and the iteration that is recorded or run."""

    def __init__(self, rule, on_device, dtype="float32"):
        self.emb = build(rule, dtype)
        self.keys = draw(0)
        self.lr = torch.zeros((), dtype=torch.float64, device="cuda") if on_device else 0.0
        self.scale = torch.zeros((), device="cuda") if on_device else 0.0

    def set(self, seed, lr, scale):
        for name, part in draw(seed).items():
            self.keys[name].copy_(part)
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
            self.scale.fill_(scale)
        else:
            self.lr, self.scale = lr, scale

    def iterate(self):
        self.emb(self.keys).flat.square().sum().backward()
        self.emb.step(self.lr, scale=self.scale)

    def record(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.iterate()
        return graph

    def content(self):
        tables = [self.emb.export_table(name) for name in "xyz"]
        return [part for one in tables for part in (one.weight, *one.state.values())], [one.step for one in tables]


def lead_in(twin):
    twin.set(100, 0.05, 1.0)
    twin.iterate()
    twin.iterate()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RULES)
def test_replays_give_the_bits_of_eager_steps(name, dtype):
    eager, recorded = Twin(RULES[name], False, dtype), Twin(RULES[name], True, dtype)
    for twin in (eager, recorded):
        lead_in(twin)
    graph = recorded.record()
    for step in range(STEPS):
        settings = (step, 0.1 / (step + 1), 1.0 - 0.03125 * step)
        eager.set(*settings)
        eager.iterate()
        recorded.set(*settings)
        graph.replay()
    for twin in (eager, recorded):  # eager steps between replays continue counting from there
        twin.set(77, 0.02, 1.0)
        twin.iterate()
    recorded.set(78, 0.03, 1.0)
    graph.replay()
    eager.set(78, 0.03, 1.0)
    eager.iterate()
    recorded.emb.check()
    (parts, ages), (true_parts, true_ages) = recorded.content(), eager.content()
    assert ages == true_ages == [STEPS + 4] * 3
    assert all(torch.equal(part, truth) for part, truth in zip(parts, true_parts, strict=True))
    assert not torch.equal(parts[0], build(RULES[name], dtype).export_table("x").weight)


def test_a_key_out_of_range_is_found_after_the_replays():
    twin = Twin(Adam(), True)
    lead_in(twin)
    graph = twin.record()
    for step in range(5):
        twin.set(step, 0.1, 1.0)
        if step in (2, 3):
            twin.keys["b"][7 * step] = 20 + step
        graph.replay()
    with pytest.raises(
        KeyRangeError, match=r"feature 'b', table 'y', row 14 of the batch, a replay of.*\n  value:   22"
    ):
        twin.emb.check()
    twin.emb.check()
    twin.set(9, 0.1, 1.0)
    twin.keys["c"][299, 3] = -5
    graph.replay()
    with pytest.raises(KeyRangeError, match=r"feature 'c', table 'z', row 299 of the batch"):
        twin.emb.check()
    twin.set(10, 0.1, 1.0)
    twin.keys["e"][17, 2] = 500
    graph.replay()
    with pytest.raises(KeyRangeError, match=r"feature 'e', table 'x', row 17 of the batch, a replay.*\n  value:   500"):
        twin.emb.check()
    twin.set(11, 0.1, 1.0)
    graph.replay()
    twin.emb.check()


def test_a_bag_that_grows_too_long_is_found_after_the_replays():
    emb = build(SGD())
    keys = draw(0)
    offsets = torch.arange(SIZE + 1, device="cuda") * 2
    keys["d"] = Bag(keys["d"].reshape(-1), offsets)
    emb(keys).flat.sum().backward()
    emb.step(torch.tensor(0.1, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        emb(keys)
    graph.replay()
    emb.check()
    offsets[6:9] = 16  # the sixth bag has six ids, its neighbours none
    graph.replay()
    with pytest.raises(DataError, match=r"feature 'd', row 5 of the batch.*\n  value:   6"):
        emb.check()


def test_what_cannot_be_recorded_is_refused_with_advice():
    emb, keys = build(Adam()), draw(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ConfigError, match="run an iteration with such a batch"):
        emb(keys)
    emb(keys).flat.sum().backward()
    emb.step(0.1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        emb(keys).flat.sum().backward()
        with pytest.raises(ConfigError, match="run an iteration with a tensor lr before"):
            emb.step(0.1)
        with pytest.raises(ConfigError, match="counting the distinct rows"):
            emb.all_storages()[0].summed_gradients()


def test_the_norm_of_gradients_may_be_recorded():
    emb, keys = build(Adam()), draw(0)
    norms = []
    for _ in range(2):
        emb(keys).flat.square().sum().backward()
        norms.append(emb.grad_norm_squared())
        emb.discard_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        emb(keys).flat.square().sum().backward()
        norms.append(emb.grad_norm_squared())
    emb.discard_gradients()
    graph.replay()
    assert norms[0] > 0
    assert norms[0] == norms[1] == norms[2]


def test_forward_and_backward_may_be_recorded_alone():
    eager, recorded = build(AdaGrad()), build(AdaGrad())
    keys = draw(0)
    for emb in (eager, recorded):
        emb(keys).flat.square().sum().backward()
        emb.step(0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded(keys).flat.square().sum().backward()
    graph.replay()
    recorded.step(0.1)
    eager(keys).flat.square().sum().backward()
    eager.step(0.1)
    assert torch.equal(recorded.export_table("x").weight, eager.export_table("x").weight)


def test_rows_of_gradients_that_lie_farther_apart_than_those_before():
    """What is made in forward for another gradient is recreated, in the graph too."""
    eager, recorded = build(AdaGrad()), build(AdaGrad())
    keys = draw(0)
    width = eager.width

    def run(emb, apart):
        whole = torch.arange(SIZE * apart, dtype=torch.float32, device="cuda").sin().view(SIZE, apart)
        emb(keys).flat.backward(whole[:, :width])

    for emb in (eager, recorded):
        run(emb, width)
        emb.step(0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(recorded, width + 8)
    graph.replay()
    recorded.step(0.1)
    run(eager, width + 8)
    eager.step(0.1)
    for name in "xyz":
        assert torch.equal(recorded.export_table(name).weight, eager.export_table(name).weight)


def test_tables_that_part_in_age_are_named():
    twin = Twin(Adam(), True)
    lead_in(twin)
    graph = twin.record()
    graph.replay()
    twin.emb.check()
    emb = twin.emb
    content = emb.export_table("x")
    emb.import_table("x", type(content)(content.weight, content.state, 50))
    graph.replay()
    with pytest.raises(ConfigError, match=r"one count of steps, and their counts differ\n  value:   'x 51, y 4'"):
        emb.check()
    twin.iterate()  # an eager step knows that they differ
    assert [emb.export_table(name).step for name in "xyz"] == [52, 5, 5]
