"""Metrics over a catalogue against a plain reference, and on hostile input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, NumericsError, SchemaError
from viviane.retrieval import CatalogueMetrics, Histories, evaluate_vectors, leave_one_out


def plain(scores, wanted, seen, k, first=3):
    """Each metric by its definition, one row and one item at a time."""
    hr, recall, ndcg, mrr, shown = [], [], [], [], set()
    for row, want, had in zip(scores, wanted, seen, strict=True):
        items = [i for i in range(first, len(row)) if i in want or i not in had]
        ranks = []
        for w in want:
            better = sum(row[i] > row[w] for i in items)
            equal = sum(row[i] == row[w] for i in items if i != w)
            ranks.append(better + equal / 2)
        inside = [rank for rank in ranks if rank < k]
        hr.append(min(ranks) < k)
        recall.append(len(inside) / len(want))
        ideal = sum(1 / math.log2(i + 2) for i in range(min(k, len(want))))
        ndcg.append(sum(1 / math.log2(rank + 2) for rank in inside) / ideal)
        mrr.append(1 / (1 + min(ranks)))
        shown.update(sorted(items, key=lambda i: -row[i])[:k])
    means = {name: float(np.mean(one)) for name, one in
             ((f"hr@{k}", hr), (f"recall@{k}", recall), (f"ndcg@{k}", ndcg), ("mrr", mrr))}  # fmt: skip
    return means | {f"coverage@{k}": len(shown) / (scores.shape[1] - first)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
def test_equals_the_definitions(seed, k, ties):
    rng = np.random.default_rng(seed)
    rows, items = int(rng.integers(1, 6)), int(rng.integers(4, 14))
    scores = rng.integers(0, 4, (rows, items)).astype(float) if ties else rng.normal(size=(rows, items))
    wanted = [rng.choice(np.arange(3, items), rng.integers(1, items - 2), replace=False) for _ in range(rows)]
    seen = [rng.integers(0, items, rng.integers(0, 5)) for _ in range(rows)]
    metrics = CatalogueMetrics(items, [k])
    cut = int(rng.integers(0, rows + 1))  # in two batches
    for part in (slice(0, cut), slice(cut, rows)):
        if len(wanted[part]):
            metrics.add_scores(torch.tensor(scores[part]), Histories.of(wanted[part]), Histories.of(seen[part]))
    expected = plain(scores, wanted, seen, k)
    found = metrics.compute()
    if ties:  # which of equal items is shown is free
        expected.pop(f"coverage@{k}")
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name


def test_by_hand():
    scores = torch.tensor([[9.0, 9.0, 9.0, 5.0, 4.0, 3.0, 2.0]])
    metrics = CatalogueMetrics(7, [1, 2])
    metrics.add_scores(scores, Histories.of([[5]]), Histories.of([[3]]))
    # 3 is out: the list is 4, 5, 6; 5 stands second.
    found = metrics.compute()
    assert (found["hr@1"], found["hr@2"], found["mrr"]) == (0.0, 1.0, 0.5)
    assert found["ndcg@2"] == pytest.approx(1 / math.log2(3))
    assert (found["coverage@1"], found["coverage@2"]) == (0.25, 0.5)


def test_lists_and_scores_agree():
    rng = np.random.default_rng(0)
    scores, wanted = rng.normal(size=(20, 30)), Histories.of(rng.integers(3, 30, (20, 1)))
    whole, lists = CatalogueMetrics(30, [5]), CatalogueMetrics(30, [5])
    whole.add_scores(torch.tensor(scores), wanted)
    scores[:, :3] = -np.inf
    lists.add_lists(np.argsort(-scores, 1)[:, :8], wanted)
    for name in ("hr@5", "ndcg@5", "coverage@5"):
        assert whole.compute()[name] == pytest.approx(lists.compute()[name])


def test_vectors_in_batches_of_any_size(monkeypatch):
    rng = np.random.default_rng(1)
    users, items = rng.normal(size=(50, 4)), rng.normal(size=(20, 4))
    wanted, seen = Histories.of(rng.integers(3, 20, (50, 1))), Histories.of(rng.integers(0, 20, (50, 3)))
    first = evaluate_vectors(users.astype("float32"), items.astype("float32"), wanted, seen=seen, k=[3, 10])
    monkeypatch.setattr("viviane.retrieval.evaluation._MOST_SCORES", 7 * 20)
    assert evaluate_vectors(users.astype("float32"), items.astype("float32"), wanted, seen=seen, k=[3, 10]) == first


def test_wrong_input_is_refused():
    metrics = CatalogueMetrics(6, [2])
    with pytest.raises(SchemaError, match="one score per row and item"):
        metrics.add_scores(torch.zeros(1, 5), Histories.of([[3]]))
    with pytest.raises(NumericsError, match="NaN"):
        metrics.add_scores(torch.full((1, 6), torch.nan), Histories.of([[3]]))
    for item in (2, 6):
        with pytest.raises(SchemaError, match="not in the catalogue"):
            metrics.add_scores(torch.zeros(1, 6), Histories.of([[item]]))
    with pytest.raises(SchemaError, match="has no wanted item"):
        metrics.add_scores(torch.zeros(1, 6), Histories.of([[]]))
    with pytest.raises(ConfigError, match="shorter than k"):
        metrics.add_lists(np.array([[3]]), Histories.of([[3]]))
    with pytest.raises(ConfigError, match="no row"):
        metrics.compute()
    with pytest.raises(ConfigError, match="no items"):
        CatalogueMetrics(3)
    with pytest.raises(ConfigError, match="positive"):
        CatalogueMetrics(9, [0])


def test_histories():
    users = Histories.of([[3, 4, 5], [], [6, 7]])
    assert users.before_last(1).lists()[0].tolist() == [3, 4]
    assert users.padded(2).values.reshape(3, 2).tolist() == [[4, 5], [0, 0], [6, 7]]
    assert users.take([2, 0, 2]).values.tolist() == [6, 7, 3, 4, 5, 6, 7]
    before, item, user = leave_one_out(users, 2)
    assert (before.values.tolist(), item.tolist(), user.tolist()) == ([3], [4], [0])
    for wrong in ([3, 4], [["a"]], [[1.5]], [[[3]]], 7):
        with pytest.raises(SchemaError, match=r"a history must be a list of (integer )?item ids"):
            Histories.of(wrong)
    assert len(Histories.of([])) == 0
