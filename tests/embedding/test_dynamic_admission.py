"""Which keys get rows: counted by hand, by coin, by sketch; what the others read and that they are not trained."""

import torch

from viviane.config import SGD
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig


def make(admission, **options):
    options = {"name": "t", "dim": 2, "init": {"type": "constant", "value": 1.0}, **options}
    return DynamicTable(DynamicTableConfig(admission=admission, **options), SGD())


def seen(table, *keys):
    table.rows(torch.tensor(keys))
    table.release()
    return sorted(table.export().keys.tolist())


def test_by_count():
    table = make({"type": "count", "count": 3})
    assert seen(table, 1, 2, -(2**63)) == []
    assert seen(table, 1, 2, 1) == [1]  # three times by the end of this batch
    assert seen(table, 3, 3) == [1]
    assert seen(table, 3) == [1, 3]
    table.erase(torch.tensor([1]))
    assert seen(table, 1, 1) == [3]  # counted from the start
    assert seen(table, 1, -(2**63), -(2**63)) == [-(2**63), 1, 3]


def test_by_count_remembers_the_latest_only():
    table = make({"type": "count", "count": 2, "max_pending": 2})
    assert seen(table, 1) == []
    assert seen(table, 2) == []
    assert seen(table, 3) == []  # 1 is forgotten
    assert seen(table, 1) == []  # and 2
    assert seen(table, 3) == [3]


def test_all_entries_of_an_admitted_key_get_its_row():
    table = make({"type": "count", "count": 2}, absent="initial")
    rows = table.rows(torch.tensor([8, 9, 8]))
    assert rows[0] == rows[2] == 0
    assert rows[1] >= table.capacity


def test_keys_that_wait_read_the_default_and_are_not_trained():
    for absent, value in (("zero", 0.0), ("initial", 1.0)):
        table = make({"type": "count", "count": 2}, absent=absent)
        keys = torch.tensor([8, 9, 8])
        out = table(keys)
        assert out.tolist() == [[1.0, 1.0], [value, value], [1.0, 1.0]]
        out.sum().backward()
        table.step(0.25)
        assert table(keys).tolist() == [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]
        assert table.storage[table.null_row : table.null_row + 2].eq(0).all()


def test_by_filter_never_late():
    table = make({"type": "filter", "count": 3, "width": 1 << 16})
    assert seen(table, 1, 2, 1) == []
    assert seen(table, 1) == [1]
    assert seen(table, 2) == [1]
    assert seen(table, 2) == [1, 2]
    # A narrow sketch lets keys in early, and none late.
    narrow = make({"type": "filter", "count": 3, "width": 4, "depth": 2})
    keys = torch.arange(50)
    for _ in range(3):
        narrow.rows(keys)
        narrow.release()
    assert len(narrow) == 50


def test_by_filter_is_right_for_most_keys():
    table = make({"type": "filter", "count": 2, "width": 1 << 14, "depth": 4})
    table.rows(torch.arange(2000))
    # A key comes in early where all 4 counters are shared: (2000 / 16384)^4 = 2.2e-4 of 2000 keys, 0.4 in the mean;
    # more than 5 have odds of about 1e-5, and the keys are fixed.
    assert len(table) <= 5


def test_by_probability():
    table = make({"type": "probability", "probability": 0.25})
    keys = torch.arange(10_000)
    table.rows(keys)
    # Binomial: mean 2500, deviation 43.
    assert abs(len(table) - 2500) < 5 * 43
    again = make({"type": "probability", "probability": 0.25})
    again.rows(keys.flip(0))
    assert set(again.export().keys.tolist()) == set(table.export().keys.tolist())
    table.release()
    table.rows(keys)  # a new coin
    assert abs(len(table) - 10_000 * (1 - 0.75**2)) < 5 * 50


def test_insertion_by_hand_needs_no_admission():
    table = make({"type": "count", "count": 9})
    table.insert_or_assign(torch.tensor([4]), torch.zeros(1, 2))
    assert table.find_or_insert(torch.tensor([5])).tolist() == [1]
    assert len(table) == 2
    table.clear()
    assert len(table) == 0
