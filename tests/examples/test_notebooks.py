"""The gallery of notebooks: executed before it was committed, and executed again here."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "pytorch"


def code_cells(file):
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_is_a_gallery_and_its_page_lists_it():
    assert len(NOTEBOOKS) >= 4
    page = (FOLDER.parents[1] / "docs" / "examples" / "notebooks.md").read_text()
    assert set(re.findall(r"notebooks/([\w]+)\.ipynb", page)) == {file.stem for file in NOTEBOOKS}


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_was_executed_from_top_to_bottom(file):
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem == QUICK else pytest.mark.slow) for file in NOTEBOOKS],
    ids=lambda file: file.stem,
)
def test_it_can_be_executed(file, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="executing notebooks needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    book = nbformat.read(file, as_version=4)
    nbformat.validate(book)
    client = nbclient.NotebookClient(
        book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises CellExecutionError, with the traceback, if a cell fails
