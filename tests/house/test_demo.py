"""`make demo` on few rows: every command of the road works on what the one before it wrote."""

from pathlib import Path

import pyarrow.parquet as pq

from warm import Warm

ROOT = Path(__file__).parents[2]


def test_the_demo_goes_from_raw_logs_to_a_report(tmp_path: Path, warm: Warm) -> None:
    done = warm.run([ROOT / "examples" / "demo.py", "--folder", "demo", "--rows", "4000"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "demo" / "run" / "report.html").stat().st_size > 10_000
    assert pq.read_table(tmp_path / "demo" / "scores.parquet").num_rows == 1000
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
