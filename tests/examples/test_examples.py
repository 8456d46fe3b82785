"""The worked examples, from raw data to AUC: on generated data in the public sets' formats, and on real samples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("VIVIANE_DATA", ROOT.parent / "shared" / "data"))


def run(script: str, folder: Path, *flags: str | Path) -> dict[str, float]:
    """Run an example; returns its AUCs by model."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: float(auc) for name, auc in re.findall(r"^(\S+): AUC (\d\.\d+)", done.stdout, re.MULTILINE)}


def real(*parts: str) -> Path:
    file = SHARED.joinpath(*parts)
    if not file.exists():
        pytest.skip(f"{file} is not there")
    return file


# Bounds lie below what one seed reaches by about five standard errors of an AUC on so many test rows, and well above
# 0.5, which is what a broken road gives.


def test_criteo(tmp_path: Path) -> None:
    found = run("criteo.py", tmp_path, "--rows", "20000", "--epochs", "3")
    assert list(found) == ["DCN", "DLRM"]
    assert min(found.values()) > 0.65


def test_ecommerce(tmp_path: Path) -> None:
    assert run("ecommerce.py", tmp_path, "--users", "600")["DLRM"] > 0.7
    assert (tmp_path / "ecommerce/etl.svg").read_text().startswith("<svg")


def test_news(tmp_path: Path) -> None:
    assert run("news.py", tmp_path, "--users", "600")["DIN"] > 0.65


def test_movies(tmp_path: Path) -> None:
    found = run("movies.py", tmp_path, "--users", "300")
    assert found["NCF"] > 0.7
    assert found["two-tower"] > 0.6


@pytest.mark.realdata
def test_real_criteo_lines(tmp_path: Path) -> None:
    raw = real("criteo_kaggle_10k", "train_first10k.tsv.gz")
    found = run("criteo.py", tmp_path, "--data", raw, "--epochs", "3")
    assert min(found.values()) > 0.6


@pytest.mark.realdata
def test_real_ratings(tmp_path: Path) -> None:
    table = pq.read_table(real("ml100k", "MovieLens100k_data.parquet.brotli")).to_pandas()
    columns = ["user_id", "movie_id", "rating", "timestamp"]
    newest = table.sort_values("timestamp", kind="stable").tail(40_000)
    newest[columns].to_csv(tmp_path / "u.data", sep="\t", header=False, index=False)
    found = run("movies.py", tmp_path, "--data", tmp_path / "u.data", "--epochs", "2")
    assert found["NCF"] > 0.7
