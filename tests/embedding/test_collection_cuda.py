"""The same results on a GPU, and key errors that wait for check() or step()."""

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import DataError, KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def build(device, rule=None, policy="raise"):
    tables = [
        TableConfig(name="x", num_rows=50, dim=8, padding_id=0, out_of_range=policy),
        TableConfig(name="y", num_rows=20, dim=8, out_of_range=policy),
    ]
    features = [
        FeatureConfig(name="a", table="x"),
        FeatureConfig(name="b", table="y"),
        FeatureConfig(name="c", table="x", combiner="mean"),
        FeatureConfig(name="d", table="y", combiner="concat", max_length=3),
    ]
    return EmbeddingCollection(tables, features, rule or SGD(), device=device)


def keys(device, wild=False):
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(50, (64,), generator=generator)
    b = torch.randint(20, (64,), generator=generator, dtype=torch.int32)
    bag = Bag(torch.randint(20, (128,), generator=generator), torch.arange(65) * 2)
    if wild:
        a[3], b[5], bag.values[7] = 50, -1, 2**40
    return {"a": a.to(device), "b": b.to(device), "c": bag.to(device), "d": bag.to(device)}


@pytest.mark.parametrize("policy", ["default", "hash", "ignore"])
@pytest.mark.parametrize("rule", [SGD(), AdaGrad(epsilon=1e-2), Adam(epsilon=1e-2)], ids=lambda rule: rule.type)
def test_equals_the_cpu(rule, policy):
    cpu, gpu = build("cpu", rule, policy), build("cuda", rule, policy)
    for _ in range(3):
        for emb, device in ((cpu, "cpu"), (gpu, "cuda")):
            emb(keys(device, wild=True)).flat.square().sum().backward()
            emb.step(0.1)
    for name in ("x", "y"):
        # float32 sums in another order.
        torch.testing.assert_close(
            gpu.export_table(name).weight.cpu(), cpu.export_table(name).weight, rtol=1e-5, atol=1e-6
        )
    masks = [emb(keys(device, wild=True)).mask("d").cpu() for emb, device in ((cpu, "cpu"), (gpu, "cuda"))]
    assert torch.equal(*masks)


def test_two_runs_give_the_same_bits():
    results = []
    for _ in range(2):
        emb = build("cuda", Adam())
        for _ in range(3):
            emb(keys("cuda")).flat.square().sum().backward()
            emb.step(0.1)
        results.append(emb.export_table("x").weight)
    assert torch.equal(*results)


@pytest.mark.parametrize("ask", ["check", "step"])
def test_a_key_out_of_range_is_raised_later_and_moves_nothing(ask):
    emb = build("cuda")
    before = emb.export_table("x").weight
    wild = keys("cuda")
    wild["a"][3] = 50
    emb(wild).flat.sum().backward()
    with pytest.raises(KeyRangeError, match=r"feature 'a', table 'x', row 3 of the batch\n  value:   50"):
        emb.check() if ask == "check" else emb.step(0.1)
    assert torch.equal(emb.export_table("x").weight, before)


def test_a_bag_longer_than_its_concat_is_raised_later_and_names_its_row():
    tables, features = (
        [TableConfig(name="t", num_rows=9, dim=2)],
        [FeatureConfig(name="h", table="t", combiner="concat", max_length=2)],
    )
    emb = EmbeddingCollection(tables, features, SGD(), device="cuda")
    emb({"h": Bag.from_lists([[1], [2, 3, 4], [5]]).to("cuda")}).flat.sum().backward()
    with pytest.raises(DataError, match=r"feature 'h', row 1 of the batch\n  value:   3\n  allowed: at most 2 ids"):
        emb.check()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_forward_does_not_wait_for_the_device():
    emb = build("cuda")
    batch = keys("cuda")
    emb(batch).flat.sum().backward()  # lists of columns are copied to the device once
    emb.discard_gradients()
    try:
        torch.cuda.set_sync_debug_mode("error")
        emb(batch).flat.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_moving_a_collection_takes_state_along():
    emb = build("cpu", Adam())
    emb(keys("cpu")).flat.sum().backward()
    emb.step(0.1)
    saved = emb.export_table("x")
    emb.to("cuda")
    emb(keys("cuda")).flat.sum().backward()
    emb.discard_gradients()
    assert torch.equal(emb.export_table("x").state["m"].cpu(), saved.state["m"])
