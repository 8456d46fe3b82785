"""Tables in tiers against the same tables in memory: every bit of rows and optimizer state."""

import gc
from typing import Any

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam, AdamW, Ftrl, Lamb, RMSProp, RowWiseAdam
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.cache_sizes import CacheSettings
from viviane.embedding.cached_storage import CachedStorage
from viviane.embedding.dynamic_content import DynamicContent
from viviane.store.slots import CacheFullError

ROWS = {"user": 400, "item": 300, "shop": 5}
BATCH = 16


def collection(share: float | None, optimizer: Any, dtype: str = "float32", **options: Any) -> EmbeddingCollection:
    tables = [
        TableConfig(name=name, num_rows=rows, dim=4, dtype=dtype, padding_id=0 if name == "item" else None, **options)
        for name, rows in ROWS.items()
    ]
    features = [
        FeatureConfig(name="u", table="user"),
        FeatureConfig(name="i", table="item", combiner="mean"),
        FeatureConfig(name="s", table="shop"),
        FeatureConfig(name="last", table="item", combiner="concat", max_length=3),
    ]
    cache = None
    if share is not None:
        rows = row_bytes(tables[0], optimizer)
        cache = CacheSettings(tables={n: max(1, round(ROWS[n] * share)) * rows for n in ("user", "item")})
    return EmbeddingCollection(tables, features, optimizer, seed=3, cache=cache)


def row_bytes(table: TableConfig, optimizer: Any) -> int:
    from viviane.embedding.cache_sizes import row_layout

    return row_layout(table, optimizer).row_bytes + 22


