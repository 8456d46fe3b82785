"""How processes of the command line end: without the last collections where no user's code ran, with no file left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OBJECT_IN_A_CYCLE = """
import os, sys
class Kept:
    def __del__(self, write=os.write):
        write(1, b"finalized")
kept = Kept()
kept.itself = kept
sys.argv = ["viviane", *sys.argv[1:]]
from viviane.__main__ import main
"""


def say_at_the_end(program: str, *words: str) -> bytes:
    done = subprocess.run([sys.executable, "-c", OBJECT_IN_A_CYCLE + program, *words], capture_output=True, check=True)
    return done.stdout


@pytest.mark.parametrize("words", [["etl"], ["-q", "generate"], ["convert"], ["check"], ["keyset"]], ids=" ".join)
def test_short_commands_end_without_the_last_collections(words: list[str]) -> None:
    said = say_at_the_end("main()", *words, "--help")
    assert b"Usage" in said
    assert b"finalized" not in said


@pytest.mark.parametrize("words", [["hugectr"], ["sok"], ["train"], ["serve"]], ids=" ".join)
def test_commands_that_run_other_code_finalize_its_objects(words: list[str]) -> None:
    assert say_at_the_end("main()", *words, "--help").endswith(b"finalized")


def test_an_import_leaves_the_end_of_a_program_alone() -> None:
    assert say_at_the_end("import viviane.etl, viviane.cli.main", "etl") == b"finalized"


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
