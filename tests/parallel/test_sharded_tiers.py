"""Tables in tiers over two processes: every bit of the same tables in memory over two processes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
import processes
from staged import use_staged

from viviane.config import Adam
from viviane.core.errors import ConfigError
from viviane.embedding import CachedStorage, CacheSettings, FeatureConfig, TableConfig
from viviane.parallel import Group, Plan, ShardedCollection

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


def train(cache: CacheSettings | None) -> tuple[dict[str, torch.Tensor], bool]:
    group = Group.world()
    emb = ShardedCollection(TABLES, FEATURES, Adam(), plan=Plan(world_size=2, tables=KINDS), group=group, cache=cache)
    random = torch.Generator().manual_seed(group.rank)
    for _ in range(15):
        batch = {one.name: (one.num_rows * torch.rand(12, generator=random) ** 2).long() for one in TABLES}
        emb(batch).flat.tanh().sum().backward()
        scale = float(0.5 / emb.grad_norm_squared().sqrt().clamp_min(0.5))
        emb.step(lr=0.05, scale=scale)
    found = {}
    for one in TABLES:
        content = emb.export_table(one.name)
        found |= {f"{one.name}.{name}": part for name, part in {"weight": content.weight, **content.state}.items()}
    storages = [storage for part in emb.parts() for storage in part.all_storages()]
    return found, any(isinstance(storage, CachedStorage) and storage.tiers for storage in storages)


def compare() -> None:
    truth, in_tiers = train(None)
    assert not in_tiers
    found, in_tiers = train(CACHE)
    assert in_tiers
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name


def compare_staged() -> None:
    truth, _ = train(None)
    streams = use_staged(pytest.MonkeyPatch())
    found, in_tiers = train(CACHE)
    assert in_tiers
    assert streams[-1].num_jobs > 0
    for name, part in truth.items():
        assert torch.equal(part, found[name]), name


def test_two_processes_that_move_rows_as_on_a_gpu_train_the_same_bits() -> None:
    processes.run(2, compare_staged)


def test_two_processes_train_the_bits_of_tables_in_memory() -> None:
    processes.run(2, compare)


def test_what_needs_whole_tables_is_refused() -> None:
    plan = Plan(world_size=1, tables=[{"table": one.name, "kind": "row", "ranks": [0]} for one in TABLES])
    with pytest.raises(ConfigError, match="cannot send distinct rows"):
        ShardedCollection(TABLES, FEATURES, Adam(), plan=plan, cache=CACHE, deduplicate_ids=True)
    with pytest.raises(ConfigError, match="dynamic shapes"):
        ShardedCollection(TABLES, FEATURES, Adam(), plan=plan, cache=CACHE, batch_size=12)
