"""The planner: what fits, what is balanced, what it costs, and what it refuses."""

from dataclasses import replace

import pytest

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.parallel import TablePlan
from viviane.parallel.costs import Cost, Machine, joint_milliseconds, part_cost, table_loads
from viviane.parallel.planner import Planner

GPU = Machine(memory_bytes=141 * 10**9, memory_gb_per_s=3900.0, link_gb_per_s=360.0)
# MLPerf's 26 tables and mean numbers of ids.
SIZES = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
         11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36]  # fmt: skip
HOTNESS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
TABLES = [TableConfig(name=f"C{i}", num_rows=rows, dim=128) for i, rows in enumerate(SIZES)]
FEATURES = [FeatureConfig(name=f"C{i}", table=f"C{i}") for i in range(26)]
HOT = {f"C{i}": float(hotness) for i, hotness in enumerate(HOTNESS)}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_tables_of_mlperf_fit_and_are_balanced(size):
    found = Planner(TABLES, FEATURES, AdaGrad(), 32768, size, GPU, hotness=HOT).best()
    assert found.fits
    # One table of a hundred ids a row is half of all: cut, it costs its ids in every part, whole it is the slowest.
    assert found.balance > (0.9 if size == 2 else 0.7)
    assert {one.table for one in found.plan.tables} == {table.name for table in TABLES}
    found.plan.check({table.name: table for table in TABLES}, size)
    # The floor: all bytes, held and moved, shared out evenly.
    held = sum(found.total(rank).held for rank in range(size))
    assert held >= sum(load.bytes for load in Planner(TABLES, FEATURES, AdaGrad(), 1, size, GPU).loads.values())
    assert found.plan.table("C5").kind == "replicated"


@pytest.mark.parametrize("size", [32_768, 55_296])
def test_the_first_table_is_sharded_as_is_best_with_all_others(size):
    """By columns over two the largest table is cheapest at first, but two of four GPUs then wait for the others."""
    machine = replace(GPU, memory_gb_per_s=4096.0, link_gb_per_s=256.0, row_ns=0.1, call_ms=0.03, width_ms=0.06)
    machine = replace(machine, cache_bytes=30_000_000)
    found = Planner(TABLES, FEATURES, AdaGrad(), size, 4, machine, hotness=HOT, wire_bytes=2).best()
    assert found.plan.table("C20").kind == "row"
    assert found.balance > 0.95
    fixed = [TablePlan(table="C20", kind="column", ranks=[0, 1])]
    other = Planner(TABLES, FEATURES, AdaGrad(), size, 4, machine, hotness=HOT, wire_bytes=2, fixed=fixed).best()
    assert found.milliseconds < 0.97 * other.milliseconds


