"""Figures: recorded with their circumstances, newest one shown, stale pages noticed."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("record")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    monkeypatch.setattr(module.machine, "describe", lambda: "2 cores of a test")
    return module


def keep(recorder: ModuleType, value: float, **others: object) -> None:
    figure = {"bench": "reader", "case": "one-hot", "metric": "speed", "unit": "M rows/s", "better": "higher"}
    recorder.record(**figure, value=value, **others)


def page(folder: Path, names: str) -> Path:
    (folder / "docs").mkdir(exist_ok=True)
    path = folder / "README.md"
    path.write_text(f"before\n<!-- figures: {names} -->\nold\n<!-- figures end -->\nafter\n")
    return path


def tables(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "tables.py"), "--root", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_figure_carries_its_circumstances(recorder: ModuleType, tmp_path: Path) -> None:
    keep(recorder, 1.5, goal=1.0, peer="torch", peer_value=0.5, spread=(1.4, 1.6))
    (line,) = (tmp_path / "benchmarks" / "results" / "reader.jsonl").read_text().splitlines()
    figure = json.loads(line)
    assert figure["value"] == 1.5
    assert figure["machine"] == "2 cores of a test"
    assert figure["versions"]["torch"]
    assert set(figure) >= {"commit", "date", "spread", "goal", "floor", "peer", "peer_value", "shape"}


def test_figures_of_one_name_show_the_shape_in_which_they_differ(recorder: ModuleType, tmp_path: Path) -> None:
    keep(recorder, 3.0, shape={"batch": 1024, "dim": 16})
    keep(recorder, 1.0, shape={"batch": 64, "dim": 16})
    where = page(tmp_path, "reader")
    assert tables(tmp_path).returncode == 0
    text = where.read_text()
    assert "| one-hot (batch 1,024) | speed, more is better | **3** M rows/s |" in text
    assert "| one-hot (batch 64) | speed, more is better | **1** M rows/s |" in text


def test_every_row_of_the_benchmarks_page_has_a_name_of_its_own() -> None:
    """Rows of one name and different values would not tell a reader which is which."""
    module = script("tables")
    for bench, figures in module.load(BENCHMARKS / "results").items():
        for machine in {figure["machine"] for figure in figures}:
            here = [figure for figure in figures if figure["machine"] == machine]
            names = [(case, figure["metric"]) for case, figure in zip(module.cases(here), here, strict=True)]
            assert len(names) == len(set(names)), f"{bench}, {machine}"


def test_a_small_run_keeps_nothing(
    recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--small"])
    keep(recorder, 1.5)
    assert "reader | one-hot | speed: 1.5 M rows/s" in capsys.readouterr().out
    assert not (tmp_path / "benchmarks").exists()


def test_nan_is_refused(recorder: ModuleType) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        keep(recorder, float("nan"))


def test_tables_show_the_newest_figure(recorder: ModuleType, tmp_path: Path) -> None:
    readme = page(tmp_path, "reader")
    keep(recorder, 1.5)
    keep(recorder, 2.25, goal=3.0, spread=(2.0, 2.5))
    assert tables(tmp_path, "--check").returncode == 1
    assert tables(tmp_path).returncode == 0
    text = readme.read_text()
    assert "| case | figure | value | goal |\n" in text
    assert "| one-hot | speed, more is better | **2.25** M rows/s (2 to 2.5) | 3 (not met) |" in text
    assert "1.5" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- figures end -->\nafter\n")
    assert tables(tmp_path, "--check").returncode == 0
    keep(recorder, 3.5, goal=3.0)
    stale = tables(tmp_path, "--check")
    assert stale.returncode == 1
    assert "not up to date: README.md; run `make bench-tables`" in stale.stderr


def test_no_figures_yet(tmp_path: Path) -> None:
    readme = page(tmp_path, "all")
    tables(tmp_path)
    assert "No figures recorded yet" in readme.read_text()


def test_a_broken_line_is_named(recorder: ModuleType, tmp_path: Path) -> None:
    page(tmp_path, "all")
    keep(recorder, 1.0)
    with (tmp_path / "benchmarks" / "results" / "reader.jsonl").open("a") as file:
        file.write('{"case": "half')
    done = tables(tmp_path)
    assert done.returncode == 1
    assert "reader.jsonl:2: not a figure" in done.stderr


@pytest.mark.parametrize(
    ("value", "text"), [(0.80251, "0.8025"), (1234567.0, "1,234,567"), (0.000123, "0.000123"), (0, "0"), (None, "")]
)
def test_numbers_are_written_for_people(value: float | None, text: str) -> None:
    assert script("tables").number(value) == text


def test_make_gpu_runs_every_test_that_needs_a_gpu() -> None:
    stages = script("on_gpus")
    listed = [Path(one) for one in f"{stages.ONE_GPU} {stages.SEVERAL_GPUS}".split()]
    root = BENCHMARKS.parent
    needs = re.compile(r"not torch\.cuda\.is_available\(\)|torch\.cuda\.device_count\(\)")
    marked = [one.relative_to(root) for one in root.glob("tests/**/test_*.py") if needs.search(one.read_text("utf-8"))]
    own = Path(__file__).relative_to(root)
    left_out = [one for one in marked if one != own and not any(one.is_relative_to(place) for place in listed)]
    assert left_out == [Path("tests/serving/test_requests.py")], (
        "add it to benchmarks/on_gpus.py"
    )  # needs that none is there
    assert all((root / one).exists() for one in listed)
