"""What processes of the command line leave behind: no temporary file."""

import os
import subprocess
import sys
from pathlib import Path


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
