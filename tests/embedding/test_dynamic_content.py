"""What a dynamic table carries out and in: exports since a time, imports, saved state that continues bit by bit."""

import copy
import dataclasses
import pickle

import pytest
import torch

from viviane.config import SGD, Adam
from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig


def make(optimizer=None, seed=0, **options):
    return DynamicTable(DynamicTableConfig(**{"name": "t", "dim": 3, **options}), optimizer or Adam(), seed=seed)


def train(table, steps, seed=0, span=60):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        keys = torch.randint(-span, span, (12, 2), generator=generator)
        target = torch.randn(12, 2, 3, generator=generator)
        out = table(keys)
        (out - target).square().sum().backward()
        table.step(0.05)


def same(one, other):
    assert one.keys() == other.keys()
    for name, part in one.items():
        assert torch.equal(part, other[name]), name


ADMISSIONS = [
    None,
    {"type": "count", "count": 2, "max_pending": 20},
    {"type": "probability", "probability": 0.5},
    {"type": "filter", "count": 2, "width": 64},
]


@pytest.mark.parametrize("admission", ADMISSIONS, ids=lambda one: str(one and one["type"]))
@pytest.mark.parametrize("eviction", ["lru", "epoch_lfu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_table_goes_on_bit_by_bit(admission, eviction, dtype):
    options = {"admission": admission, "eviction": eviction, "dtype": dtype, "max_capacity": 40, "when_full": "evict"}
    table, other = make(**options), make(**options)
    train(table, 20)
    table.erase(torch.arange(-60, 60, 3))
    saved = {name: part.clone() for name, part in table.state_dict().items()}
    other.load_state_dict(saved)
    same(saved, other.state_dict())
    train(table, 20, seed=1)
    train(other, 20, seed=1)
    same(table.state_dict(), other.state_dict())


def test_export_since_a_time_carries_what_changed():
    table, copy = make(), make()
    train(table, 5)
    copy.import_(table.export())
    before = table.clock
    train(table, 2, seed=9)
    changed = table.export(since=before)
    assert 0 < len(changed.keys) < len(table)
    assert changed.clocks.min() > before
    copy.import_(changed)
    one, other = table.export(), copy.export()
    order, place = one.keys.argsort(), other.keys.argsort()
    assert torch.equal(one.keys[order], other.keys[place])
    assert torch.equal(one.weight[order], other.weight[place])
    assert torch.equal(one.state["v"][order], other.state["v"][place])
    assert len(table.export(since=table.clock).keys) == 0


def test_export_is_a_copy():
    table = make()
    train(table, 1)
    content = table.export()
    before = content.weight.clone()
    train(table, 3)
    assert torch.equal(content.weight, before)


def test_an_import_without_state_begins_anew():
    table, other = make(), make()
    train(table, 3)
    train(other, 3)
    other.import_(dataclasses.replace(table.export(), state={}))
    assert other.export().state["m"].eq(0).all()


@pytest.mark.parametrize("eviction", ["lfu", "epoch_lfu", "custom"])
def test_uses_and_scores_are_taken_over(eviction):
    table, other = (make(eviction=eviction, max_capacity=10, when_full="evict") for _ in range(2))
    scores = torch.tensor([4, 3, 2]) if eviction == "custom" else None
    table.rows(torch.tensor([5, 6, 6]), scores=scores)
    other.import_(table.export())
    assert torch.equal(other.export().scores, table.export().scores)
    assert other.export().scores.tolist() == ([4, 2] if scores is not None else [1, 2])


def test_content_that_does_not_fit_is_refused():
    table, other = make(), make(SGD(momentum=0.5))
    train(table, 1)
    with pytest.raises(CheckpointError, match="another optimizer's state"):
        other.import_(table.export())
    with pytest.raises(CheckpointError, match="the shape differs"):
        make(dim=2).import_(table.export())
    with pytest.raises(RuntimeError, match="has shape"):
        make(dim=2).load_state_dict(table.state_dict())
    with pytest.raises(RuntimeError, match="do not fit into max_capacity 3"):
        make(max_capacity=3).load_state_dict(table.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(table.state_dict())
    table(torch.tensor([1]))
    with pytest.raises(ConfigError, match="cannot load"):
        table.load_state_dict(table.state_dict())


def test_inside_a_module():
    model = torch.nn.Sequential(make(), torch.nn.Linear(3, 1))
    model(torch.tensor([3, -4])).sum().backward()
    model[0].step(0.1)
    assert {"0.keys", "0.weight", "0.state.m", "1.weight"} <= model.state_dict().keys()
    other = torch.nn.Sequential(make(), torch.nn.Linear(3, 1))
    other.load_state_dict(model.state_dict())
    keys = torch.tensor([3, -4, 5])
    assert torch.equal(model.eval()(keys), other.eval()(keys))
    assert list(model[0].parameters()) == []


def saved_table(**options):
    settings = DynamicTableConfig(name="t", dim=2, max_capacity=8, admission={"type": "count", "count": 2}, **options)
    table = DynamicTable(settings, SGD())
    table(torch.tensor([5, 6, 7, 5, 6, 7, 8])).sum().backward()
    table.step(0.1)
    table.erase(torch.tensor([6]))
    return table, {name: part.clone() for name, part in table.state_dict().items()}


@pytest.mark.parametrize("name", ["rows", "free", "admission.rows", "admission.free"])
@pytest.mark.parametrize("number", [2**40, -1, 7, -(2**63)])
def test_rows_of_a_saved_table_that_lie_outside_are_refused(name, number):
    table, saved = saved_table()
    if not len(saved[name]):
        saved[name] = torch.tensor([0])
    saved[name][0] = number
    with pytest.raises(RuntimeError, match=r"the numbers from 0|keys"):
        table.load_state_dict(saved)
    assert len(table) == 2


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", torch.tensor([0, 0])),
        ("keys", torch.tensor([5, 5])),
        ("keys", torch.tensor([5, 6, 7])),
        ("keys", torch.tensor([5.0, 7.0])),
        ("stamps", torch.tensor([1])),
        ("stamps", torch.tensor([-1, 1])),
        ("free", torch.tensor([[1]])),
        ("counters", torch.tensor([1, 2])),
        ("counters", torch.tensor([-1, 0, 0])),
    ],
)
def test_parts_of_a_saved_table_that_do_not_fit_are_refused(name, wrong):
    table, saved = saved_table()
    with pytest.raises(RuntimeError):
        table.load_state_dict(saved | {name: wrong})
    assert table.find(torch.tensor([5, 6, 7]))[1].tolist() == [True, False, True]
    table.load_state_dict(saved)


@pytest.mark.parametrize("memory", ["host", "file"])
@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_copies_go_on_with_the_same_bits_and_are_independent(make_copy, memory, tmp_path):
    options = {"memory": "file"} if memory == "file" else {}
    settings = DynamicTableConfig(name="user", dim=4, max_capacity=1 << 30, **options)
    one = DynamicTable(settings, Adam(), seed=3, folder=tmp_path)
    draw = torch.Generator().manual_seed(1)

    def train(table, keys):
        (table(keys) * torch.arange(1.0, 5.0)).sum().backward()
        table.step(lr=0.1)

    def content(table):
        return {name: value.clone() for name, value in table.state_dict().items()}

    for _ in range(3):
        train(one, torch.randint(-(2**62), 2**62, (50,), generator=draw))
    other = make_copy(one)
    assert content(one).keys() == content(other).keys()
    assert all(torch.equal(value, content(other)[name]) for name, value in content(one).items())
    before = content(one)
    more = torch.cat([torch.randint(0, 2**62, (20,), generator=draw), one.export().keys[:10]])
    train(other, more)
    assert all(torch.equal(value, before[name]) for name, value in content(one).items())
    train(one, more)
    assert all(torch.equal(value, content(other)[name]) for name, value in content(one).items())
    assert make_copy(one.eval()).training is False
    one.train()(more)
    with pytest.raises(ConfigError, match="cannot copy the table while looked-up rows wait"):
        make_copy(one)


def test_content_with_a_key_twice_is_refused_and_changes_nothing():
    table = make()
    train(table, 3)
    content, before = table.export(), table.state_dict()
    twice = dataclasses.replace(content, keys=torch.cat([content.keys[:-1], content.keys[:1]]))
    with pytest.raises(
        CheckpointError, match=r"a key occurs twice\n  where:   table 't', keys\n  value: +" + str(int(content.keys[0]))
    ):
        table.import_(twice)
    same(table.state_dict(), before)
