"""A program for each family of HugeCTR's samples runs to its end, and its loss falls."""

import re
import sys
from pathlib import Path

import pytest

from viviane.compat.hugectr import run_script

PROGRAMS = Path(__file__).parent / "programs"
LOSS = re.compile(r"Iter: \d+ Time\(\d+ iters\): [\d.]+s Loss: ([\d.]+) lr:")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("din", r"Finish 120 iterations with batchsize: 32"),
        ("preview_v3", r"Finish 100 iterations with batchsize: 32"),
        ("ncf", r"Finish 25 epochs 100 global iterations with batchsize: 32"),
        ("wdl_inference", r"Finish 100 iterations with batchsize: 64"),
        pytest.param("mmoe", r"Finish 100 iterations with batchsize: 32", marks=slow),
        pytest.param("ebc", r"Finish 120 iterations with batchsize: 64", marks=slow),
        pytest.param("bst", r"Finish 120 iterations with batchsize: 32", marks=slow),
        pytest.param("ftrl_criteo", r"Finish 120 iterations with batchsize: 32", marks=slow),
        ("etc_passes", r"Finish 8 epochs 48 global iterations with batchsize: 32"),
    ],
)
def test_a_family_runs_and_its_loss_falls(
    name: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(PROGRAMS / f"{name}.py")  # its own assertions hold as well
    printed = capsys.readouterr().out
    found = [float(one) for one in LOSS.findall(printed.partition("Finish ")[0])]
    # labels are random numbers: what falls is the loss on rows that come again and again
    assert found[-1] < 0.97 * found[0], found
    assert re.search(last + r" in [\d.]+s\.", printed)
    assert not [one for one in sys.modules if one.split(".")[0] == "hugectr"]


def test_a_session_of_2_3_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(PROGRAMS / "session_v2.py")  # asserts a falling loss, and the same predictions from its files
    assert Path("v2_pred.txt").is_file()