def test_more_processes_take_less_time():
    times = [
        Planner(TABLES, FEATURES, AdaGrad(row_wise=True), 32768, n, GPU, hotness=HOT).best().milliseconds
        for n in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_tables_that_do_not_fit_are_refused_with_the_bytes():
    with pytest.raises(ConfigError, match=r"do not fit[\s\S]*209\.\d GB[\s\S]*126\.9 GB on 1 process"):
        Planner(TABLES, FEATURES, AdaGrad(), 32768, 1, GPU, hotness=HOT).best()


@pytest.mark.parametrize("size", [2, 4])
def test_tables_that_do_not_fit_are_spread_evenly_where_rows_may_lie_in_tiers(size):
    small = Machine(4 * 10**9, GPU.memory_gb_per_s, GPU.link_gb_per_s)
    found = Planner(TABLES, FEATURES, AdaGrad(), 32768, size, small, hotness=HOT, tiers=True).best()
    held = [found.total(rank).held for rank in range(size)]
    assert max(held) <= 1.11 * sum(held) / size  # 1.1, and the copies of small tables
    assert max(held) > 4 * 10**9


def test_dynamic_tables_that_do_not_fit_are_refused_with_tiers_too():
    machine = Machine(10**8, GPU.memory_gb_per_s, GPU.link_gb_per_s)
    tables = [DynamicTableConfig(name=name, dim=64, initial_capacity=10**6) for name in ("user", "item")]
    features = [FeatureConfig(name=table.name, table=table.name) for table in tables]
    with pytest.raises(ConfigError, match="do not fit"):
        Planner(tables, features, SGD(), 1024, 2, machine, tiers=True).best()
    elsewhere = [table.model_copy(update={"memory": "file"}) for table in tables]
    found = Planner(elsewhere, features, SGD(), 1024, 2, machine, tiers=True).best()
    assert found.fits
    assert [found.total(rank).held for rank in range(2)] == [64e6, 64e6]  # the keys alone


def test_rows_of_a_dynamic_table_count_where_the_device_holds_them():
    row, keys = 4 * 8 * 3, 64 * 1000
    places = {"device": row * 1000, "split": row * 10, "host": 0, "file": 0}
    for memory, expected in places.items():
        rows = 10 if memory == "split" else None
        table = DynamicTableConfig(name="t", dim=8, initial_capacity=1000, memory=memory, device_rows=rows)
        [load] = table_loads({"t": table}, [FeatureConfig(name="t", table="t")], Adam(), 1024, {}, {})
        assert load.bytes == expected + keys, memory


def test_tiers_change_no_plan_of_tables_that_fit():
    plans = [Planner(TABLES, FEATURES, AdaGrad(), 32768, 4, GPU, hotness=HOT, tiers=one).best().plan for one in (0, 1)]
    assert plans[0] == plans[1]


def test_a_table_larger_than_a_device_is_cut_and_by_rows_where_the_rule_needs_them():
    machine = Machine(10**9, 3900.0, 360.0)
    table, feature = TableConfig(name="t", num_rows=10**7, dim=32), FeatureConfig(name="f", table="t")
    assert Planner([table], [feature], SGD(), 1024, 2, machine).best().plan.table("t").kind in ("column", "row")
    rule = SGD(clip_row_norm=1.0)
    assert Planner([table], [feature], rule, 1024, 2, machine).best().plan.table("t").kind == "row"


def test_hot_rows_are_looked_up_at_home():
    table, feature = TableConfig(name="t", num_rows=10_000, dim=4), FeatureConfig(name="f", table="t")
    (load,) = table_loads({"t": table}, [feature], SGD(), 100, {}, {"t": {1000: 1.0}})
    # All lookups are hot: half of 100 are here, and touch 1000 (1 - e^-0.05) = 48.77 rows. Forward reads 50 rows of 16
    # bytes and writes 100 vectors, backward reads 50 gradients, reads and writes 48.77 rows; the summed matrix of 1000
    # rows and 5 columns is written, reduced and read. Of the other rows 100 vectors of zeros are written.
    hybrid = part_cost(load, "hybrid", 2, 2, num_hot=1000)
    local = 50 * 16 + 100 * 16 + 50 * 16 + 2 * 48.7706 * 16 + 3 * 4 * 1000 * 5
    assert hybrid.memory == pytest.approx(local + 100 * 16, rel=1e-5)
    assert hybrid.held == 1000 * 16 + 10_000 * 16 / 2
    fixed = [TablePlan(table="t", kind="hybrid", ranks=[0, 1], num_hot=1000)]
    assert Planner([table], [feature], SGD(), 100, 2, GPU, fixed=fixed).best().plan.table("t").num_hot == 1000


def test_dynamic_tables_stay_whole_and_given_plans_are_kept():
    tables = [
        DynamicTableConfig(name="user", dim=8, max_capacity=10**6),
        TableConfig(name="item", num_rows=10**6, dim=8),
    ]
    features = [FeatureConfig(name=name, table=name) for name in ("user", "item")]
    fixed = [TablePlan(table="item", kind="column", ranks=[1, 0])]
    plan = Planner(tables, features, Adam(), 1024, 2, GPU, fixed=fixed).best().plan
    assert plan.table("user").kind == "table"
    assert plan.table("item").ranks == (1, 0)
    with pytest.raises(ConfigError, match="not there"):
        Planner(tables, features, Adam(), 1024, 2, GPU, fixed=[TablePlan(table="x", kind="replicated")])


def test_bytes_of_one_table_by_hand():
    table, feature = TableConfig(name="t", num_rows=1000, dim=4), FeatureConfig(name="f", table="t")
    (load,) = table_loads({"t": table}, [feature], Adam(), 100, {"f": 2.0}, {})
    assert (load.bytes, load.lookups, load.vectors) == (1000 * 4 * (4 + 8), 200.0, 100.0)
    # Of 1000 rows 200 even draws touch 1000 (1 - e^-0.2) = 181.27. Forward: 200 rows of 16 bytes read, 100 vectors of
    # 16 bytes written. Backward: 200 gradients of 16 bytes read, 181.27 rows of 16 + 32 bytes read and written.
    alone = part_cost(load, "table", 1, 1)
    assert alone.memory == pytest.approx(200 * 16 + 100 * 16 + 200 * 16 + 2 * 181.269 * 48, rel=1e-5)
    assert alone.wire == 0.0
    # Of four processes three are elsewhere: their ids of 4 bytes come in, vectors go out, gradients come in.
    assert part_cost(load, "table", 1, 4).wire == pytest.approx(0.75 * (200 * 4 + 2 * 100 * 16))


def test_every_part_of_columns_pays_for_all_ids():
    table, feature = TableConfig(name="t", num_rows=1000, dim=8), FeatureConfig(name="f", table="t")
    (load,) = table_loads({"t": table}, [feature], SGD(), 100, {"f": 5.0}, {})
    whole, half, quarter = (
        part_cost(load, kind, parts, 4) for kind, parts in (("table", 1), ("column", 2), ("column", 4))
    )
    ids = 0.75 * 500 * 4
    assert whole.rows == half.rows == quarter.rows == 500
    # Vectors and gradients are shared out, the 500 ids of 4 bytes are not.
    assert [one.wire - ids for one in (half, quarter)] == pytest.approx([(whole.wire - ids) / n for n in (2, 4)])
    assert [one.memory for one in (half, quarter)] == pytest.approx([whole.memory / n for n in (2, 4)])


def test_a_table_of_many_ids_is_cut_into_few_columns():
    """Where looking a row up costs more than its bytes, fewer parts are better than all of them."""
    tables = [TableConfig(name=name, num_rows=10**6, dim=64) for name in ("a", "b", "c", "d")]
    features = [FeatureConfig(name=table.name, table=table.name) for table in tables]
    hotness = {"a": 40.0, "b": 12.0, "c": 2.0, "d": 2.0}
    machine = Machine(10**12, 3900.0, 360.0, row_ns=0.1)

    def planned(count):
        fixed = [TablePlan(table="a", kind="column" if count > 1 else "table", ranks=range(count))]
        return Planner(tables, features, SGD(), 8192, 4, machine, hotness=hotness, fixed=fixed).best()

    whole, halves, quarters = map(planned, (1, 2, 4))
    assert "column over 2: a" in halves.words()
    assert halves.milliseconds < min(whole.milliseconds, quarters.milliseconds)
    # Rows over all: an id whose row is another part's costs half of one whose row is found.
    best = Planner(tables, features, SGD(), 8192, 4, machine, hotness=hotness).best()
    assert best.plan.table("a").kind == "row"
    assert best.milliseconds < halves.milliseconds
    assert best.costs[0]["a"].rows == 8192 * 40 * (1 + 3 / 2) / 4


def test_processes_wait_for_the_slowest_lookup_and_for_the_one_that_sends_most():
    reads, sends = Cost(memory=3e6, wire=1e6), Cost(memory=1e6, wire=2e6)
    machine = Machine(10**9, memory_gb_per_s=1.0, link_gb_per_s=1.0)
    assert joint_milliseconds([reads, sends], machine) == 3 + 2
    assert joint_milliseconds([reads, sends], replace(machine, shares_link=True)) == 3 + 1.5


def test_rows_and_gradients_that_fit_into_a_cache_are_read_once():
    table, feature = TableConfig(name="t", num_rows=10, dim=4), FeatureConfig(name="f", table="t")
    (load,) = table_loads({"t": table}, [feature], SGD(), 100, {"f": 5.0}, {})
    # 500 even draws touch all 10 rows of 16 bytes; 100 vectors are written, and 100 gradients read for 500 ids.
    far, near = (part_cost(load, "table", 1, 1, cache_bytes=size).memory for size in (0, 10_000))
    assert far == pytest.approx((500 + 100 + 500) * 16 + 2 * 10 * 16)
    assert near == pytest.approx((10 + 100 + 100) * 16 + 2 * 10 * 16)
    assert part_cost(load, "table", 1, 1, cache_bytes=200).memory == pytest.approx(far - (500 - 10) * 16)


def test_sums_cost_more_than_what_is_only_sent_where_the_machine_says_so():
    table, feature = TableConfig(name="t", num_rows=1000, dim=4), FeatureConfig(name="f", table="t")
    (load,) = table_loads({"t": table}, [feature], SGD(), 100, {}, {})
    cost = part_cost(load, "replicated", 1, 2)
    # The matrix of 1000 rows and 5 columns of 4 bytes: each process sends half of it twice.
    assert (cost.wire, cost.sums) == (0.0, 20_000.0)
    machines = [Machine(10**9, 1e9, 1.0, sum_ratio=ratio) for ratio in (1.0, 2.0)]
    times = [cost.milliseconds(machine) for machine in machines]
    assert times == pytest.approx([0.02, 0.04], rel=1e-3)
    planner = Planner(
        [table], [feature], SGD(), 100, 2, replace(machines[1], shares_link=True), kinds={"t": "replicated"}
    )
    assert planner.best().milliseconds == pytest.approx(0.04, rel=1e-3)