def batches(count: int, size: int = BATCH) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(5)

    def keys(table: str, count: int) -> torch.Tensor:
        return (ROWS[table] * torch.rand(count, generator=random) ** 3).long()

    found = []
    for _ in range(count):
        lengths = torch.randint(0, 3, (size,), generator=random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        bag = Bag(keys("item", int(lengths.sum())), offsets)
        found.append({"u": keys("user", size), "i": bag, "s": keys("shop", size), "last": bag})
    return found


def train(emb: EmbeddingCollection, given: list[dict[str, Any]], *, ahead: int = 0, clip: bool = True) -> list[float]:
    """Train on batches as the loop does, with so many of them announced before."""
    random = torch.Generator().manual_seed(9)
    losses = []
    waiting: list[dict[str, Any]] = []
    for i, batch in enumerate(given):
        for later in given[i : i + 1 + ahead]:
            if ahead and not any(later is one for one in waiting):
                if not emb.resolve_ahead(later):
                    break
                waiting.append(later)
        waiting = [one for one in waiting if one is not batch]
        out = emb(batch).flat
        loss = (out * torch.randn(out.shape[1], generator=random)).tanh().sum()
        loss.backward()
        scale = float(0.5 / emb.grad_norm_squared().sqrt().clamp_min(0.5)) if clip else 1.0
        emb.step(lr=0.05, scale=scale)
        losses.append(loss.item())
        if i % 3 == 0:
            with torch.no_grad():
                losses.append(emb.eval()(given[-1]).flat.sum().item())
            emb.train()
    emb.end_ahead()
    return losses


def content(emb: EmbeddingCollection) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in emb.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, part in one.items():
        assert torch.equal(part, other[name]), name


RULES = {
    "sgd": SGD(),
    "adagrad": AdaGrad(),
    "row-wise adagrad": AdaGrad(row_wise=True, initial_accumulator=0.1),
    "row-wise adam": RowWiseAdam(),
    "adamw": AdamW(),
    "rmsprop": RMSProp(),
    "lamb": Lamb(),
    "momentum": SGD(momentum=0.9),
    "adam": Adam(),
    "lazy adam": Adam(update="lazy_global"),
    "ftrl": Ftrl(),
}


SLOW = pytest.mark.slow
CASES = [
    pytest.param(rule, share, ahead, marks=() if (share, ahead) == (0.11, 2) or (rule, ahead) == ("adam", 0) else SLOW)
    for rule in RULES
    for share in (0.11, 0.3, 1.0)
    for ahead in (0, 2)
]


@pytest.mark.parametrize(("rule", "share", "ahead"), CASES)
def test_every_bit_is_that_of_tables_in_memory(rule: str, share: float, ahead: int) -> None:
    given = batches(25)
    truth, cached = collection(None, RULES[rule]), collection(share, RULES[rule])
    assert cached.has_tiers == (share < 1)
    assert train(truth, given) == train(cached, given, ahead=ahead)
    assert_equal(content(truth), content(cached))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_rows_of_16_bits_are_rounded_by_row_not_by_slot(rule: str, dtype: str) -> None:
    given = batches(20)
    truth, cached = collection(None, RULES[rule], dtype), collection(0.2, RULES[rule], dtype)
    assert train(truth, given) == train(cached, given, ahead=2)
    assert_equal(content(truth), content(cached))


def test_rows_of_16_bits_and_64_columns_take_the_fused_kernel() -> None:
    given = [torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    made = []
    for cache in (None, CacheSettings(memory=30 * (128 + 256 + 22))):
        table = TableConfig(name="t", num_rows=200, dim=64, dtype="float16")
        emb = EmbeddingCollection([table], [FeatureConfig(name="f", table="t")], AdaGrad(), cache=cache)
        for i, keys in enumerate(given):
            emb({"f": (keys + 13 * i) % 200}).flat.square().sum().backward()
            emb.step(lr=0.1)
        made.append(content(emb))
    assert_equal(*made)


def test_state_moves_between_both_kinds_of_storage() -> None:
    given = batches(20)
    truth, cached = collection(None, Adam()), collection(0.15, Adam())
    train(truth, given[:10])
    cached.load_state_dict(truth.state_dict())
    assert_equal(content(truth), content(cached))
    assert train(truth, given[10:]) == train(cached, given[10:])
    exported = cached.export_table("item")
    assert torch.equal(exported.weight, truth.table_rows("item"))
    assert exported.step == 20
    other = collection(0.15, Adam())
    for name in ROWS:
        other.import_table(name, cached.export_table(name))
    assert_equal(content(truth), content(other))
    other.copy_rows("user", torch.zeros(400, 4))
    assert not other.export_table("user").weight.any()
    assert torch.equal(other.export_table("user").state["m"], exported_state(truth, "user", "m"))


def exported_state(emb: EmbeddingCollection, table: str, name: str) -> torch.Tensor:
    return emb.export_table(table).state[name]


def test_a_batch_that_does_not_fit_names_the_size_and_changes_nothing() -> None:
    emb = collection(0.05, SGD())
    train(emb, batches(3, size=4))
    before = content(emb)
    big = {**batches(1, size=90)[0], "u": torch.arange(90)}
    with pytest.raises(CacheFullError, match=r"(?s)table 'user'.*90 distinct rows in use at once.*20 rows"):
        emb(big)
    assert_equal(before, content(emb))
    train(emb, batches(3, size=4))


def test_a_lookup_that_trains_nothing_may_be_larger_than_the_cache() -> None:
    truth, emb = collection(None, SGD()), collection(0.05, SGD())
    for one in (truth, emb):
        train(one, batches(6, size=4))
        one.eval()
    big = batches(1, size=300)[0]
    with torch.no_grad():
        assert torch.equal(truth(big).flat, emb(big).flat)
    assert_equal(content(truth), content(emb))


def test_rows_in_use_are_not_evicted() -> None:
    emb = collection(0.05, SGD())  # 20 users
    out = emb({**batches(1, size=15)[0], "u": torch.arange(15)})
    with pytest.raises(CacheFullError):  # the first batch waits for its step
        emb({**batches(1, size=15)[0], "u": torch.arange(100, 115)})
    out.flat.sum().backward()
    del out
    with pytest.raises(CacheFullError):
        emb({**batches(1, size=15)[0], "u": torch.arange(100, 115)})
    emb.step(lr=0.1)
    emb({**batches(1, size=15)[0], "u": torch.arange(100, 115)})


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=SLOW)])
def test_forwards_without_backward_take_no_more_memory(count: int) -> None:
    emb = collection(0.1, SGD())
    given = batches(10)
    for i in range(count):
        emb(given[i % 10])
    gc.collect()
    [storage] = [one for one in emb.all_storages() if isinstance(one, CachedStorage)]
    assert not storage._live
    assert not storage._leases


