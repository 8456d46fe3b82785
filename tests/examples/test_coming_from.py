"""The feature tables of the pages for users of other libraries: what they name is there, what they miss is not."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import viviane as vv
from viviane.cli.main import COMMANDS

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))


def found(path: str) -> Any:
    place: Any = vv
    for name in path.split("."):
        place = getattr(place, name)
    return place


def rows(page: Path) -> list[list[str]]:
    lines = page.read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return table[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_table_names_is_there(page: Path) -> None:
    table = rows(page)
    assert len(table) >= 8
    ours = " ".join(cell for row in table for cell in row[1:])
    for path in re.findall(r"vv\.([\w.]+)", ours):
        assert found(path) is not None, path
    for options in re.findall(r"Solver\(([^)]*)\)", ours):
        assert set(re.findall(r"(\w+)=", options)) <= set(vv.Solver.model_fields)
    for command in re.findall(r"`viviane ([\w-]+)`", ours):
        assert command in COMMANDS
    named = [name for row in table for name in re.findall(r"`(\w+)`", row[1]) if "vv.zoo." in row[1]]
    assert set(named) <= {*vv.zoo.__all__}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_table_says_is_missing_is_missing(page: Path) -> None:
    names = [name.lower() for name in vv.zoo.__all__]
    for row in rows(page):
        if row[1] == "not in the zoo":
            assert not {name.lower() for name in re.findall(r"`(\w+)`", row[0])} & set(names)
        for missing in re.findall(r"(\w+) (?:and (\w+) )?(?:is|are) not there", row[-1]):
            assert not {name.lower() for name in missing if name} & set(names)


def test_options_that_the_tables_translate_to() -> None:
    for name in ("categories", "min_count", "class_weight"):
        assert name in inspect.signature(vv.CTRClassifier).parameters
    assert "group" in inspect.signature(vv.CTRRanker.fit).parameters
    assert "run_folder" in inspect.signature(vv.Model.fit).parameters
    assert "rank" in inspect.signature(vv.zoo.DCNv2).parameters
    assert "module" in inspect.signature(vv.Model).parameters
    assert "weight_decay" in vv.AdaGrad.model_fields
