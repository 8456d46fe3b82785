import json

import pytest

from viviane.core.errors import DataError
from viviane.report import compare_runs, write_comparison
from viviane.schema import Schema


def make(folder, auc, lr, **machine):
    folder.mkdir(parents=True)
    Schema(labels=[{"name": "click"}], categorical=[{"name": "item", "num_ids": 10}]).save(folder)
    rows = [
        {"step": 5, "split": "train", "loss": 0.6, "samples_per_second": 100.0},
        {"step": 5, "split": "valid", "loss": 0.5, "auc": auc, "calibration": 0.9},
        {"step": 9, "split": "valid", "loss": 0.5, "auc": auc - 0.1, "calibration": 1.1},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "config.json").write_text(json.dumps({"name": "<m>", "solver": {"lr": lr, "epochs": 1}}))
    if machine:
        (folder / "machine.json").write_text(json.dumps(machine))
    return folder


def test_the_better_run_and_the_settings_that_differ_are_shown(tmp_path):
    a = make(tmp_path / "a", 0.7, 0.1)
    b = make(tmp_path / "b", 0.8, 0.2, fits=[{"seconds": 61.0}, {"seconds": 1.0}])
    found = compare_runs([a, b])
    assert found.differing == ("solver.lr",)
    assert found.best_of("auc") == "b"
    assert found.best_of("calibration") is None  # neither higher nor lower is better
    table = {row[0]: row[1:] for row in found.rows()}
    assert table["AUC"] == ("0.70000, step 5", "0.80000, step 5 *")
    assert table["calibration"] == ("1.10000, step 9", "1.10000, step 9")
    assert table["time"] == ("", "1 min 2 s")
    assert table["solver.lr"] == ("0.1", "0.2")


def test_equal_values_have_no_best(tmp_path):
    found = compare_runs([make(tmp_path / "a", 0.7, 0.1), make(tmp_path / "b", 0.7, 0.1)])
    assert found.best_of("auc") is None
    assert found.differing == ()


def test_folders_of_one_name_are_told_apart(tmp_path):
    found = compare_runs([make(tmp_path / "x" / "run", 0.7, 0.1), make(tmp_path / "y" / "run", 0.7, 0.1)])
    assert [run.name for run in found.runs] == ["x/run", "y/run"]


def test_one_folder_or_one_twice_is_refused(tmp_path):
    a = make(tmp_path / "a", 0.7, 0.1)
    with pytest.raises(DataError, match="number of runs"):
        compare_runs([a])
    with pytest.raises(DataError, match="named twice"):
        compare_runs([a, tmp_path / "." / "a"])
    with pytest.raises(DataError, match="holds no run"):
        compare_runs([a, tmp_path / "none"])


def test_the_page_holds_curves_of_both_and_needs_nothing_from_outside(tmp_path):
    a, b = make(tmp_path / "a<i>", 0.7, 0.1), make(tmp_path / "b", 0.8, 0.2)
    page = write_comparison([a, b], tmp_path / "page.html").read_text()
    assert "a&lt;i&gt;: 5, 0.7" in page
    assert "b: 5, 0.8" in page
    assert "<i>:" not in page
    assert "src=" not in page
    assert "<script" not in page
