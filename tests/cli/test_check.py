"""`viviane check` compares data sets, models, checkpoints, run folders and fitted ETLs with their check sums."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from viviane.cli.main import app
from viviane.config import Adam, Solver
from viviane.core.errors import VivianeError
from viviane.data import Dataset, write_dataset
from viviane.etl import EtlConfig, run
from viviane.model import Model
from viviane.zoo import DeepFM


def check(*words: object, code: int = 0) -> str:
    done: Result = CliRunner().invoke(app, ["check", *map(str, words)])
    if isinstance(done.exception, VivianeError):
        assert code == 1
        return str(done.exception)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    raw = folder / "raw.csv"
    raw.write_text("click,item,price\n" + "".join(f"{n % 2},i{n % 9},{n / 7}\n" for n in range(200)))
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]},
        labels=[{"name": "click"}], categorical=[{"name": "item"}], dense=[{"name": "price"}],
    )  # fmt: skip
    run(config, raw, folder / "data", split="rows:train=0.8,valid=0.2")
    train = Dataset(folder / "data/train")
    model = Model(Solver(batch_size=40, device="cpu", max_steps=4, checkpoint_every=2), train.schema)
    model.add(DeepFM(dim=2, deep_mlp=(4,)))
    model.compile(Adam())
    model.fit(train, run_folder=folder / "run")
    model.save(folder / "run/model")
    return folder


def test_everything_that_is_intact(place: Path) -> None:
    said = check(place / "data", place / "run", place / "data/etl.zip", "--rows")
    for words in (
        "data/etl.zip: fitted ETL, intact", "data/train: data set, intact, 160 rows",
        "data/valid: data set, intact, 40 rows",
        "run/checkpoints/step-00000002: checkpoint, intact, step 2", "step-00000004: checkpoint, intact, step 4",
        "run/model: model, intact", "all values valid",
    ):  # fmt: skip
        assert words in said.replace("\n", " "), words
    assert "DAMAGED" not in said


@pytest.mark.parametrize(
    "name",
    [
        "data/train/part-00000.parquet", "data/valid/part-00000.parquet", "data/etl.zip",
        "run/model/model.json", "run/model/schema.json", "run/model/etl.zip", "run/model/weights/dense.safetensors",
        "run/model/weights/manifest.json", "run/checkpoints/step-00000004/dense.safetensors",
    ],
)  # fmt: skip
def test_one_changed_bit_is_found_and_named(place: Path, name: str) -> None:
    """The last bit of a byte in the middle: numbers stay numbers, so that a check sum alone can tell."""
    file = place / name
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    file.write_bytes(bad)
    try:
        said = check(place / "data", place / "run", code=1)
        assert said.count("DAMAGED") == 1
        assert str(file.parent) in said
        assert said.count("intact") == 5, "what stands next to it is still checked"
    finally:
        file.write_bytes(good)


def test_a_data_set_of_an_earlier_release(tmp_path: Path, place: Path) -> None:
    train = Dataset(place / "data/train")
    data = write_dataset(tmp_path / "set", train.schema, [{"click": [0, 1], "item": [3, 4], "price": [0.5, 1.5]}])
    (data.path / "manifest.json").unlink()
    assert "2 rows read, all values valid; it was written without check sums" in check(data.path)
    part = data.path / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    assert "DAMAGED" in check(data.path, code=1)


def test_values_are_checked_where_that_is_asked(tmp_path: Path, place: Path) -> None:
    """A writer may have written ids that the schema does not allow: the files are then as they were written."""
    schema = Dataset(place / "data/train").schema
    write_dataset(tmp_path / "set", schema, [{"click": [1], "item": [10**6], "price": [0.0]}])
    assert "intact, 1 rows" in check(tmp_path / "set")
    assert "outside the range" in check(tmp_path / "set", "--rows", code=1)


@pytest.mark.parametrize("name", ["nothing", "raw.csv", "."])
def test_what_cannot_be_checked(place: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "raw.csv").write_text("a\n")
    assert "there is nothing to check here" in check(tmp_path / name, code=1)
