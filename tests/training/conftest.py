import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from click_model import make_dataset

from viviane.data import Dataset


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    make_dataset(folder / "train", 600, seed=1)
    make_dataset(folder / "valid", 200, seed=2)
    return folder


@pytest.fixture
def train(data: Path) -> Dataset:
    return Dataset(data / "train")


@pytest.fixture
def valid(data: Path) -> Dataset:
    return Dataset(data / "valid")
