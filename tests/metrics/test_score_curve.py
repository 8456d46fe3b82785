import numpy as np
import torch
from sklearn.metrics import auc, average_precision_score, roc_auc_score

from viviane.metrics import ScoreCurve


def area(points):
    x, y = np.array(points).T
    return auc(x, y)


def test_areas_below_the_curves_equal_scikit_learns():
    chance = np.random.default_rng(0)
    logits = chance.normal(-5, 1, 50_000)  # 0.5% positives
    p = 1 / (1 + np.exp(-logits))
    y = (chance.random(len(p)) < p).astype(float)
    curve = ScoreCurve()
    for part in np.array_split(np.arange(len(p)), 3):
        curve.update(torch.tensor(p[part]), torch.tensor(y[part]))
    found = curve.compute()
    assert found["positives"] == y.sum()
    assert found["rows"] == 50_000
    assert len(found["roc"]) < 220
    assert abs(area(found["roc"]) - roc_auc_score(y, p)) < 2e-3
    assert abs(area([[0, found["pr"][0][1]], *found["pr"]]) - average_precision_score(y, p)) < 5e-3
    assert found["roc"][0] == [0, 0]
    assert found["roc"][-1] == [1, 1]
    assert found["pr"][-1][0] == 1


def test_the_ends_of_the_scores_are_counted():
    curve = ScoreCurve()
    curve.update(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert curve.compute()["roc"] == [[0, 0], [0, 1], [1, 1]]


def test_one_class_or_no_row_has_no_curve():
    curve = ScoreCurve()
    assert curve.compute() == {"positives": 0.0, "rows": 0, "roc": [], "pr": []}
    curve.update(torch.tensor([0.5, 0.6]), torch.tensor([0.0, 0.0]))
    assert curve.compute() == {"positives": 0.0, "rows": 2, "roc": [], "pr": []}
