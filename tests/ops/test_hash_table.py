"""The index of keys against a dict: random calls, growth, eviction in order, rows that are never shared."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from viviane.core.errors import VivianeError
from viviane.ops.hash_table import distinct, initial_rows, make_index, reference, reserved, stamp_of

EDGES = (-(2**63), 2**63 - 1, 0, -1, 2**31, -(2**31) - 1)
some_keys = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-40, 40)), max_size=60)


class IndexAgainstDict(RuleBasedStateMachine):
    """The same calls to the fast index, of small segments, and to the plain truth."""

    @initialize(
        order=st.sampled_from(["none", "stamp", "uses", "epoch_uses"]),
        max_rows=st.sampled_from([1, 7, 30, 200]),
        custom=st.booleans(),
    )
    def begin(self, order, max_rows, custom):
        uses = order in ("uses", "epoch_uses") or custom
        self.custom = custom
        self.fast = make_index(max_rows, order=order, with_uses=uses, segment_lines=4)
        self.truth = reference.Index(max_rows, order, uses)
        self.clock = self.epoch = 0
        self.guard = None

    def stamp(self):
        self.clock += 1
        return stamp_of(self.epoch, self.clock)

    def scores(self, count, data):
        if not self.custom:
            return None
        return torch.tensor(data.draw(st.lists(st.integers(-5, 5), min_size=count, max_size=count)), dtype=torch.int64)

    @rule(keys=some_keys, insert=st.booleans(), data=st.data())
    def use(self, keys, insert, data):
        keys, stamp = torch.tensor(keys, dtype=torch.int64), self.stamp()
        scores = self.scores(len(keys), data)
        found, expected = (index.touch(keys, stamp, scores) for index in (self.fast, self.truth))
        assert torch.equal(found, expected)
        if not insert:
            return
        missing = (found < 0).nonzero().squeeze(1)
        new, true = (
            index.insert(keys, rows, missing, stamp, guard=self.guard, scores=scores)
            for index, rows in ((self.fast, found), (self.truth, expected))
        )
        assert new.complete == true.complete
        assert torch.equal(new.rows, true.rows)
        assert torch.equal(new.entries, true.entries)
        assert torch.equal(found, expected)

    @rule(keys=some_keys, narrow=st.booleans())
    def find(self, keys, narrow):
        keys = torch.tensor([key for key in keys if not narrow or abs(key) < 2**31], dtype=torch.int64)
        own = keys.to(torch.int32) if narrow else keys
        assert torch.equal(self.fast.find(own), self.truth.find(keys))

    @rule(keys=some_keys)
    def erase(self, keys):
        keys = torch.tensor(keys, dtype=torch.int64)
        assert self.fast.erase(keys) == self.truth.erase(keys)

    @rule()
    def hold(self):
        self.guard = None if self.guard is not None else stamp_of(self.epoch, self.clock)

    @rule()
    def next_epoch(self):
        self.epoch += 1

    @rule(chance=st.integers(0, 9))
    def clear(self, chance):
        if chance == 0:
            self.fast.clear()
            self.truth.clear()

    @rule()
    def save_and_load(self):
        rows = self.fast.rows_in_use()
        uses = None if self.fast.uses is None else self.fast.uses[rows].clone()
        parts = (self.fast.keys[rows].clone(), rows, self.fast.stamps[rows].clone(), uses, self.fast.free_rows())
        self.fast.restore(*parts)
        self.truth.restore(*parts)

    @invariant()
    def same_content(self):
        if not hasattr(self, "fast"):
            return
        rows = self.truth.rows_in_use()
        assert len(self.fast) == len(self.truth) == len(rows)
        assert torch.equal(self.fast.rows_in_use(), rows)
        for name in ("keys", "stamps", "uses"):
            own, true = getattr(self.fast, name), getattr(self.truth, name)
            assert (own is None) == (true is None)
            if own is not None:
                assert torch.equal(own[rows], true[rows])
        assert self.fast.num_evicted == self.truth.num_evicted
        assert torch.equal(self.fast.free_rows(), self.truth.free_rows())
        assert torch.equal(self.fast.find(self.fast.keys[rows]), rows)


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def insert(index, keys, clock=1, **options):
    keys = torch.as_tensor(keys)
    stamp = stamp_of(0, clock)
    rows = index.touch(keys, stamp, options.get("scores"))
    added = index.insert(keys, rows, (rows < 0).nonzero().squeeze(1), stamp, **options)
    return rows, added


def test_growth_moves_one_segment_at_a_time_and_loses_nothing():
    index = make_index(100_000, segment_lines=256)
    keys = torch.randperm(100_000, generator=torch.Generator().manual_seed(0)) * 7919 - 400_000_000
    slots = []
    for start in range(0, 100_000, 100):
        insert(index, keys[start : start + 100])
        slots.append(index.num_slots)
    assert torch.equal(index.find(keys), torch.arange(100_000))
    grown = torch.tensor(slots).diff()
    # In a round a segment of 256 lines splits for every 256 * 4 / 5 = 205 new keys, so that 100 keys split one at most.
    assert int(grown.max()) == 256 * 5
    assert 8 / 25 <= len(index) / index.num_slots <= 16 / 25


def test_one_key_100_000_times():
    index = make_index(10, order="uses")
    rows, added = insert(index, torch.full((100_000,), -1))
    assert rows.eq(0).all()
    assert added.rows.tolist() == [0]
    assert index.uses[0] == 100_000
    insert(index, torch.full((100_000,), -1))
    assert index.uses[0] == 200_000


def test_the_same_on_any_number_of_threads(on_threads):
    keys = torch.randint(-50_000, 50_000, (200_000,), generator=torch.Generator().manual_seed(1))

    def run():
        index = make_index(70_000, order="uses", segment_lines=256)
        rows = [insert(index, part, clock)[0] for clock, part in enumerate(keys.split(20_000), 1)]
        return torch.cat([*rows, index.uses, index.stamps, index.find(keys)])

    first, *others = on_threads(run)
    for other in others:
        assert torch.equal(first, other)


def test_keys_that_are_in_the_call_or_under_guard_stay():
    index = make_index(3, order="stamp")
    insert(index, [1, 2, 3], 1)
    rows, added = insert(index, [1, 2, 4, 5], 2)
    assert rows.tolist() == [0, 1, 2, -1]
    assert not added.complete
    rows, added = insert(index, [6], 3, guard=stamp_of(0, 2))
    assert rows.tolist() == [-1]
    rows, added = insert(index, [6], 4)
    assert (rows.tolist(), added.complete, index.find(torch.tensor([1, 2, 4, 6])).tolist()) == (
        [0],
        True,
        [-1, 1, 2, 0],
    )


def test_a_score_that_falls_is_seen_at_once():
    index = make_index(3, order="uses")
    insert(index, [1, 2, 3], 1, scores=torch.tensor([10, 20, 30]))
    insert(index, [4], 2, scores=torch.tensor([40]))  # 1 goes
    index.touch(torch.tensor([3]), stamp_of(0, 3), torch.tensor([-1]))
    insert(index, [5], 4, scores=torch.tensor([50]))  # 3 goes, though it stood above 2
    assert index.find(torch.tensor([1, 2, 3, 4, 5])).tolist() == [-1, 1, -1, 0, 2]


def test_all_scores_stale_are_brought_up_to_date():
    index = make_index(5000, order="stamp")
    keys = torch.arange(5000)
    insert(index, keys, 1)
    insert(index, [-1], 2)  # 0 goes: the smallest row among equals
    index.touch(keys[2:], stamp_of(0, 3))
    insert(index, [-2], 4)  # 1 goes: the only one not used again but -1
    assert index.find(torch.tensor([0, 1, 2, -1, -2])).tolist() == [-1, -1, 2, 0, 1]
    insert(index, [-3], 5)
    assert index.find(torch.tensor([-1, -3])).tolist() == [-1, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_distinct_keys(dtype):
    edge = torch.iinfo(dtype)
    keys = torch.tensor([edge.max, 0, edge.min, -1, 0, edge.max], dtype=dtype)
    unique, inverse, counts = distinct(keys)
    assert unique.tolist() == [edge.max, 0, edge.min, -1]
    assert inverse.tolist() == [0, 1, 2, 3, 1, 0]
    assert counts.tolist() == [2, 2, 1, 1]
    assert [len(part) for part in distinct(keys[:0])] == [0, 0, 0]
    keys = torch.randint(-3000, 3000, (50_000,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for own, true in zip(distinct(keys), reference.distinct(keys), strict=True):
        assert torch.equal(own, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uniform", "normal", "constant"])
@pytest.mark.parametrize("dim", [1, 7, 33])
def test_initial_values_equal_the_formula(kind, dtype, dim):
    keys = torch.tensor([*EDGES, *range(50)])
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(0))[: len(keys)]
    own, true = (torch.full((100, dim), 9.0, dtype=dtype) for _ in range(2))
    for seed in (0, -5, 2**63 + 11):
        initial_rows(own, rows, keys, kind, -0.3, 0.7, seed)
        reference.initial_rows(true, rows, keys, kind, -0.3, 0.7, seed)
        if kind == "normal" and dtype == torch.float32:
            # A logarithm or cosine that differs in the last bit of float64 can move one rounding to float32.
            torch.testing.assert_close(own, true, rtol=2.0**-23, atol=0)
        else:
            assert torch.equal(own, true)
    assert own[rows[0]].ne(9).all()


def test_initial_values_have_their_law():
    keys = torch.arange(200_000)
    weight = torch.zeros(200_000, 2)
    initial_rows(weight, keys, keys, "normal", 1.0, 2.0, 3)
    # 400,000 draws: the mean is within 5 sigma / sqrt(n) = 0.016, the deviation within 5 sigma / sqrt(2 n) = 0.011.
    assert abs(float(weight.mean()) - 1) < 0.016
    assert abs(float(weight.std()) - 2) < 0.012
    initial_rows(weight, keys, keys, "uniform", -1.0, 1.0, 3)
    assert abs(float(weight.mean())) < 5 / (3 * 400_000) ** 0.5
    assert abs(float((weight[:, 0] * weight[:, 1]).mean())) < 5 / 3 / 200_000**0.5
    assert float(weight.min()) >= -1
    assert float(weight.max()) <= 1


def test_rows_of_a_row_far_out_and_many_threads(on_threads):
    rows, keys = torch.arange(40_000), torch.arange(40_000) * -(2**40)

    def run():
        weight = torch.zeros(40_000, 5)
        initial_rows(weight, rows, keys, "normal", 0.0, 1.0, 7)
        return weight

    first, *others = on_threads(run)
    assert all(torch.equal(first, other) for other in others)


def test_reserved_memory_is_zero_and_costs_nothing():
    memory = reserved(1 << 36, torch.int64)
    assert memory[(1 << 36) - 1] == 0
    part = memory[5:7]
    part[1] = 3
    del memory
    assert part.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: make_index(0), "at least one row"),
        (lambda: make_index(2**31), "too many rows"),
        (lambda: make_index(10, segment_lines=100), "power of two"),
        (lambda: distinct(torch.zeros(2)), "whole numbers"),
        (lambda: make_index(4).find(torch.zeros(2)), "whole numbers"),
        (lambda: make_index(4).erase(torch.zeros(2, 1).long()), "whole numbers"),
        (lambda: make_index(4).insert(*[torch.zeros(1).int()] * 3, 1), "rows and entries are int64"),
        (lambda: stamp_of(0, 2**32), "out of range"),
        (
            lambda: initial_rows(torch.zeros(1, 1), torch.zeros(1).long(), torch.zeros(1).long(), "x", 0, 0, 0),
            "no such",
        ),
        (lambda: insert(make_index(4), [1], scores=torch.tensor([1])), "keeps no scores"),
    ],
)
def test_errors(call, text):
    with pytest.raises(VivianeError, match=text):
        call()
