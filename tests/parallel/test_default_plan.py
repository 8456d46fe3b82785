"""Where tables go when no one has said so, and how a plan in the solver is read."""

import pytest

from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.parallel import Group, Plan, TablePlan, check_plan_names, default_plan, join_processes, make_tables
from viviane.parallel.default_plan import MOST_REPLICATED, read_plan, table_bytes


def table(name, rows, dim=16, **options):
    return TableConfig(name=name, num_rows=rows, dim=dim, **options)


def test_bytes_count_the_state_of_the_rule():
    assert table_bytes(table("a", 10, 4), SGD()) == 10 * 4 * 4
    assert table_bytes(table("a", 10, 4), Adam()) == 10 * 4 * 4 * 3
    assert table_bytes(table("a", 10, 4, trainable=False), Adam()) == 10 * 4 * 4
    assert table_bytes(table("a", 10, 4, dtype="bfloat16", optimizer=SGD()), Adam()) == 10 * 4 * 2


def test_small_tables_are_copied_and_others_balanced():
    edge = MOST_REPLICATED // 16
    sizes = {"edge": edge, "over": edge + 1, "a": 90_000, "b": 80_000, "c": 70_000, "d": 60_000}
    plan = default_plan([table(*one) for one in sizes.items()], SGD(), 2)
    kinds = {one.table: (one.kind, one.ranks) for one in plan.tables}
    assert kinds["edge"] == ("replicated", ())
    # Largest first, to the emptier process: a | b, then c to b's, d to a's; over to the one with fewer rows.
    assert [kinds[name][1] for name in "abcd"] == [(0,), (1,), (1,), (0,)]
    assert kinds["over"] in (("table", (0,)), ("table", (1,)))


def test_what_no_device_holds_is_cut_and_kinds_are_obeyed():
    tables = [table("huge", 1_000_000), table("mid", 100_000), DynamicTableConfig(name="raw", dim=4)]
    plan = default_plan(tables, SGD(), 3, device_bytes=64_000_000)
    assert [one.kind for one in plan.tables] == ["row", "table", "table"]
    kinds = {"huge": "column", "mid": "replicated"}
    assert [one.kind for one in default_plan(tables, SGD(), 3, kinds=kinds).tables] == ["column", "replicated", "table"]
    # Fewer rows or columns than processes: no shard may be empty.
    few = default_plan([table("t", 2, dim=2)], SGD(), 4, kinds={"t": "row"})
    assert few.table("t").ranks == (0, 1)
    with pytest.raises(ConfigError, match="no such kind"):
        default_plan(tables, SGD(), 2, kinds={"mid": "rows"})
    with pytest.raises(ConfigError, match=r"not there[\s\S]*did you mean 'mid'"):
        default_plan(tables, SGD(), 2, kinds={"mit": "row"})


def test_dynamic_tables_spread():
    tables = [DynamicTableConfig(name=f"t{i}", dim=4) for i in range(4)]
    assert sorted(one.ranks[0] for one in default_plan(tables, SGD(), 2).tables) == [0, 0, 1, 1]


def test_one_process_gets_an_ordinary_collection_and_a_plan_for_others_is_refused():
    features = [FeatureConfig(name="a", table="a")]
    made = make_tables([table("a", 9)], features, SGD(), group=Group(), plan={"a": "row"})
    assert type(made) is EmbeddingCollection
    plan = Plan(world_size=2, tables=[TablePlan(table="a", kind="table", ranks=[1])])
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node 2"):
        make_tables([table("a", 9)], features, SGD(), plan=Solver(plan=plan).plan)
    assert Solver(plan=plan).plan == plan.to_dict() == Solver(**Solver(plan=plan).to_dict()).plan


def test_a_plan_of_other_tables_is_refused():
    check_plan_names(None, ["item"])
    check_plan_names({"item": "row"}, ["item"])
    plan = Plan(world_size=1, tables=[TablePlan(table="itm", kind="replicated")]).to_dict()
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
    plan = Plan(world_size=2, tables=[TablePlan(table=one, kind=kind, ranks=ranks[kind]) for one, kind in entries])
    group = Group()
    group.size = 2

    def kinds(given, name):
        return {one.table: one.kind for one in read_plan(given, tables, SGD(), group, "cpu", name).tables}

    assert kinds(plan.to_dict(), "emb") == {"item": "row", "city": "replicated"}
    assert kinds(plan.to_dict(), "wide") == {"item": "column", "city": "replicated"}
    assert kinds(plan.to_dict(), "other") == {"item": "table", "city": "replicated"}
    by_kind = {"emb.item": "row", "city": "table"}
    assert kinds(by_kind, "emb") == {"item": "row", "city": "table"}
    assert kinds(by_kind, "wide") == {"item": "replicated", "city": "table"}
