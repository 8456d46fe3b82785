import numpy as np
import pytest
import torch

from viviane import Batch, Model, Schema, Solver, write_dataset
from viviane.batch import Bag
from viviane.core.errors import ConfigError
from viviane.report import importance, permutation_importance, write_report
from viviane.report.record import RunRecord
from viviane.zoo import DeepFM


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of a label that one column decides, one tells a little about, and one says nothing about."""
    chance = np.random.default_rng(0)
    decides, says, noise = (chance.integers(0, 2, 3000) for _ in range(3))
    y = np.where(chance.random(3000) < 0.7, decides, says).astype(float)
    schema = Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "noise"}],
        categorical=[{"name": "says", "num_ids": 9}, {"name": "decides", "kind": "multi_hot", "num_ids": 9}],
    )
    columns = {"y": y, "noise": noise.astype(float), "says": says + 3, "decides": [[int(one) + 3] for one in decides]}
    folder = tmp_path_factory.mktemp("data")
    data = write_dataset(folder / "d", schema, [columns])
    model = Model(Solver(batch_size=128, epochs=3, lr=1e-2, device="cpu"), data)
    model.add(DeepFM(dim=2, deep_mlp=(8,)))
    model.compile()
    model.fit(data, data, run_folder=folder / "run", verbose=0)
    return model, data, folder / "run"


def test_the_column_that_decides_matters_most(trained):
    model, data, run = trained
    found = permutation_importance(model, data, rows=2000, repeats=2)
    assert [one.name for one in found.features] == ["decides", "says", "noise"]
    most, some, none = found.features
    assert most.log_loss > 3 * some.log_loss > 0
    assert most.auc > 0.2
    assert abs(none.log_loss) < 0.01
    assert found.rows == 2000
    values = model.evaluate(data)  # over all rows; the first 2,000 differ a little
    assert found.log_loss == pytest.approx(values["log_loss"], abs=0.03)
    found.save(run)
    page = write_report(run).read_text()
    assert "Importance of columns" in page
    assert "decides" in page
    for part in ("ROC curve", "Precision and recall", "Balance of labels", "Throughput", "peak memory", "saved model"):
        assert (part in page) == (part != "saved model"), part  # nothing was saved here
    assert RunRecord.load(run).machine["fits"][0]["seconds"] > 0


def test_few_seconds_take_fewer_rows(trained):
    model, data, _ = trained
    assert 200 <= permutation_importance(model, data, rows=3000, seconds=1e-6).rows < 3000


def test_bags_move_as_wholes():
    bag = Bag(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 2, 2, 3, 6]), torch.arange(6.0))
    moved = importance._reordered(bag, torch.tensor([3, 1, 0, 2]))
    assert moved.values.tolist() == [4, 5, 6, 1, 2, 3]
    assert moved.offsets.tolist() == [0, 3, 3, 5, 6]
    assert moved.weights is not None
    assert moved.weights.tolist() == [3, 4, 5, 0, 1, 2]


def test_only_the_one_column_changes():
    schema = Schema(dense=[{"name": "a", "dim": 2}, {"name": "b"}], categorical=[{"name": "c", "num_ids": 9}])
    batch = Batch.from_columns(schema, {"a": [[1, 2], [3, 4]], "b": [5, 6], "c": [7, 8]})
    moved = importance._shuffled(batch, "a", torch.tensor([1, 0]))
    assert moved.dense.tolist() == [[3, 4, 5], [1, 2, 6]]
    assert moved.one_hot.tolist() == batch.one_hot.tolist()
    assert importance._shuffled(batch, "c", torch.tensor([1, 0])).one_hot.tolist() == [[8], [7]]
    assert batch.dense.tolist() == [[1, 2, 5], [3, 4, 6]]  # the rows that were given stay


def test_an_unknown_label_is_refused(trained):
    model, data, _ = trained
    with pytest.raises(ConfigError, match=r"binary label[\s\S]*allowed: y"):
        permutation_importance(model, data, label="z")
    with pytest.raises(ConfigError, match="repeats"):
        permutation_importance(model, data, repeats=0)
