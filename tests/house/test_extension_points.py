"""A new optimizer, layer, metric, file format, ETL operator or sharding type touches at most three source files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "viviane"
# One item of each kind: how it is named in source, and the files of CONTRIBUTING.md's table.
ITEMS = {
    "optimizer": (r"\bLamb\b|\"lamb\"", {"config/optimizers.py", "ops/rules/lamb.py", "__init__.py"}),
    "layer": (r"\bFmOrder2\b", {"nn/cross.py", "nn/__init__.py"}),
    "metric": (r"\bSmape\b|\"smape\"", {"metrics/errors.py", "metrics/__init__.py"}),
    "file format": (
        r"\bVivianeFormat\b",
        {"data/formats/viviane.py", "data/formats/registry.py", "data/formats/__init__.py"},
    ),
    "ETL operator": (r"\bStandardize\b|\"standardize\"", {"etl/operators.py", "serving/plain_columns.py"}),
    "sharding type": (r"\"hybrid\"", {"parallel/plan.py", "parallel/costs.py", "parallel/planner.py"}),
}
# Re-exports of older names, HugeCTR's names, models that use an item, and native steps of sessions, which call a layer
# that has none: a new item needs none of them.
NOT_NEEDED = ("config/__init__.py", "compat/", "zoo/", "etl/infer.py", "tensorflow/", "serving/program.py")


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_is_in_the_files_of_the_table(kind: str) -> None:
    pattern, expected = ITEMS[kind]
    found = {
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if re.search(pattern, path.read_text())
    }  # fmt: skip
    needed = {name for name in found if not name.startswith(NOT_NEEDED)}
    assert needed == expected, f"a new {kind} should touch the files of CONTRIBUTING.md's table only"
    assert len(needed) <= 3


def test_the_table_names_these_files() -> None:
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    for kind in ITEMS:
        assert re.search(rf"^\| (dense )?{kind}", text, re.MULTILINE), f"CONTRIBUTING.md has no row for a new {kind}"
