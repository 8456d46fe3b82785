import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from saved_models import Models, raw_rows


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="session")
def raw():
    return raw_rows
