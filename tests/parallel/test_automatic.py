"""Automatic sharding plans, and how a plan in the solver is read."""

import numpy as np
import pytest

from viviane.config import SGD, Solver
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import (
    Group,
    ShardingPlan,
    TablePlan,
    Traffic,
    automatic,
    check_plan_names,
    choose_plan,
    join_processes,
    make_tables,
)
from viviane.parallel.automatic import own_kinds, own_plan
from viviane.parallel.costs import Machine

SLOW_LINK = Machine(8 * 10**9, 16.0, 1.0, 40.0, 0.5)


def table(name, rows, dim=16, **options):
    return TableConfig(name=name, num_rows=rows, dim=dim, **options)


def planned(tables, rule=None, size=2, kinds=None, traffic=None, machine=SLOW_LINK, monkeypatch=None):
    group = Group()
    group.size = size
    features = [FeatureConfig(name=one.name, table=one.name) for one in tables]
    monkeypatch.setattr(automatic, "measure_machine", lambda *_: machine)
    return choose_plan(tables, features, rule or SGD(), group, batch_size=1024, kinds=kinds, traffic=traffic)


def test_small_tables_are_copied_and_others_balanced(monkeypatch):
    sizes = {"day": 7, "a": 90_000, "b": 90_000, "c": 90_000, "d": 90_000}
    found = planned([table(*one) for one in sizes.items()], monkeypatch=monkeypatch)
    assert found.plan.table("day").kind == "replicated"
    assert sorted(found.plan.table(name).ranks for name in "abcd") == [(0,), (0,), (1,), (1,)]
    assert found.balance > 0.95
    assert "replicated: day" in found.words()


def test_what_no_device_holds_is_cut_and_kinds_are_obeyed(monkeypatch):
    tables = [table("huge", 1_000_000), table("mid", 100_000), DynamicTableConfig(name="raw", dim=4)]
    small = Machine(64_000_000, 10.0, 1.0, 20.0, 0.5)
    kinds = {one.table: one.kind for one in planned(tables, machine=small, size=3, monkeypatch=monkeypatch).plan.tables}
    assert kinds["huge"] in ("row", "column")
    assert kinds["raw"] == "table"
    asked = {"huge": "column", "mid": "replicated"}
    found = planned(tables, size=3, kinds=asked, monkeypatch=monkeypatch).plan
    assert [one.kind for one in found.tables] == ["column", "replicated", "table"]
    # Fewer rows or columns than processes: no shard may be empty.
    few = planned([table("t", 2, dim=2)], size=4, kinds={"t": "row"}, monkeypatch=monkeypatch).plan
    assert few.table("t").ranks == (0, 1)
    with pytest.raises(ConfigError, match="no such kind"):
        planned(tables, kinds={"mid": "rows"}, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match=r"not there[\s\S]*did you mean 'mid'"):
        planned(tables, kinds={"mit": "row"}, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="which rows are hot is not known"):
        planned(tables, kinds={"mid": "hybrid"}, monkeypatch=monkeypatch)


def test_frequencies_of_the_data_make_hot_rows():
    counts = [[int(rank), int(1e7 / rank)] for rank in np.unique(np.geomspace(1, 500_000, 200).round())]
    every = sum(int(1e7 / rank) for rank in range(1, 500_001))
    column = {"num_values": every, "num_missing": 0, "num_unknown": 0, "top_counts": counts}
    traffic = Traffic.of({"rows": 1_000_000, "columns": {"item": column}})
    assert traffic.hotness["item"] == pytest.approx(every / 1e6)
    for rank in (1_000, 10_000, 100_000):
        truth = sum(int(1e7 / r) for r in range(1, rank + 1)) / every
        assert traffic.hot_shares["item"][rank + 3] == pytest.approx(
            truth, abs=0.02
        )  # counts between ranks are guessed
    assert Traffic.of({}) == Traffic()
    assert Traffic.of({"rows": 3, "columns": {"generated": {"num_ids": 5}}}) == Traffic()
    # The same numbers, asked for by kind: the number of hot rows is the planner's.
    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        found = planned([table("item", 500_003)], kinds={"item": "hybrid"}, traffic=traffic, monkeypatch=inside)
    assert found.plan.table("item").num_hot in (1_003, 10_003, 100_003)


def test_dynamic_tables_spread(monkeypatch):
    tables = [DynamicTableConfig(name=f"t{i}", dim=4) for i in range(4)]
    assert sorted(one.ranks[0] for one in planned(tables, monkeypatch=monkeypatch).plan.tables) == [0, 0, 1, 1]


def test_one_process_gets_an_ordinary_collection_and_a_plan_for_others_is_refused():
    features = [FeatureConfig(name="a", table="a")]
    made = make_tables([table("a", 9)], features, SGD(), group=Group(), plan={"a": "row"})
    assert type(made) is EmbeddingCollection
    plan = ShardingPlan(world_size=2, tables=[TablePlan(table="a", kind="table", ranks=[1])])
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node 2"):
        make_tables([table("a", 9)], features, SGD(), plan=Solver(plan=plan).plan)
    assert Solver(plan=plan).plan == plan.to_dict() == Solver(**Solver(plan=plan).to_dict()).plan


def test_a_plan_of_other_tables_is_refused():
    check_plan_names("auto", ["item"])
    assert Solver(plan=None).plan == "auto"
    check_plan_names({"item": "row"}, ["item"])
    plan = ShardingPlan(world_size=1, tables=[TablePlan(table="itm", kind="replicated")]).to_dict()
    for given in (plan, {"itm": "row"}):
        with pytest.raises(ConfigError, match=r"solver.plan[\s\S]*did you mean 'item'"):
            check_plan_names(given, ["item"])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1000")
    monkeypatch.setenv("RANK", "999")
    monkeypatch.setenv("LOCAL_RANK", "999")
    with pytest.raises(ConfigError, match=r"more processes than GPUs"):
        join_processes("cuda")
    with pytest.raises(ConfigError, match=r"one GPU for all processes"):
        join_processes("cuda:1")


def test_a_plan_may_name_a_table_with_its_collection():
    tables = [table("item", 10), table("city", 10)]
    entries = [("emb.item", "row"), ("item", "table"), ("city", "replicated"), ("wide.item", "column")]
    ranks = {"row": [0, 1], "table": [0], "replicated": [], "column": [1]}
    plan = ShardingPlan(
        world_size=2, tables=[TablePlan(table=one, kind=kind, ranks=ranks[kind]) for one, kind in entries]
    )

    def kinds(name):
        return {one.table: one.kind for one in own_plan(plan.to_dict(), tables, name, 2).tables}

    assert kinds("emb") == {"item": "row", "city": "replicated"}
    assert kinds("wide") == {"item": "column", "city": "replicated"}
    assert kinds("other") == {"item": "table", "city": "replicated"}
    by_kind = {"emb.item": "row", "city": "table"}
    assert own_kinds(by_kind, tables, "emb") == {"item": "row", "city": "table"}
    assert own_kinds(by_kind, tables, "wide") == {"city": "table"}
    assert own_kinds("auto", tables, "emb") == {}


def test_columns_that_were_drawn_have_no_statistics():
    assert Traffic.of({"rows": 10, "columns": {"C1": {"cardinality": 7}}}) == Traffic()
