"""Tests of this folder share raw_files.py, which importlib mode does not put on the path, and a Spark session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One session for all tests: the engine uses the active one."""
    sql = pytest.importorskip("pyspark.sql", reason="needs the extra spark")
    pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("spark")
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": "3", "spark.sql.session.timeZone": "UTC",
    }.items():  # fmt: skip
        builder = builder.config(key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        session = builder.getOrCreate()
        yield
        session.stop()
