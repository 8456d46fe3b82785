from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from viviane.core.errors import ConfigError
from viviane.data import Dataset
from viviane.data.synthetic import SyntheticBag, SyntheticConfig, generate
from viviane.data.synthetic.best_score import best_auc, best_log_loss
from viviane.data.synthetic.planted import CHUNK_ROWS, PlantedModel
from viviane.data.synthetic.power_law import power_law_ranks, power_law_share

SMALL = SyntheticConfig(
    rows=CHUNK_ROWS + 1000,
    num_dense=3,
    cardinalities=(5, 200, 30_000),
    bags=(
        SyntheticBag(name="tags", cardinality=50, hotness=(0, 3), weighted=True),
        SyntheticBag(name="history", cardinality=50, hotness=(1, 4), kind="sequence"),
    ),
)


def auc(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """Count the ordered pairs, ties by half, through mean ranks."""
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    assert len(values)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = labels == 1
    pairs = positive.sum() * (~positive).sum()
    return float((ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / pairs)


def auc_deviation(area: float, positive: int, negative: int) -> float:
    """Standard deviation of a measured AUC (Hanley and McNeil, 1982)."""
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (positive - 1) * (one - area**2) + (negative - 1) * (two - area**2)
    return float(np.sqrt(spread / (positive * negative)))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 1.1, 2.0])
def test_key_frequencies_follow_the_power_law(alpha: float) -> None:
    rows, size = 400_000, 1000
    ranks = power_law_ranks(np.random.default_rng(1).random(rows), size, alpha)
    counts = np.bincount(ranks, minlength=size)
    assert len(counts) == size  # nothing beyond the last rank
    expected = rows * power_law_share(size, alpha, np.arange(size))
    assert expected.sum() == pytest.approx(rows)
    # each count is binomial: of 1000 of them, none is farther than 5.5 deviations (p < 1e-4 in all); +1 for rare ranks
    assert np.all(np.abs(counts - expected) < 5.5 * np.sqrt(expected) + 1)
    if alpha > 0:  # and the head decays as rank^-alpha, the integral of it over each rank's interval
        assert counts[0] / counts[9] == pytest.approx(expected[0] / expected[9], rel=0.05)
        wrong = rows * power_law_share(size, alpha + 0.1, np.arange(size))
        assert not np.all(np.abs(counts - wrong) < 5.5 * np.sqrt(wrong) + 1)  # the bound tells exponents apart


@given(u=st.floats(0, 1, exclude_max=True), size=st.integers(1, 2**31 - 4), alpha=st.floats(0, 10))
def test_ranks_stay_in_range(u: float, size: int, alpha: float) -> None:
    rank = int(power_law_ranks(np.array([u]), size, alpha)[0])
    assert 0 <= rank < size


def test_one_value_and_hand_computed_ranks() -> None:
    assert power_law_ranks(np.array([0.0, 0.9999999]), 1, 1.1).tolist() == [0, 0]
    # alpha = 2, M = 4: y = 1 / (1 - 3u/4): u = 0.7 -> 2.105..., u = 0.9 -> 3.07...
    assert power_law_ranks(np.array([0.0, 0.5, 0.7, 0.9]), 3, 2.0).tolist() == [0, 0, 1, 2]


def test_best_auc_is_the_expected_auc() -> None:
    p = np.array([0.2, 0.7, 0.7, 0.9])
    pairs = [(a * (1 - b), (a > b) + (a == b) / 2) for a in p for b in p]
    assert best_auc(p) == pytest.approx(sum(w * s for w, s in pairs) / sum(w for w, _ in pairs), abs=1e-12)
    assert best_auc(np.full(9, 0.3)) == pytest.approx(0.5)
    assert np.isnan(best_auc(np.ones(3)))
    assert np.isnan(best_auc(np.zeros(0)))
    assert best_log_loss(np.array([0.5, 1.0])) == pytest.approx(np.log(2) / 2)


