"""The worked examples, from raw data to AUC: on generated data in the public sets' formats, and on real samples."""

import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from warm import Warm

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("VIVIANE_DATA", ROOT.parent / "shared" / "data"))


def run(warm: Warm, script: str, folder: Path, *flags: str | Path) -> dict[str, float]:
    """Run an example; returns its AUCs by model."""
    done = warm.run([ROOT / "examples" / script, *flags], cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: float(auc) for name, auc in re.findall(r"^(\S+): AUC (\d\.\d+)", done.stdout, re.MULTILINE)}


def real(*parts: str) -> Path:
    file = SHARED.joinpath(*parts)
    if not file.exists():
        pytest.skip(f"{file} is not there")
    return file


# Bounds lie below what one seed reaches by about five standard errors of an AUC on this many test rows, and well above
# 0.5, which is what a broken road gives.


def test_criteo(tmp_path: Path, warm: Warm) -> None:
    found = run(warm, "criteo.py", tmp_path, "--rows", "20000", "--epochs", "3")
    assert list(found) == ["DCN", "DLRM"]
    assert min(found.values()) > 0.65


def test_ecommerce(tmp_path: Path, warm: Warm) -> None:
    assert run(warm, "ecommerce.py", tmp_path, "--users", "600")["DLRM"] > 0.7
    assert (tmp_path / "ecommerce/etl.svg").read_text().startswith("<svg")


def test_news(tmp_path: Path, warm: Warm) -> None:
    assert run(warm, "news.py", tmp_path, "--users", "600")["DIN"] > 0.65


def test_movies(tmp_path: Path, warm: Warm) -> None:
    found = run(warm, "movies.py", tmp_path, "--users", "300")
    assert found["NCF"] > 0.7
    assert found["two-tower"] > 0.6


def test_recommend(tmp_path: Path, warm: Warm) -> None:
    done = warm.run([ROOT / "examples" / "recommend.py", "--users", "400", "--epochs", "12"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ways = dict(re.findall(r"(\w[\w ]*) (\d\.\d{4})", done.stdout.split("validation NDCG@10: ")[1].split("chosen")[0]))
    chosen = re.search(r"chosen: (.+)", done.stdout)
    assert chosen is not None
    assert float(ways[chosen[1]]) == max(map(float, ways.values()))  # validation decides
    # Three of 119 items follow 70 % of the events; popular ones reach about 0.2.
    assert float(re.search(r"hr@10 (\d\.\d+)", done.stdout)[1]) > 0.35
    assert re.search(r"and is shown i\d+, i\d+", done.stdout)


@pytest.mark.realdata
def test_real_criteo_lines(tmp_path: Path, warm: Warm) -> None:
    raw = real("criteo_kaggle_10k", "train_first10k.tsv.gz")
    found = run(warm, "criteo.py", tmp_path, "--data", raw, "--epochs", "3")
    assert min(found.values()) > 0.6


@pytest.mark.realdata
def test_real_ratings(tmp_path: Path, warm: Warm) -> None:
    table = pq.read_table(real("ml100k", "MovieLens100k_data.parquet.brotli")).to_pandas()
    columns = ["user_id", "movie_id", "rating", "timestamp"]
    newest = table.sort_values("timestamp", kind="stable").tail(40_000)
    newest[columns].to_csv(tmp_path / "u.data", sep="\t", header=False, index=False)
    found = run(warm, "movies.py", tmp_path, "--data", tmp_path / "u.data", "--epochs", "2")
    assert found["NCF"] > 0.7


def test_serve(tmp_path: Path, warm: Warm) -> None:
    """From raw logs to a served answer; item 3 sells better than item 23."""
    done = warm.run([ROOT / "examples" / "serve.py", "--rows", "8000"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answers = [float(line.split()[0]) for line in done.stdout.splitlines() if "'seen'" in line]
    assert len(answers) == 3
    assert answers[0] > answers[1] + 0.1
    assert "the bits of the session: True" in done.stdout
