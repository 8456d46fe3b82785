"""`viviane tune`: trials, the page, the best file, and going on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.cli.search_space import default_space, parse_range
from viviane.cli.train_config import read_train_config
from viviane.core.errors import CheckpointError, ConfigError
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


def search_of(folder: Path) -> list[str]:
    """The words of a quick search, with the data that it reads."""
    generate(SyntheticConfig(rows=200, num_dense=2, cardinalities=(8, 5)), folder / "data")
    config = {
        "data": {"train": str(folder / "data"), "validation": str(folder / "data")},
        "solver": {"batch_size": 100, "device": "cpu"},
        "model": {"zoo": "deepfm", "dim": 2, "deep_mlp": [4]},
        "metrics": ["log_loss"],
    }
    (folder / "c.json").write_text(json.dumps(config))
    return ["tune", str(folder / "c.json"), "-o", str(folder / "t"), "--search", "solver.lr=1e-4:0.1:log"]


def test_a_search_that_was_killed_goes_on(tmp_path: Path) -> None:
    """An entry that was written in part ended the next call with a raw error, and Optuna's lock held it for 30 s."""
    words, journal = search_of(tmp_path), tmp_path / "t/trials.log"
    assert CliRunner().invoke(app, [*words, "--trials", "2"]).exit_code == 0
    whole = journal.read_bytes()
    second = whole.splitlines(keepends=True)
    for cut in (1, 20, len(second[-1]) - 1):
        journal.write_bytes(whole[:-cut])
        journal.with_name("trials.log.lock").symlink_to(journal)
        again = CliRunner().invoke(app, [*words, "--trials", "2"])
        assert again.exit_code == 0, (again.output, again.exception)
        assert "trial 2 of 2" in again.output
        assert not journal.with_name("trials.log.lock").is_symlink()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    words, journal = search_of(tmp_path), tmp_path / "t/trials.log"
    assert CliRunner().invoke(app, [*words, "--trials", "1"]).exit_code == 0
    lines = journal.read_bytes().splitlines(keepends=True)
    for damaged in (b"{\n", b"[]\n", b"3\n", b'{"op_code": 999, "worker_id": "x"}\n', b"\xff\xfe\0\n", b"{}\n"):
        journal.write_bytes(b"".join([*lines[:2], damaged, *lines[2:]]))
        found = CliRunner().invoke(app, [*words, "--trials", "2"])
        assert isinstance(found.exception, CheckpointError), (damaged, found.exception)
        assert "journal of trials is damaged" in str(found.exception)


def test_one_call_at_a_time_searches_in_a_folder(tmp_path: Path) -> None:
    words = search_of(tmp_path)
    (tmp_path / "t").mkdir()
    code = "import sys, time\nfrom pathlib import Path\nfrom viviane.core.locks import locked\n"
    code += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "t")], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = CliRunner().invoke(app, [*words, "--trials", "1"])
        other.kill()
    assert isinstance(found.exception, ConfigError)