def test_the_oracle_reaches_the_best_auc_and_others_do_not(tmp_path: Path) -> None:
    config = SyntheticConfig(rows=3 * CHUNK_ROWS, num_dense=4, num_categorical=6)
    done = generate(config, tmp_path / "set")
    data = Dataset(tmp_path / "set")
    labels = torch.cat([batch.labels[:, 0] for batch in data.reader(50_000)]).numpy()
    model = PlantedModel(config)
    truth = np.concatenate([model.chunk("train", i).probabilities for i in range(3)])
    deviation = auc_deviation(done.best_auc, int(labels.sum()), int((1 - labels).sum()))
    assert deviation < 0.002
    # the best AUC is an expectation: drawn labels differ by sampling, 5 deviations at most
    assert auc(truth, labels) == pytest.approx(done.best_auc, abs=5 * deviation)
    assert done.best_auc > 0.75
    random = np.random.default_rng(0)
    assert auc(random.random(len(labels)), labels) == pytest.approx(0.5, abs=5 * 0.002)
    assert auc(truth, random.permutation(labels)) == pytest.approx(0.5, abs=5 * 0.002)
    # blurred truth loses more than sampling could explain
    assert auc(truth + random.normal(0, 0.2, len(truth)), labels) < done.best_auc - 10 * deviation
    loss = -np.where(labels == 1, np.log(truth), np.log1p(-truth)).mean()
    assert loss == pytest.approx(
        done.best_log_loss, abs=0.005
    )  # deviation of a row's loss ~0.45: 5 x 0.45 / sqrt(196608)
    assert data.info["best_auc"] == done.best_auc
    assert done.click_rate == pytest.approx(config.click_rate, abs=0.01)
    assert labels.mean() == pytest.approx(done.click_rate, abs=5 * 0.5 / len(labels) ** 0.5)


def test_without_signal_nothing_can_be_learned(tmp_path: Path) -> None:
    done = generate(SyntheticConfig(rows=1000, num_categorical=2, signal=0), tmp_path / "set")
    assert done.best_auc == pytest.approx(0.5, abs=1e-9)


def test_pairs_carry_signal_that_effects_of_single_keys_do_not() -> None:
    config = SyntheticConfig(num_dense=0, cardinalities=(30, 30), missing_categorical=0, alpha=0.5)
    model = PlantedModel(config)
    chunks = [model.chunk("train", i) for i in range(4)]
    first, second = (np.concatenate([chunk.ids[i] for chunk in chunks]) for i in (0, 1))
    logits = np.concatenate([np.log(chunk.probabilities / (1 - chunk.probabilities)) for chunk in chunks])
    one_hot = np.concatenate([np.eye(33)[first], np.eye(33)[second]], axis=1)
    fit = one_hot @ np.linalg.lstsq(one_hot, logits, rcond=None)[0]
    assert 0.1 < np.var(logits - fit) / np.var(logits) < 0.5  # the pair's share, 0.375 before projection


