from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from format_rows import rows_of

from viviane.core.errors import ConfigError
from viviane.data import Dataset
from viviane.data.synthetic.data_generator import DataGeneratorConfig, generate_like_hugectr


def config(folder: Path, **changes: Any) -> DataGeneratorConfig:
    settings = {
        "format": "norm", "label_dim": 1, "dense_dim": 2, "num_slot": 3, "i64_input_key": False,
        "source": str(folder / "list.txt"), "eval_source": str(folder / "eval.txt"), "slot_size_array": (10, 1000, 7),
        "num_files": 3, "eval_num_files": 2, "num_samples_per_file": 50, "num_samples": 130, "eval_num_samples": 40,
    }  # fmt: skip
    return DataGeneratorConfig.from_dict({**settings, **changes})


@pytest.mark.parametrize("kind", ["norm", "parquet"])
@pytest.mark.parametrize("wide", [False, True])
def test_lists_of_files(tmp_path: Path, kind: str, wide: bool) -> None:
    made = config(tmp_path, format=kind, i64_input_key=wide, nnz_array=(1, 4, 1))
    train, valid = generate_like_hugectr(made)
    suffix = "data" if kind == "norm" else "parquet"
    names = [str(tmp_path / "train" / f"gen_{i}.{suffix}") for i in range(3)]
    assert (tmp_path / "list.txt").read_text().splitlines() == ["3", *names]
    assert (tmp_path / "eval.txt").read_text().splitlines()[0] == "2"
    assert (len(train), len(valid)) == (150, 100)
    rows = rows_of(train)
    assert rows_of(Dataset(tmp_path / "list.txt", made.to_schema(), made.to_format())) == rows
    assert all(0 < value < 1 for name in ("label", "I1", "I2") for value in rows[name])
    lengths = {len(bag) for bag in rows["C2"]}
    assert lengths == ({4} if kind == "norm" else {1, 2, 3, 4})
    assert max(max(bag) for bag in rows["C2"]) < 1000
    assert rows["C1"] != rows_of(valid)["C1"][:150]


@pytest.mark.parametrize(("kind", "real"), [("raw", False), ("raw", True), ("raw-async", False), ("raw-async", True)])
def test_single_files(tmp_path: Path, kind: str, real: bool) -> None:
    nnz = (1, 4, 1) if kind == "raw-async" else ()
    made = config(tmp_path, format=kind, float_label_dense=real, nnz_array=nnz)
    train, valid = generate_like_hugectr(made)
    assert (len(train), len(valid)) == (130, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.txt", "list.txt"]
    keys = 6 if kind == "raw-async" else 3
    assert (tmp_path / "list.txt").stat().st_size == 130 * 4 * (1 + 2 + keys)
    rows = rows_of(train)
    assert set(rows["label"]) == {0, 1} or (kind == "raw" and real)
    assert real == (max(rows["I1"]) < 1)


def test_distributions(tmp_path: Path) -> None:
    def share_of_first(number: int, **changes: Any) -> float:
        folder = tmp_path / str(number)
        made = config(folder, format="raw", num_samples=20_000, slot_size_array=(1000, 1000, 1000), **changes)
        keys = generate_like_hugectr(made)[0].head(20_000).one_hot[:, 0].numpy()
        assert keys.min() == 0
        assert keys.max() > 900
        return float((keys == 0).mean())

    uniform = share_of_first(0, dist_type="Uniform")
    shares = [share_of_first(i, power_law_type=kind) for i, kind in enumerate(("Long", "Medium", "Short"), 1)]
    # the inverse distribution function: share of y < 2 on [1, 1001)
    wanted = [(2 ** (1 - a) - 1) / (1001 ** (1 - a) - 1) for a in (0.9, 1.1, 1.3)]
    # four standard deviations of a share of 20,000 rows are below 0.012
    assert uniform == pytest.approx(0.001, abs=0.001)
    assert shares == pytest.approx(wanted, abs=0.012)
    assert share_of_first(4, alpha=1.3) == shares[2]


def test_what_is_there_stays(tmp_path: Path) -> None:
    first = rows_of(generate_like_hugectr(config(tmp_path))[0])
    with pytest.raises(ConfigError, match="the output exists"):
        generate_like_hugectr(config(tmp_path))
    again = rows_of(generate_like_hugectr(config(tmp_path, seed=1), overwrite=True)[0])
    assert again != first
    assert rows_of(generate_like_hugectr(config(tmp_path), overwrite=True)[0]) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_size_array": (1, 2)}, "slot_size_array needs 3 numbers"),
        ({"nnz_array": (1, 2)}, "nnz_array needs 3 numbers"),
        ({"format": "raw", "nnz_array": (1, 2, 1)}, "one key per slot"),
        ({"num_sample": 3}, "did you mean 'num_samples'"),
    ],
)
def test_wrong_parameters(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)
