"""`viviane tune`: trials, the page, the best file, and going on."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.cli.search_space import default_space, parse_range
from viviane.cli.train_config import read_train_config
from viviane.core.errors import ConfigError
from viviane.data.synthetic import SyntheticConfig, generate


def test_tunes_goes_on_and_writes_the_best_settings(tmp_path: Path) -> None:
    generate(SyntheticConfig(rows=600, num_dense=2, cardinalities=(8, 5)), tmp_path / "train")
    generate(SyntheticConfig(rows=300, num_dense=2, cardinalities=(8, 5)), tmp_path / "valid", part="valid")
    config = {
        "data": {"train": str(tmp_path / "train"), "validation": str(tmp_path / "valid")},
        "solver": {"batch_size": 200, "device": "cpu"},
        "model": {"zoo": "deepfm", "dim": 2, "deep_mlp": [4]},
        "metrics": ["log_loss"],
    }
    (tmp_path / "train.json").write_text(json.dumps(config))
    words = ["tune", str(tmp_path / "train.json"), "--output", str(tmp_path / "tune")]
    words += ["--search", "solver.lr=1e-4:0.1:log",
             "--search", "model.dim=2,4"]  # fmt: skip
    first = CliRunner().invoke(app, [*words, "--trials", "2"])
    assert first.exit_code == 0, (first.output, first.exception)
    assert "trial 2 of 2" in first.output
    again = CliRunner().invoke(app, [*words, "--trials", "3"])
    assert "trial 3 of 3" in again.output
    assert "trial 1 of 3" not in again.output
    words[3] = str(tmp_path / "whole")
    whole = CliRunner().invoke(app, [*words, "--trials", "3"]).output.splitlines()
    chosen = [re.sub(r"trial .*: log_loss [\d.]+|stopped early", "", line) for line in whole if "trial" in line]
    assert len({*chosen[:3]}) == 3  # the third is not the first once more
    assert next(line for line in again.output.splitlines() if "trial 3 of 3" in line) in whole
    best = read_train_config(tmp_path / "tune" / "best.json")
    assert 1e-4 <= best.solver.lr <= 0.1
    page = (tmp_path / "tune" / "tune.html").read_text()
    assert page.count("<svg") >= 3
    assert all(f"<h3>{title}</h3>" in page for title in ("The best first", "Each trial", "solver.lr", "model.dim"))
    assert '<div class="scroll"><table>' in page  # it scrolls where it is wider than a phone


def test_reads_ranges_and_refuses_others() -> None:
    assert parse_range("a.b=1:8").is_whole
    assert parse_range("zoo=dcn,deepfm").choices == ("dcn", "deepfm")
    for text in ("a", "a=", "a=5", "a=2:1", "a=0:1:log", "a=x:y", "a=1:2:lin"):
        with pytest.raises(ConfigError, match="--search"):
            parse_range(text)
    assert [one.path for one in default_space({"model": {"nodes": []}})] == ["solver.lr"]