def same_files(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def test_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    for threads in (1, 4):
        generate(SMALL, tmp_path / str(threads), num_threads=threads)
    assert same_files(tmp_path / "1", tmp_path / "4")
    text = SyntheticConfig(rows=CHUNK_ROWS + 10, num_categorical=3)
    for threads in (1, 4):
        generate(text, tmp_path / f"{threads}.txt.gz", "criteo", num_threads=threads)
    assert (tmp_path / "1.txt.gz").read_bytes() == (tmp_path / "4.txt.gz").read_bytes()


def test_a_longer_set_starts_with_the_shorter_one_and_parts_and_seeds_differ() -> None:
    model = PlantedModel(SMALL)
    whole, start = model.chunk("train", 0), model.chunk("train", 0, 100)
    assert np.array_equal(whole.labels[:100], start.labels)
    assert all(np.array_equal(a[:100], b) for a, b in zip(whole.ids, start.ids, strict=True))
    assert np.array_equal(whole.bags["tags"].ids[: start.bags["tags"].offsets[100]], start.bags["tags"].ids)
    others = [model.chunk("valid", 0, 100), model.chunk("train", 1, 100)]
    others.append(PlantedModel(SyntheticConfig(**{**SMALL.to_dict(), "seed": 1})).chunk("train", 0, 100))
    assert all(not np.array_equal(other.ids[2], start.ids[2]) for other in others)


def test_all_kinds_of_columns_are_written_and_pass_the_readers_checks(tmp_path: Path) -> None:
    generate(SMALL, tmp_path / "set")
    data = Dataset(tmp_path / "set")
    data.check()
    assert len(data) == SMALL.rows
    batch = data.head(30_000)
    assert batch.dense.shape == (30_000, 3)
    assert batch.one_hot.shape == (30_000, 3)
    tags, history = batch.bags["tags"], batch.bags["history"]
    assert set(tags.lengths.tolist()) == {0, 1, 2, 3}
    assert set(history.lengths.tolist()) == {1, 2, 3, 4}
    assert tags.weights is not None
    assert 0.5 <= tags.weights.min() < tags.weights.max() < 1.5
    missing = data.info["columns"]["C2"]["num_missing"]
    share = SMALL.missing_categorical
    assert missing == pytest.approx(share * SMALL.rows, abs=5 * (share * SMALL.rows) ** 0.5)
    assert data.info["config"] == SMALL.to_dict()


def test_missing_rates_of_nothing_and_of_everything(tmp_path: Path) -> None:
    base = {"rows": 500, "num_dense": 1, "num_categorical": 1}
    none = generate(SyntheticConfig(**base, missing_dense=0, missing_categorical=0), tmp_path / "n.txt", "criteo")
    assert all(all(line.split("\t")) for line in none.path.read_text().splitlines())
    everything = SyntheticConfig(**base, missing_dense=1, missing_categorical=1)
    lines = generate(everything, tmp_path / "all.txt", "criteo").path.read_text().splitlines()
    assert {line[1:] for line in lines} == {"\t\t"}


def test_criteo_text_says_the_same_as_the_parquet_form(tmp_path: Path) -> None:
    config = SyntheticConfig(rows=3000, seed=5)
    generate(config, tmp_path / "set")
    done = generate(config, tmp_path / "day.txt", "criteo")
    compressed = generate(config, tmp_path / "day.txt.gz", "criteo")
    content = done.path.read_bytes()
    assert gzip.decompress(compressed.path.read_bytes()) == content
    batch = Dataset(tmp_path / "set").head(3000)
    lines = [line.split("\t") for line in content.decode().splitlines()]
    assert len(lines) == 3000
    assert {len(line) for line in lines} == {40}
    assert [float(line[0]) for line in lines] == batch.labels[:, 0].tolist()
    for i in range(13):
        logs = np.log1p([float(line[1 + i] or 0) for line in lines])
        assert np.allclose(logs, batch.dense[:, i], rtol=1e-6)
    for i in range(26):
        pairs = {(line[14 + i], key) for line, key in zip(lines, batch.one_hot[:, i].tolist(), strict=True)}
        words, keys = {word for word, _ in pairs}, {key for _, key in pairs}
        assert len(pairs) == len(words) == len(keys)  # one word per key, one key per word
        assert all(len(word) == 8 and int(word, 16) >= 0 for word in words - {""})
        assert ("" in words) == (1 in keys)
    info = json.loads((tmp_path / "day.txt.info.json").read_text())
    assert info["rows"] == 3000
    assert info["best_auc"] == done.best_auc == Dataset(tmp_path / "set").info["best_auc"]


def test_no_rows(tmp_path: Path) -> None:
    done = generate(SyntheticConfig(rows=0), tmp_path / "set")
    assert np.isnan(done.best_auc)
    assert Dataset(tmp_path / "set").info["best_auc"] is None
    assert generate(SyntheticConfig(rows=0), tmp_path / "t.txt", "criteo").path.read_bytes() == b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1}, "alpha"),
        ({"cardinalities": (3, 0)}, "cardinalities must be between 1"),
        ({"cardinalities": (3,), "num_categorical": 2}, "1 cardinalities for 2 categorical columns"),
        ({"cardinality_range": (10, 5)}, "cardinalities must be between 1"),
        ({"num_dense": 0, "num_categorical": 0}, "at least one dense or categorical column"),
        ({"bags": [{"name": "C1"}]}, "used twice: C1"),
        ({"bags": [{"name": "b", "hotness": [3, 2]}]}, "two ascending numbers"),
        ({"bags": [{"name": "b", "kind": "sequence", "weighted": True}]}, "takes no weights"),
        ({"alfa": 1}, "did you mean 'alpha'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticConfig(**settings)


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    config = SyntheticConfig(rows=10)
    generate(config, tmp_path / "set")
    with pytest.raises(ConfigError, match="the output exists"):
        generate(config, tmp_path / "set")
    generate(config, tmp_path / "set", overwrite=True)
    with pytest.raises(ConfigError, match="unknown format"):
        generate(config, tmp_path / "x", "csv")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="too few threads"):
        generate(config, tmp_path / "x", num_threads=0)
    with pytest.raises(ConfigError, match=r"has no bags\n  value:   \['tags', 'history'\]"):
        generate(SMALL, tmp_path / "x", "criteo")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
