import json
import re

import pytest

from viviane.core.errors import DataError
from viviane.report import quality, write_report
from viviane.schema import Schema


@pytest.fixture
def run(tmp_path):
    Schema(
        labels=[{"name": "click"}],
        categorical=[{"name": "item", "num_ids": 1000}, {"name": "user<", "num_ids": 50}],
    ).save(tmp_path)
    rows = [
        {"step": 10, "epoch": 0, "split": "train", "loss": 0.6, "lr": 0.01, "samples_per_second": 1000.0},
        {"step": 10, "epoch": 0, "split": "valid", "loss": 0.55, "auc": 0.71234, "log_loss": 0.55},
        {"step": 20, "epoch": 0, "split": "train", "loss": 0.5, "lr": 0.01, "samples_per_second": 3000.0},
        {"step": 20, "epoch": 0, "split": "valid", "loss": 0.56, "auc": 0.70001, "log_loss": 0.54},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path


def put(run, name, value):
    (run / name).write_text(json.dumps(value))


def test_the_cards_hold_the_best_figures(run):
    put(run, "data_info.json", {"rows": 123, "best_auc": 0.8})
    html = write_report(run).read_text()
    assert "<b>0.7123</b><span>best validation AUC, step 10</span>" in html
    assert "<b>0.5400</b><span>best validation log loss, step 20</span>" in html
    assert "<b>0.8000</b><span>best AUC this data allows</span>" in html


def test_the_page_needs_nothing_from_outside(run):
    html = write_report(run).read_text()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|<script", html)


def test_every_part_shows_what_was_recorded(run):
    put(run, "stages.json", {"data_wait": 1.0, "forward": 3.0})
    put(run, "valid_histogram.json", {"bins": [{"mean_prediction": 0.2, "mean_label": 0.3, "count": 7}]})
    put(
        run, "data_info.json", {"columns": {"item": {"num_missing": 12345, "top_counts": [[1, 90], [10, 9], [100, 1]]}}}
    )
    put(run, "config.json", {"name": "my <run>"})
    html = write_report(run).read_text()
    assert "forward: 3 s (75.0%)" in html
    assert "this model: 0.2, 0.3" in html
    assert "12,345" in html
    assert "Popularity" in html
    assert "<title>my &lt;run&gt; · Viviane</title>" in html
    assert "user&lt;" in html


def test_parts_without_records_are_left_out(run):
    html = write_report(run).read_text()
    for title in ("Calibration", "Where the time went", "Popularity"):
        assert f"<h2>{title}" not in html
        assert f"<h3>{title}" not in html


def test_a_half_written_last_line_of_a_killed_run_is_passed_over(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "split": "tr')
    assert "0.7123" in write_report(run).read_text()


def test_a_broken_line_in_the_middle_is_named(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", *lines[1:]]))
    with pytest.raises(DataError, match=r"not valid JSON[\s\S]*metrics\.jsonl, line 2"):
        write_report(run)


def test_a_folder_without_a_run_says_how_to_get_one(tmp_path):
    with pytest.raises(DataError, match=r"holds no run[\s\S]*--run-folder"):
        write_report(tmp_path)


@pytest.mark.parametrize("count", [1, 20, 21, 50])
def test_bins_are_joined_for_their_bars(count: int) -> None:
    bins = [{"mean_prediction": i / 100, "mean_label": 0.0, "count": i + 1} for i in range(count)]
    bars = quality.rows_per_bin(bins)
    assert len(bars) <= 20
    assert sum(rows for _, rows in bars) == sum(one["count"] for one in bins)
    if count == 50:  # three to a bar: (0.00 * 1 + 0.01 * 2 + 0.02 * 3) / 6
        assert bars[0] == ("0.013", 6.0)
