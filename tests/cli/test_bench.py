"""`viviane bench`: tiny sizes give their table and a JSON file; what is wrong is refused before anything runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli import main
from viviane.cli.bench import table_sizes
from viviane.core.errors import ConfigError

run = CliRunner().invoke
TINY = ["bench", "embedding", "--device", "cpu", "--rows", "50,7", "--dim", "3", "--seconds", "0.01"]
FIELDS = {
    *("operation", "library", "batch", "num_ids", "distinct_rows", "ms", "median_ms", "high_ms", "first_ms"),
    *("ids_per_second", "gb_per_second", "share_of_copy", "ours_is_faster_by"),
}


@pytest.mark.slow
def test_a_tiny_run_gives_its_table_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "figures.json"
    done = run(
        main.app, [*TINY, "--batch-size", "5,1", "--optimizer", "sgd,ftrl", "--peers", "torch", "--output", str(file)]
    )
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    assert "Batch 5 (" in words
    assert "Batch 1 (2 distinct rows of 2 ids), cpu" in words
    assert "train, sgd viviane" in words
    assert "torch, ftrl: has no ftrl on cpu" in words
    assert "Copy of a large tensor:" in words
    content = json.loads(file.read_text())
    assert content["tables"] == {"num": 2, "rows": 57, "dim": 3}
    assert set(content) >= {"machine", "device", "threads", "versions", "copy_gb_per_second", "ids", "exponent"}
    assert all(set(line) == FIELDS for line in content["measurements"])
    names = {(line["library"], line["operation"], line["batch"]) for line in content["measurements"]}
    ours = {("viviane", operation, size) for operation in ("lookup", "sgd", "ftrl") for size in (5, 1)}
    assert names == ours | {("torch", operation, size) for operation in ("lookup", "sgd") for size in (5, 1)}
    assert content["left_out"] == [
        {"library": "torch", "operation": "ftrl", "why": "has no ftrl on cpu", "install": None}
    ]


def test_help_says_what_there_is() -> None:
    done = run(main.app, ["bench", "--help"])
    assert "embedding: embedding tables" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "embeding"], "did you mean 'embedding'"),
        ([*TINY, "--optimizer", "adagard"], "did you mean 'adagrad'"),
        ([*TINY, "--ids", "zipf"], "unknown distribution"),
        ([*TINY, "--batch-size", "0"], "at least 1"),
        ([*TINY, "--rows", "ten"], "not a whole number"),
        (["bench", "embedding", "--tables", "criteo"], "no such tables"),
        ([*TINY, "--peers", "tensorrec"], "unknown peer"),
        ([*TINY, "--device", "cuda:99"], "does not exist on this machine"),
    ],
)
def test_what_is_wrong_is_refused(words: list[str], message: str) -> None:
    done = run(main.app, words)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_tables_are_capped() -> None:
    assert table_sizes("movielens-20m", None, "1e5") == (100_000, 26_744)
    assert table_sizes("movielens-20m", "5,1_000", None) == (5, 1000)