def test_a_cache_larger_than_its_table_is_the_table() -> None:
    emb = collection(7.0, SGD())
    assert not emb.has_tiers
    assert not any(isinstance(one, CachedStorage) for one in emb.all_storages())


def test_what_needs_the_whole_table_is_refused() -> None:
    emb = collection(0.2, SGD())
    with pytest.raises(ConfigError, match="lie in no one piece of memory"):
        emb.table_rows("user")
    with pytest.raises(ConfigError, match="needs the whole table in memory"):
        emb.all_rows("user")
    with pytest.raises(ConfigError, match="update='global'"):
        collection(0.2, Adam(update="global"))


def test_a_second_backward_after_the_step_is_refused() -> None:
    emb = collection(0.2, SGD())
    loss = emb(batches(1)[0]).flat.sum()
    loss.backward(retain_graph=True)
    emb.step(lr=0.1)
    with pytest.raises(ConfigError, match="whose step is over"):
        loss.backward()


def mixed(share: float | None) -> EmbeddingCollection:
    """Return a collection with dynamic tables, one-hot, of bags and of "concat", among those in tiers."""
    tables: list[TableConfig | DynamicTableConfig] = [
        TableConfig(name=name, num_rows=rows, dim=4) for name, rows in ROWS.items()
    ]
    admission = {"type": "count", "count": 2}
    tables += [
        DynamicTableConfig(name="seen", dim=4, max_capacity=40, when_full="evict", eviction="lfu", admission=admission),
        DynamicTableConfig(name="path", dim=4, padding_id=0),
    ]
    features = [
        FeatureConfig(name="s", table="seen"),
        FeatureConfig(name="u", table="user"),
        FeatureConfig(name="b", table="seen", combiner="mean"),
        FeatureConfig(name="p", table="path", combiner="concat", max_length=3),
        FeatureConfig(name="i", table="item", combiner="mean"),
        FeatureConfig(name="last", table="item", combiner="concat", max_length=3),
    ]
    cache = None
    if share is not None:
        size = row_bytes(TableConfig(name="x", num_rows=1, dim=4), Adam())
        cache = CacheSettings(tables={n: round(ROWS[n] * share) * size for n in ("user", "item")})
    return EmbeddingCollection(tables, features, Adam(), seed=3, cache=cache)


def test_rows_are_fetched_ahead_beside_dynamic_tables_whose_keys_wait_for_their_batch() -> None:
    given = [one | {"b": one["i"], "p": one["last"]} for one in batches(25)]
    truth, cached = mixed(None), mixed(0.4)
    assert cached.looks_ahead
    assert not truth.looks_ahead
    assert train(truth, given) == train(cached, given, ahead=2)
    for name in ("user", "item"):
        one, other = truth.export_table(name), cached.export_table(name)
        assert_equal({"weight": one.weight, **one.state}, {"weight": other.weight, **other.state})
    for name in ("seen", "path"):
        one, other = truth.dynamic_table(name).export(), cached.dynamic_table(name).export()
        assert len(one.keys) > 5
        assert_equal(as_tensors(one), as_tensors(other))

    [storage] = [one for one in cached.all_storages() if isinstance(one, CachedStorage) and one.tiers]
    bag = given[7]["i"]
    later = given[7] | {"i": Bag(bag.values // 2 + 140, bag.offsets), "p": Bag(bag.values + 1_000, bag.offsets)}
    counts, misses = len(cached.dynamic_table("path").export().keys), storage.cache.hits_and_misses()[1]
    assert cached.resolve_ahead(later)
    fetched = storage.cache.hits_and_misses()[1]
    assert fetched > misses
    assert len(cached.dynamic_table("path").export().keys) == counts
    cached(later)
    assert storage.cache.hits_and_misses()[1] == fetched
    assert len(cached.dynamic_table("path").export().keys) > counts


def as_tensors(content: DynamicContent) -> dict[str, torch.Tensor]:
    found = {name: getattr(content, name) for name in content.__dataclass_fields__}
    found |= found.pop("state")
    return {name: part for name, part in found.items() if isinstance(part, torch.Tensor)}
