"""The exchange through memory that all processes write to: on CPUs over a mapped file, bit by bit what a group sends.

The memory of GPUs is tried where there are two (see tests/training/test_captured_group_cuda.py).
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import processes
from test_fixed_sizes import HOTNESS, SIZE, batches
from test_sharded_collection import FEATURES, plans, tables

from viviane.config import SGD, AdaGrad
from viviane.embedding import FeatureConfig, TableConfig
from viviane.embedding.buffers import Margins
from viviane.parallel import (
    Group,
    ShardedCollection,
    ShardingPlan,
    TablePlan,
    flat_sums,
    static_exchange,
)
from viviane.parallel.peers import ineligible_reason, open_peer_memory


class MappedMemory:
    """A file that all processes map, a piece for each."""

    def __init__(self, file, num_bytes, group):
        self.group, self.num_bytes = group, num_bytes
        if group.rank == 0:
            file.write_bytes(b"\xff" * (group.size * num_bytes))  # NaN as a number, -1 as an id
        group.gather_numbers([0])
        self.whole = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+"))

    def base(self, dtype):
        return self.whole.view(dtype)

    def offset(self, rank, start, dtype):
        return (rank * self.num_bytes + start) // dtype.itemsize

    def view(self, rank, start, shape, dtype):
        begin = rank * self.num_bytes + start
        assert start + int(np.prod(shape)) * dtype.itemsize <= self.num_bytes
        raw = np.frombuffer(self.whole.numpy(), np.uint8, int(np.prod(shape)) * dtype.itemsize, begin)
        return torch.from_numpy(raw).view(dtype).view(tuple(shape)) if raw.size else torch.empty(shape, dtype=dtype)

    def barrier(self, channel):
        assert self.group.gather_numbers([channel]) == [[channel]] * self.group.size, "processes meet in another order"


def mapped(folder):
    """Let routes and the sums of replicated tables take mapped memory; returns what was made for routes."""
    made, sums = [], []

    def opens(found, name):
        def open_mapped(num_bytes, group, device):
            found.append(MappedMemory(Path(folder) / f"{name}-{len(found)}", num_bytes, group))
            return found[-1], None

        return open_mapped

    static_exchange.open_peer_memory, flat_sums.open_peer_memory = opens(made, "memory"), opens(sums, "sums")
    flat_sums.ineligible_reason = lambda group, device: None
    return made


def trained(make, data, pulls, *, peers):
    """Train on batches; returns what was looked up, and the collection."""
    emb = make()
    emb.fix_sizes(SIZE, {name: count for name, count in HOTNESS.items() if name in emb.features})
    found = []
    for step, (batch, pull) in enumerate(zip(data, pulls, strict=True)):
        if peers and step == 1:
            assert emb.exchanges.open_peers() is None
        assert not emb.resolves_ahead
        with emb.exchanges.through_peers():
            ahead = peers and step > 1
            assert emb.resolves_ahead == (peers and step > 0)
            if ahead:
                emb.resolve_ahead(batch)
            asked = emb.begin(batch) if step % 2 else batch
            flat = emb(asked).flat
            assert emb.end_ahead() == ahead
            found.append(flat.detach().clone())
            flat.backward(pull)
            emb.settle_rows()
            emb.step(0.1, 0.5)
    return found, emb


def alike(make, data, name):
    """Through the memory and through the group everything has the same bits."""
    width = make().width
    pulls = [torch.randn(SIZE, width, generator=torch.Generator().manual_seed(i)) for i in range(len(data))]
    (truth, first), (found, second) = (trained(make, data, pulls, peers=one) for one in (False, True))
    for step, (one, other) in enumerate(zip(truth, found, strict=True)):
        assert torch.equal(one, other), (name, step)
    for table in first.tables:
        one, other = first.export_table(table), second.export_table(table)
        assert torch.equal(one.weight, other.weight), (name, table)
        assert all(torch.equal(part, other.state[key]) for key, part in one.state.items()), (name, table)
    return second


def every_plan(folder):
    group, made = Group.world(), mapped(folder)
    for kind, plan in plans(group.size).items():
        if group.size > 2 and kind not in ("row", "hybrid"):
            continue
        for rule, wire in ((AdaGrad(), torch.float32), (SGD(), torch.bfloat16)):

            def make(plan=plan, rule=rule, wire=wire):
                return ShardedCollection(tables(), FEATURES, rule, plan=plan, group=group, seed=3, wire_dtype=wire)

            before = len(made)
            # One kind of batch has a route: batches of even numbers have ids of one type.
            data = [batches(group.size, 2 * step)[group.rank] for step in range(4)]
            emb = alike(make, data, f"{kind}, {wire}")
            assert len(made) == before + 1
            assert all(route.peers.is_taken for route in emb.exchanges.static.values())
    assert list(Path(folder).glob("sums-*")), "no sum of a replicated table went through the memory"


def vectors_at_their_place(folder):
    """One id a row and whole tables: vectors are written into the output itself; one process has no table."""
    group, made = Group.world(), mapped(folder)
    shapes = {"a": (9, 4), "b": (11, 4), "c": (7, 2), "d": (6, 4)}
    settings = [TableConfig(name=n, num_rows=r, dim=d, init="normal") for n, (r, d) in shapes.items()]
    features = [FeatureConfig(name=n, table=n) for n in shapes] + [FeatureConfig(name="e", table="a")]
    for ranks in ({"a": 0, "b": 0, "c": 0}, {"a": 0, "b": group.size - 1, "c": group.size - 1}):
        lines = [TablePlan(table=n, kind="table", ranks=[rank]) for n, rank in ranks.items()]
        plan = ShardingPlan(world_size=group.size, tables=[*lines, TablePlan(table="d", kind="replicated", ranks=[])])

        def make(plan=plan):
            return ShardedCollection(settings, features, AdaGrad(), plan=plan, group=group, seed=2)

        rng = torch.Generator().manual_seed(group.rank)
        data = [
            {one.name: torch.randint(0, shapes[one.table][0], (SIZE,), generator=rng) for one in features}
            for _ in range(4)
        ]
        emb = alike(make, data, str(ranks))
        [route] = emb.exchanges.static.values()
        assert route.peers.is_direct
    assert len(made) == 2


def once_in_a_recording(folder):
    """A second lookup of one recording goes through the group: what the first one sent is still needed."""
    group, _ = Group.world(), mapped(folder)

    def make():
        plan = plans(group.size)["table"]
        return ShardedCollection(tables(), FEATURES, SGD(), plan=plan, group=group, seed=3)

    ends = []
    for peers in (False, True):
        emb = make()
        emb.fix_sizes(SIZE, HOTNESS)
        first, second = (batches(group.size, 2 * step)[group.rank] for step in range(2))
        emb(first)
        emb.discard_gradients()
        if peers:
            emb.exchanges.open_peers()
        for _ in range(2):
            with emb.exchanges.through_peers():
                (emb(first).flat.square().sum() + emb(second).flat.sum()).backward()
                emb.step(0.1)
        ends.append(emb.export_table("item").weight)
    assert torch.equal(*ends)


def what_prevents_it():
    group = Group.world()
    assert ineligible_reason(group, torch.device("cpu")) == "no GPU: the processes are on cpu"
    memory, reason = open_peer_memory(1000, group, torch.device("cpu"))
    assert memory is None
    assert "no GPU" in reason
    emb = ShardedCollection(tables(), FEATURES, SGD(), plan=plans(group.size)["row"], group=group, seed=3)
    emb.fix_sizes(SIZE, HOTNESS)
    assert "no batch of this size" in emb.exchanges.open_peers()
    emb(batches(group.size, 0)[group.rank])
    assert "no GPU" in emb.exchanges.open_peers()


def joined_beside(folder):
    """Inputs of a concatenation beside the vectors: all that is read and moved has the bits of torch.cat's."""
    group, made = Group.world(), mapped(folder)
    settings = [TableConfig(name=n, num_rows=9, dim=4, init="normal") for n in "abd"]
    features = [FeatureConfig(name=n, table=n) for n in "abd"]
    lines = [TablePlan(table=n, kind="table", ranks=[rank]) for n, rank in (("a", 0), ("b", group.size - 1))]
    whole = ShardingPlan(world_size=group.size, tables=[*lines, TablePlan(table="d", kind="replicated", ranks=[])])
    rng = torch.Generator().manual_seed(group.rank)
    ids = [{n: torch.randint(0, 9, (SIZE,), generator=rng) for n in "abd"} for _ in range(5)]
    kinds = {
        "direct": (settings, features, whole, {}, ids, torch.float32),
        "blocks": (tables(), FEATURES, plans(group.size)["row"], HOTNESS,
                   [batches(group.size, 2 * step)[group.rank] for step in range(5)], torch.bfloat16),
    }  # fmt: skip
    for name, (own, read, plan, hotness, data, wire) in kinds.items():
        ends = []
        for way in ("cat", "group", "peers"):
            emb = ShardedCollection(own, read, AdaGrad(), plan=plan, group=group, seed=2, wire_dtype=wire)
            emb.fix_sizes(SIZE, hotness)
            emb.margins = None if way == "cat" else Margins(3, 2)
            front, behind = (torch.randn(SIZE, n, generator=torch.Generator().manual_seed(n)) for n in (3, 2))
            front.requires_grad_()
            seen = []
            for step, batch in enumerate(data):
                if way == "peers" and step == 1:
                    assert emb.exchanges.open_peers() is None
                with emb.exchanges.through_peers():
                    out = emb(batch)
                    parts = [front, out.flat, behind]
                    if way == "cat":
                        x = torch.cat(parts, 1)
                    else:
                        x = out.wide.join(parts, 1)
                        assert x.data_ptr() + 12 == out.flat.data_ptr()
                    kept = x.square()  # reads x again in backward
                    seen.append(kept.detach().clone())
                    kept.sum().backward()
                    emb.step(0.1)
            ends.append([*seen, front.grad, *(emb.export_table(one).weight for one in emb.tables)])
        [route] = emb.exchanges.static.values()
        assert route.peers.is_direct == (name == "direct")
        for other in ends[1:]:
            assert all(torch.equal(one, two) for one, two in zip(ends[0], other, strict=True)), name
    assert len(made) == 2


def everything(folder):
    what_prevents_it()
    every_plan(folder)
    vectors_at_their_place(folder)
    once_in_a_recording(folder)
    joined_beside(folder)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_of_all_and_the_group_give_the_same_bits(size, tmp_path):
    processes.run(size, everything, str(tmp_path))


@pytest.mark.parametrize(
    ("told", "reaches", "words"),
    [
        ([["a", 0], ["b", 1]], True, "several machines"),
        ([["a", 0], ["a", 0]], True, "CUDA_VISIBLE_DEVICES"),
        ([["a", 0], ["a", 1]], False, "the GPU of rank 0 does not reach the memory of cuda:1"),
        ([["a", 0], ["a", 1]], True, None),
    ],
)
def test_what_keeps_gpus_from_each_other_is_named(monkeypatch, told, reaches, words):
    """Process 0 of two, each with a GPU; there is none here, so what torch and the other process say is given."""
    group = Group()
    answers = iter([told, [[] if reaches else [1], []]])
    group.size = 2
    monkeypatch.setattr(group, "gather_data", lambda data: next(answers))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reaches)
    reason = ineligible_reason(group, torch.device("cuda", 0))
    assert reason is None if words is None else words in reason
