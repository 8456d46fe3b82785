"""The exchange over NCCL: equal to one process, without a wait for the GPU, and the same bits from a CUDA graph."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes
from test_fixed_sizes import HOTNESS, SOME, batches, every_kind, several_storages, sixteen_bits
from test_sharded_collection import FEATURES, ROWS, plans, tables

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import KeyRangeError
from viviane.parallel import Group, ShardedCollection
from viviane.training.step.dense_exchange import DenseExchange

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
STEPS = 4

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def copied(batch):
    return {n: Bag(b.values.clone(), b.offsets) if isinstance(b, Bag) else b.clone() for n, b in batch.items()}


def fill(static, batch):
    for name, one in batch.items():
        target, source = (static[name].values, one.values) if isinstance(one, Bag) else (static[name], one)
        target.copy_(source)


class Step:
    """A collection and a dense layer behind it, with everything that a step over several processes exchanges."""

    def __init__(self, group, plan, rule, wire):
        self.emb = ShardedCollection(
            tables(), FEATURES, rule, plan=plan, group=group, seed=3, device="cuda", wire_dtype=wire
        )
        self.emb.fix_sizes(5, HOTNESS)
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(self.emb.width, 1, device="cuda")
        self.unused = torch.nn.Linear(2, 2, device="cuda")
        self.exchange = DenseExchange([*self.dense.parameters(), *self.unused.parameters()], group)
        self.exchange.is_static = True
        self.optimizer = torch.optim.SGD(self.dense.parameters(), 0.1)
        self.lr = torch.full((), 0.1, dtype=torch.float64, device="cuda")

    def __call__(self, batch):
        loss = self.dense(self.emb(batch).flat).square().mean()
        self.exchange.begin(loss)
        loss.backward()
        mean, _ = self.exchange.finish()
        self.optimizer.step()
        self.emb.step(self.lr)
        self.dense.zero_grad(set_to_none=True)
        return mean

    def tensors(self):
        found = {"w": self.dense.weight.detach().clone(), "b": self.dense.bias.detach().clone()}
        for name in ("item", "city"):
            content = self.emb.export_table(name)
            found |= {name: content.weight, **{f"{name}.{n}": one for n, one in content.state.items()}}
        return found


def same_batches(group):
    """Batches of one kind of ids, since a graph reads one tensor; on this process."""
    return [batches(group.size, 2 * step, device="cuda")[group.rank] for step in range(STEPS)]


def nothing_waits():
    """Forward, backward and step run where a wait for the GPU is an error."""
    group = Group.world()
    for plan in plans(group.size).values():
        step = Step(group, plan, Adam(), torch.float32)
        for i, batch in enumerate(same_batches(group)):
            torch.cuda.set_sync_debug_mode("error" if i > 1 else "default")  # plans are made in the first steps
            step(batch)
        torch.cuda.set_sync_debug_mode("default")
        step.emb.check()


def a_graph_repeats_the_bits():
    group = Group.world()
    for kind, plan in plans(group.size).items():
        for rule, wire in ((Adam(), torch.float32), (AdaGrad(), torch.bfloat16)):
            eager, recorded = Step(group, plan, rule, wire), Step(group, plan, rule, wire)
            data = same_batches(group)
            static = copied(data[0])
            losses = [eager(batch).clone() for batch in data]
            recorded(static)  # plans, kernels, counts on the device: the first step
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = recorded(static)
            for i, batch in enumerate(data[1:]):
                fill(static, batch)
                graph.replay()
                assert torch.equal(loss, losses[i + 1]), (kind, i)
            mine, truth = recorded.tensors(), eager.tensors()
            assert all(torch.equal(mine[name], part) for name, part in truth.items()), kind
            recorded.emb.check()
            if kind == "hybrid" and wire == torch.float32:
                static["one"] += ROWS
                graph.replay()
                with pytest.raises(KeyRangeError, match="feature 'one', table 'item'"):
                    recorded.emb.check()


def distributed_ahead():
    """Ids of the next batch are exchanged on a stream of their own while this one computes."""
    group = Group.world()
    for plan in (plans(group.size)["row"], plans(group.size)["hybrid"]):
        ends = []
        for ahead in (False, True):
            emb = ShardedCollection(tables(), FEATURES, SGD(), plan=plan, group=group, seed=3, device="cuda")
            data = same_batches(group)
            emb.fix_sizes(5, HOTNESS)
            waiting = emb.distribute(data[0]) if ahead else None
            for i, batch in enumerate(data):
                out = emb(batch if waiting is None else waiting).flat
                waiting = emb.distribute(data[i + 1]) if ahead and i + 1 < len(data) else None
                out.square().sum().backward()
                emb.step(0.1)
            ends.append(emb.export_table("item").weight)
        assert torch.equal(*ends)


def everything():
    nothing_waits()
    a_graph_repeats_the_bits()
    distributed_ahead()
    several_storages("cuda")
    sixteen_bits("cuda")
    every_kind(SOME, "cuda")


@pytest.mark.parametrize("size", [2, 4])
def test_over_nccl(size):
    if size > GPUS:
        pytest.skip("needs more GPUs")
    processes.run(size, everything, backend="nccl")
