"""Dynamic tables against a dict: random calls, values and optimizer state by key."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from viviane.config import AdaGrad
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.ops.hash_table import initial_rows
from viviane.ops.row_update import Entries, update_rows

EDGES = (-(2**63), 2**63 - 1, 0, -1)
some_keys = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(-20, 20)), max_size=30)


def make(optimizer=None, seed=0, **options):
    options = {"name": "t", "dim": 3, "init": "normal", "initial_capacity": 1, **options}
    return DynamicTable(DynamicTableConfig(**options), optimizer or AdaGrad(), seed=seed)


def long(*keys):
    return torch.tensor(keys, dtype=torch.int64)


def first_values(table, keys):
    weight = torch.zeros(len(keys), table.table.dim, dtype=table.table.torch_dtype)
    initial_rows(weight, torch.arange(len(keys)), keys, *table.table.law, table._values.seed)
    return weight


class TableAgainstDict(RuleBasedStateMachine):
    """Values and optimizer state by key in a dict; what was evicted is asked of the table, in which order elsewhere."""

    @initialize(
        capacity=st.sampled_from([None, 35, 50]),
        eviction=st.sampled_from(["lru", "lfu", "epoch_lru", "epoch_lfu"]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        seed=st.integers(0, 2**31),
    )
    def begin(self, capacity, eviction, dtype, seed):
        when_full = "raise" if capacity is None else "evict"
        self.table = make(
            AdaGrad(initial_accumulator=0.5), seed=seed, max_capacity=capacity, eviction=eviction, dtype=dtype,
            when_full=when_full,
        )  # fmt: skip
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, keys):
        """Follow an insertion: new keys get initial values, evicted ones are forgotten."""
        for key in set(keys.tolist()) - self.values.keys():
            self.values[key] = first_values(self.table, long(key))[0]
            self.states[key] = torch.full((3,), 0.5)
        gone = set(self.values) - set(self.table.export().keys.tolist())
        assert not gone & set(keys.tolist())
        assert len(self.table) == len(self.values) - len(gone)
        for key in gone:
            del self.values[key], self.states[key]

    @rule(keys=some_keys)
    def find_or_insert(self, keys):
        rows = self.table.find_or_insert(long(*keys))
        self.add(long(*keys))
        for key, row in zip(keys, rows.tolist(), strict=True):
            assert torch.equal(self.table.weight[row], self.values[key])

    @rule(keys=some_keys)
    def insert_or_assign(self, keys):
        values = torch.randn(len(keys), 3, generator=self.generator)
        self.table.insert_or_assign(long(*keys), values)
        self.add(long(*keys))
        for key, value in zip(keys, values, strict=True):
            self.values[key] = value.to(self.table.weight.dtype)

    @rule(keys=some_keys)
    def assign(self, keys):
        values = torch.randn(len(keys), 3, generator=self.generator)
        there = self.table.assign(long(*keys), values)
        assert there.tolist() == [key in self.values for key in keys]
        for key, value in zip(keys, values, strict=True):
            if key in self.values:
                self.values[key] = value.to(self.table.weight.dtype)

    @rule(keys=some_keys)
    def accumulate(self, keys):
        deltas = torch.randn(len(keys), 3, generator=self.generator)
        there = self.table.accumulate(long(*keys), deltas)
        assert there.tolist() == [key in self.values for key in keys]
        for key in set(keys) & self.values.keys():
            total = torch.zeros(3)
            for n, other in enumerate(keys):
                total = total + deltas[n] if other == key else total
            self.values[key] = (self.values[key].float() + total).to(self.table.weight.dtype)

    @rule(keys=some_keys)
    def train(self, keys):
        rows = self.table.rows(long(*keys))
        self.add(long(*keys))
        gradient = torch.randn(len(keys), 3, generator=self.generator)
        self.table.keep_gradient(rows, gradient.view(-1))
        self.table.step(0.1)
        for key in set(keys):
            row = self.table.index.find(long(key))
            weight, state = self.values[key].unsqueeze(0).clone(), self.states[key].unsqueeze(0).clone()
            total = torch.zeros(3)
            for n, other in enumerate(keys):
                total = total + gradient[n] if other == key else total
            # One key's update by itself; its row's number only enters the rounding of 16 bits.
            update_rows(weight, {"accumulator": state}, Entries(long(0), total), AdaGrad(), lr=0.1, step=1)
            if weight.dtype == torch.float32:
                assert torch.equal(self.table.weight[row], weight)
            else:  # rounded up here, down there: one step of bfloat16
                torch.testing.assert_close(self.table.weight[row], weight, rtol=2.0**-7, atol=2.0**-130)
            assert torch.equal(self.table.state["accumulator"][row], state)
            self.values[key], self.states[key] = self.table.weight[row][0].clone(), state[0]

    @rule(keys=some_keys)
    def erase(self, keys):
        there = set(keys) & self.values.keys()
        assert self.table.erase(long(*keys)) == len(there)
        for key in there:
            del self.values[key], self.states[key]

    @precondition(lambda self: self.table.table.eviction.startswith("epoch"))
    @rule()
    def next_epoch(self):
        self.table.next_epoch()

    @rule()
    def save_and_load(self):
        saved = {name: part.clone() for name, part in self.table.state_dict().items()}
        before = self.table
        self.table = DynamicTable(before.table, before.rule)
        self.table._values.seed = before._values.seed
        self.table.load_state_dict(saved)

    @rule(chance=st.integers(0, 5))
    def clear(self, chance):
        if chance == 0:
            self.table.clear()
            self.values.clear()
            self.states.clear()

    @rule(keys=some_keys)
    def evaluate(self, keys):
        found, there = self.table.find(long(*keys))
        assert there.tolist() == [key in self.values for key in keys]
        for key, value in zip(keys, found, strict=True):
            assert torch.equal(value, self.values.get(key, torch.zeros(3, dtype=value.dtype)))

    @invariant()
    def same_content(self):
        if not hasattr(self, "table"):
            return
        content = self.table.export()
        assert len(set(content.keys.tolist())) == len(content.keys) == len(self.values) == len(self.table)
        for key, value, state in zip(content.keys.tolist(), content.weight, content.state["accumulator"], strict=True):
            assert torch.equal(value, self.values[key])
            assert torch.equal(state, self.states[key])
        rows = self.table.index.find(content.keys)
        assert len(set(rows.tolist())) == len(rows)  # never two keys one row
        assert self.table.capacity >= len(self.table)


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
