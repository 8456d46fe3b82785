"""Names of packages that are imported on first use: all are there, and nothing else is loaded for them."""

import json
import subprocess
import sys

import pytest

import viviane.config
import viviane.etl

LATER = ("viviane.etl.infer", "viviane.etl.describe", "viviane.etl.drawing", "viviane.etl.sequence_job")
LATER += ("viviane.etl.spark", "viviane.config.optimizers", "viviane.config.solver", "duckdb", "ibis", "pandas")


@pytest.mark.parametrize("package", [viviane.etl, viviane.config])
def test_every_public_name_is_there_and_listed(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009 - mypy knows that there is none


def test_what_runs_an_etl_loads_no_more_than_it_needs() -> None:
    program = "import sys, json; from viviane.etl import run; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert not set(LATER) & set(json.loads(done.stdout))
