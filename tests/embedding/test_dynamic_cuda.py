"""Dynamic tables of a collection on a GPU: equal to ordinary ones, and the same bits wherever the values lie."""

import pytest
import torch
from test_dynamic_in_collection import DIM, FEATURES, NUM_KEYS, RAW, _batch, _raw

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam, Ftrl
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, TableConfig
from viviane.embedding.cache_sizes import CacheSettings, slot_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RULES = [SGD(), AdaGrad(), AdaGrad(row_wise=True), Adam(), Ftrl(lambda1=0.01)]
MEMORIES = [
    {"memory": "device"},
    {"memory": "host"},
    {"memory": "split", "device_rows": 8},
]


def on_gpu(batch):
    return {name: keys.to("cuda") if isinstance(keys, (Bag, torch.Tensor)) else keys for name, keys in batch.items()}


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda one: one["memory"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:40])
def test_trains_as_an_ordinary_table_of_equal_rows(rule, memory):
    city = TableConfig(name="city", num_rows=5, dim=2)
    dynamic = DynamicTableConfig(name="item", dim=DIM, init="normal", initial_capacity=64, **memory)
    ours = EmbeddingCollection([city, dynamic], FEATURES, rule, seed=3, device="cuda")
    plain = TableConfig(name="item", num_rows=NUM_KEYS, dim=DIM)
    truth = EmbeddingCollection([city, plain], FEATURES, rule, seed=3, device="cuda")
    fresh = EmbeddingCollection([city, dynamic], FEATURES, rule, seed=3, device="cuda").dynamic_table("item")
    fresh.find_or_insert(RAW.cuda())
    truth.table_rows("item")[:] = fresh.find(RAW.cuda())[0]
    for step, size in enumerate([7, 1, 0, 7, 64]):
        batch = _batch(size, step, torch.arange(NUM_KEYS), weighted=step % 2 == 0)
        mine, other = ours(on_gpu(_raw(batch))), truth(on_gpu(batch))
        # Rows have other numbers, so runs of equal ones begin elsewhere, and long ones are summed in other parts.
        torch.testing.assert_close(mine.flat, other.flat, rtol=1e-5, atol=1e-6)
        assert torch.equal(mine.mask("history"), other.mask("history"))
        pull = torch.randn(mine.flat.shape, generator=torch.Generator().manual_seed(step)).cuda()
        for collection, out in ((ours, mine), (truth, other)):
            out.flat.backward(pull)
            collection.step(0.1, 0.5)
    found, there = ours.dynamic_table("item").find(RAW.cuda())
    assert there.all()
    torch.testing.assert_close(found, truth.export_table("item").weight, rtol=1e-5, atol=1e-6)


def test_where_the_values_lie_changes_no_bit():
    results = []
    for memory in MEMORIES:
        table = DynamicTableConfig(name="item", dim=DIM, init="normal", **memory)
        features = [one for one in FEATURES if one.table == "item"]
        emb = EmbeddingCollection([table], features, Adam(), seed=3, device="cuda")
        for step in range(4):
            emb(on_gpu(_raw(_batch(64, step, torch.arange(NUM_KEYS))))).flat.square().sum().backward()
            emb.step(0.1)
        results.append(emb.dynamic_table("item").find(RAW.cuda())[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_share_of_memory_splits_a_table_between_gpu_and_host_without_changing_a_bit():
    table, features = (
        DynamicTableConfig(name="item", dim=DIM, init="normal"),
        [f for f in FEATURES if f.table == "item"],
    )
    results = []
    for cache in (
        None,
        CacheSettings(tables={"item": 8 * slot_bytes(table, Adam())}),
        CacheSettings(tables={"item": 1}),
    ):
        emb = EmbeddingCollection([table], features, Adam(), seed=3, device="cuda", cache=cache)
        own = emb.dynamic_table("item").table
        results.append((own.memory, own.device_rows))
        for step in range(4):
            emb(on_gpu(_raw(_batch(64, step, torch.arange(NUM_KEYS))))).flat.square().sum().backward()
            emb.step(0.1)
        results.append(emb.dynamic_table("item").find(RAW.cuda())[0])
    assert results[::2] == [("device", None), ("split", 8), ("host", None)]
    assert all(torch.equal(results[1], one) for one in results[3::2])


def test_the_state_moves_to_the_cpu_and_trains_on():
    config = DynamicTableConfig(name="item", dim=DIM, init="normal")
    features = [one for one in FEATURES if one.table == "item"]
    gpu, cpu = (EmbeddingCollection([config], features, Adam(epsilon=1e-2), device=d) for d in ("cuda", "cpu"))
    gpu(on_gpu(_raw(_batch(33, 1, torch.arange(NUM_KEYS))))).flat.sum().backward()
    gpu.step(0.1)
    cpu.load_state_dict({name: one.cpu() for name, one in gpu.state_dict().items()})
    for collection, place in ((gpu, "cuda"), (cpu, "cpu")):
        batch = _raw(_batch(9, 2, torch.arange(NUM_KEYS)))
        collection(on_gpu(batch) if place == "cuda" else batch).flat.square().sum().backward()
        collection.step(0.1)
    mine, theirs = gpu.dynamic_table("item").find(RAW.cuda())[0].cpu(), cpu.dynamic_table("item").find(RAW)[0]
    # Sums of float32 in another order.
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
