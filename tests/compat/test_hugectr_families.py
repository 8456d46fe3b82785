"""A program for each family of HugeCTR's samples runs to its end, and its loss falls."""

import re
import sys
from pathlib import Path

import pytest

from viviane.compat.hugectr import run_script
from viviane.core.errors import VivianeError

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


def test_passes_over_tables_larger_than_the_workspace_give_the_files_of_tables_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for megabytes in (1, 100):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        monkeypatch.chdir(folder)
        run_script(PROGRAMS / "etc_tiers.py", [str(megabytes)])
        assert (folder / "local").exists() == (megabytes < 100)  # where rows go that leave memory
        every = [*Path("rows").iterdir(), Path("etc_dense_72.model")]
        files[megabytes] = {one.name: one.read_bytes() for one in every}
    assert files[1] == files[100]


def test_a_keyset_larger_than_the_workspace_and_one_of_other_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (PROGRAMS / "etc_tiers.py").read_text()
    monkeypatch.chdir(tmp_path)
    for before, after, message in (
        ("np.arange(3000)\n    deep", "np.arange(30000)\n    deep", "do not fit into the workspace"),
        ("np.arange(2000)\n", "np.arange(2000) + 9**9\n", "has a key that is in no slot"),
    ):
        assert before in text
        (tmp_path / "script.py").write_text(text.replace(before, after))
        with pytest.raises(VivianeError, match=message):
            run_script(tmp_path / "script.py", ["1"])


def test_a_session_of_2_3_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(PROGRAMS / "session_v2.py")  # asserts a falling loss, and the same predictions from its files
    assert Path("v2_pred.txt").is_file()
