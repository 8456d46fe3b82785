"""What processes of the command line leave behind: no temporary file, no report of leaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    (tmp_path / "raw.tsv").write_text("1\t7\t0a\t0b\n0\t\t0a\t\n1\t2\tff\t0b\n0\t1\t0a\t0b\n")
    preset = ["--preset", "criteo", "--num-dense", "1", "--num-categorical", "2", "--min-count", "1"]
    for words in (
        ["etl", "raw.tsv", *preset, "--split", "rows:train=0.75,test=0.25", "--output", "data"],
        ["etl", "raw.tsv", "--apply", "data", "--output", "applied"],
        ["check", "data", "--rows"],
        ["generate", "made", "--rows", "100"],
    ):
        command = [sys.executable, "-m", "viviane", "-q", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(spare)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert list(spare.iterdir()) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["applied", "data", "made", "raw.tsv", "spare"]
    assert not [one for one in tmp_path.rglob("*") if one.name.startswith(".") or one.suffix in (".lock", ".wal")]


@pytest.mark.parametrize(("loaded", "is_spared"), [("json", True), ("duckdb", False)])
def test_last_collections_are_spared_where_no_library_reports_leaks(loaded: str, is_spared: bool) -> None:
    """The command runs in a process of its own; nanobind's libraries print what collections have not freed."""
    program = (
        f"import atexit, gc, sys, {loaded}\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\n"
        "from viviane.__main__ import main\n"
        "sys.argv = ['viviane', 'etl', '--help']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(is_spared)
    assert not done.stderr
