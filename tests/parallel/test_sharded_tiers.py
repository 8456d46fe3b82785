"""Tables in tiers over two processes: every bit of the same tables in memory over two processes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
import processes
from staged import use_staged

from viviane.batch import Batch, Layout
from viviane.config import Adam
from viviane.core.errors import ConfigError, KeyRangeError
from viviane.embedding import CachedStorage, CacheSettings, FeatureConfig, TableConfig
from viviane.parallel import Group, Plan, ShardedCollection
from viviane.training.look_ahead import LookAhead

TABLES = [
    TableConfig(name="user", num_rows=300, dim=4, padding_id=0),
    TableConfig(name="item", num_rows=200, dim=4),
    TableConfig(name="shop", num_rows=6, dim=4),
]
FEATURES = [FeatureConfig(name=one.name, table=one.name) for one in TABLES]
KINDS = [
    {"table": "user", "kind": "row", "ranks": [0, 1]},
    {"table": "item", "kind": "table", "ranks": [1]},
    {"table": "shop", "kind": "replicated"},
]
CACHE = CacheSettings(tables={"user": 40 * (48 + 22), "item": 60 * (48 + 18)})


def collection(cache: CacheSettings | None, device: str = "cpu") -> ShardedCollection:
    group = Group.world()
    kinds = [one | ({"ranks": [0]} if "ranks" in one and group.size == 1 else {}) for one in KINDS]
    plan = Plan(world_size=group.size, tables=kinds)
    return ShardedCollection(TABLES, FEATURES, Adam(), plan=plan, group=group, cache=cache, device=device)


def make_batches(count: int, size: int = 12) -> list[Batch]:
    random = torch.Generator().manual_seed(Group.world().rank)
    keys = [
        torch.stack([(one.num_rows * torch.rand(size, generator=random) ** 2).long() for one in TABLES], 1)
        for _ in range(count)
    ]
    none, layout = torch.empty(size, 0), Layout((), (), tuple(one.name for one in TABLES), ())
    return [Batch(layout, none, none, one, {}) for one in keys]


def misses(emb: ShardedCollection) -> int:
    return sum(one.cache.hits_and_misses()[1] for one in cached(emb))


def cached(emb: ShardedCollection) -> list[CachedStorage]:
    every = [storage for part in emb.parts() for storage in part.all_storages()]
    return [one for one in every if isinstance(one, CachedStorage) and one.tiers]


def train(cache: CacheSettings | None, ahead: int = 0, device: str = "cpu") -> tuple[dict[str, torch.Tensor], bool]:
    """Train; with batches ahead, no row may be fetched for a lookup that was not fetched before it."""
    emb = collection(cache, device)
    look_ahead = LookAhead(emb)
    assert look_ahead.exchanges == look_ahead.is_needed == (cache is not None)
    batches = [one.to(device) for one in make_batches(15)]
    num_ahead = 0
    for i, batch in enumerate(batches):
        if ahead:
            look_ahead.exchange(batches[i : i + 1 + ahead])
            fetched = look_ahead.announce(batch)
            num_ahead += all([fetched, *(look_ahead.announce(one) for one in batches[i + 1 : i + 1 + ahead])])
        before = misses(emb)
        flat = emb(batch).flat
        assert not ahead or not fetched or misses(emb) == before
        flat.tanh().sum().backward()
        scale = float(0.5 / emb.grad_norm_squared().sqrt().clamp_min(0.5))
        emb.step(lr=0.05, scale=scale)
        look_ahead.forget(batch)
    assert not ahead or num_ahead > 10
    found = {}
    for one in TABLES:
        content = emb.export_table(one.name)
        found |= {f"{one.name}.{name}": part for name, part in {"weight": content.weight, **content.state}.items()}
    return found, bool(cached(emb))


def compare() -> None:
    truth, in_tiers = train(None)
    assert not in_tiers
    found, in_tiers = train(CACHE)
    assert in_tiers
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name
    found, _ = train(CACHE, ahead=2)
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name
    no_rank_keeps_a_batch_that_one_cannot_read()
    rows_of_batches_that_are_let_go_leave_room()


def no_rank_keeps_a_batch_that_one_cannot_read() -> None:
    emb, group = collection(CACHE), Group.world()
    look_ahead, [good, last, unread] = LookAhead(emb), make_batches(3)
    keys = good.one_hot.clone()
    keys[3, 0] = 1_000 * (group.rank == 1)
    wrong = Batch(good.layout, good.dense, good.labels, keys, {})
    look_ahead.exchange([good, wrong, unread if group.rank else ValueError("unread"), last, None])
    assert look_ahead.announce(good)
    assert not look_ahead.announce(wrong)
    assert emb.batches_ahead.take(wrong) is None
    assert emb.batches_ahead.take(unread) is None
    assert look_ahead.announce(last)
    for one in (good, last):  # the ranks still run the same exchanges in the same order
        assert emb.batches_ahead.take(one) is not None
    look_ahead.end()
    if group.rank:
        with pytest.raises(KeyRangeError, match="user"):
            emb(wrong)


def rows_of_batches_that_are_let_go_leave_room() -> None:
    look_ahead, batches = LookAhead(collection(CACHE)), make_batches(60)
    for one in batches[:20]:
        look_ahead.exchange([one])
        assert look_ahead.announce(one)
        look_ahead.forget(one)
    look_ahead.exchange(batches[20:40])
    assert not all(look_ahead.announce(one) for one in batches[20:40])  # the rows of so many do not fit
    look_ahead.end()
    look_ahead.exchange(batches[40:])
    assert look_ahead.announce(batches[40])
    look_ahead.end()


def compare_staged() -> None:
    truth, _ = train(None)
    streams = use_staged(pytest.MonkeyPatch())
    found, in_tiers = train(CACHE, ahead=2)
    assert in_tiers
    assert streams[-1].num_jobs > 0
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name


def test_two_processes_that_move_rows_as_on_a_gpu_train_the_same_bits() -> None:
    processes.run(2, compare_staged)


def test_two_processes_train_the_bits_of_tables_in_memory() -> None:
    processes.run(2, compare)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("host_memory", [None, 4096])
def test_a_gpu_fetches_rows_for_batches_whose_keys_were_exchanged(host_memory: int | None, tmp_path: Path) -> None:
    truth, _ = train(None, device="cuda")
    cache = replace(CACHE, host_memory=host_memory, folder=tmp_path)
    found, in_tiers = train(cache, ahead=2, device="cuda")
    assert in_tiers
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name


def compare_on_gpus() -> None:
    device = f"cuda:{Group.world().rank}"
    truth, _ = train(None, device=device)
    for ahead in (0, 2):
        found, in_tiers = train(CACHE, ahead=ahead, device=device)
        assert in_tiers
        for name, part in truth.items():
            assert torch.equal(part, found[name]), (name, ahead)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_fetch_rows_for_batches_whose_keys_were_exchanged_over_nccl() -> None:
    processes.run(2, compare_on_gpus, backend="nccl")


def test_what_needs_whole_tables_is_refused() -> None:
    plan = Plan(world_size=1, tables=[{"table": one.name, "kind": "row", "ranks": [0]} for one in TABLES])
    with pytest.raises(ConfigError, match="cannot send distinct rows"):
        ShardedCollection(TABLES, FEATURES, Adam(), plan=plan, cache=CACHE, deduplicate_ids=True)
    with pytest.raises(ConfigError, match="dynamic shapes"):
        ShardedCollection(TABLES, FEATURES, Adam(), plan=plan, cache=CACHE, batch_size=12)
