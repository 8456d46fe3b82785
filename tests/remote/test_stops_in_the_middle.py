"""A bucket that falls silent, a process that is killed, in the middle: a clear error, the old rows, a way on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.core.errors import RemoteError
from viviane.core.locations import location
from viviane.core.remote import published
from viviane.data import Dataset, write_dataset
from viviane.etl import EtlConfig, run
from viviane.etl.stage import Stager
from viviane.schema import Schema

pytest.importorskip("moto", reason="an S3 server to test with: pip install 'moto[s3]' flask flask-cors")
from store import Store

SCHEMA = Schema(dense=[{"name": "x"}])
CONFIG = EtlConfig(
    input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
    labels=[{"name": "click"}], categorical=[{"name": "item"}],
)  # fmt: skip


@pytest.fixture
def awake(shared_store: Store) -> Iterator[Store]:
    """The store, which continues in the end whatever a test did to it."""
    yield shared_store
    shared_store.go_on()


def rows(first: int) -> dict[str, Any]:
    return {"x": np.arange(first, first + 3000, dtype=np.float32)}


def first_x(url: str) -> float:
    return float(Dataset(url).head(1).dense[0, 0])


def versions(url: str) -> list[str]:
    return [one.name for one in (location(url) / "versions").iterdir()]


def test_a_bucket_falls_silent_while_the_etl_reads(
    bucket: str, awake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        text = "click,item\n" + "".join(f"{n % 2},i{(n * number) % 97}\n" for n in range(300))
        (tmp_path / f"day-{number}.csv").write_text(text)
        with awake.client().open_output_stream(f"{bucket}/raw/day-{number}.csv") as file:
            file.write(text.encode())
    sift, seen = Stager._sift, []

    def silent_after_two(self: Stager, *args: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "1")
            awake.pause()
        return sift(self, *args)

    monkeypatch.setattr(Stager, "_sift", silent_after_two)
    with pytest.raises(RemoteError, match="failed 3 times") as caught:
        run(CONFIG, f"s3://{bucket}/raw/day-*.csv", tmp_path / "out", threads=1)
    assert f"s3://{bucket}/raw/day-" in str(caught.value)
    assert 2 <= len(seen) < 8, "in the middle"
    assert not (tmp_path / "out").exists()
    awake.go_on()
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "2")
    assert run(CONFIG, f"s3://{bucket}/raw/day-*.csv", tmp_path / "out", threads=1).rows == {"train": 2400}
    run(CONFIG, tmp_path / "day-*.csv", tmp_path / "local", threads=1)
    ours, truth = ((tmp_path / one / "train/part-00000.parquet").read_bytes() for one in ("out", "local"))
    assert ours == truth


def test_a_bucket_falls_silent_while_rows_are_published(
    bucket: str, awake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/set"
    write_dataset(url, SCHEMA, [rows(0)], rows_per_group=100, rows_per_file=300)
    upload, calls = published.upload_file, []

    def silent_at_the_fourth(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "1")
            awake.pause()
        return upload(*args)

    monkeypatch.setattr(published, "upload_file", silent_at_the_fourth)
    with pytest.raises(RemoteError, match="failed 3 times") as caught:
        write_dataset(url, SCHEMA, [rows(50_000)], rows_per_group=100, rows_per_file=300, overwrite=True)
    assert url in str(caught.value)
    awake.go_on()
    monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "2")
    assert first_x(url) == 0, "what was published before still counts"
    write_dataset(url, SCHEMA, [rows(70_000)], rows_per_group=100, rows_per_file=300, overwrite=True)
    assert first_x(url) == 70_000
    assert len(versions(url)) == 2  # the one before stays for its readers; what came to no end is gone


PROGRAM = """
import os, signal, sys
import numpy as np
from viviane.core.remote import published
from viviane.data import write_dataset
from viviane.schema import Schema
upload, calls = published.upload_file, []
def deadly(*args):
    entry = upload(*args)
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return entry
published.upload_file = deadly
x = np.arange(50_000, 53_000, dtype=np.float32)
write_dataset(sys.argv[1], Schema(dense=[{"name": "x"}]), [{"x": x}], rows_per_file=300, rows_per_group=100,
              overwrite=True)
"""


def test_a_process_is_killed_while_it_publishes(bucket: str, use: Callable[[Store], str]) -> None:
    url = f"s3://{bucket}/set"

    def publish_and_die() -> None:
        done = subprocess.run([sys.executable, "-c", PROGRAM, url], check=False, capture_output=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr

    publish_and_die()
    with pytest.raises(RemoteError, match="an upload is not finished"):
        Dataset(url)
    write_dataset(url, SCHEMA, [rows(0)], overwrite=True)
    assert first_x(url) == 0
    publish_and_die()
    assert first_x(url) == 0
    write_dataset(url, SCHEMA, [rows(70_000)], overwrite=True)
    assert first_x(url) == 70_000
    assert len(versions(url)) == 2


def test_a_folder_is_published_behind_the_end_of_the_main_thread(bucket: str, tmp_path: Path) -> None:
    """As a checkpoint may be that is written in the background."""
    for number in range(10):
        (tmp_path / str(number)).write_text("x" * number)
    program = """
import sys, threading
from pathlib import Path
from viviane.core.locations import location
from viviane.core.remote.published import upload_folder
target, ended = location(sys.argv[2]), threading.Event()
def save():
    ended.wait()
    upload_folder(Path(sys.argv[1]), target)
threading.Thread(target=save).start()
threading._register_atexit(ended.set)  # called when pools have ceased to take work
"""
    url = f"s3://{bucket}/late"
    subprocess.run([sys.executable, "-c", program, str(tmp_path), url], check=True, timeout=60)
    found = published.published_place(location(url))
    assert {path.name: len(path.read_bytes()) for path in found.iterdir()} == {str(n): n for n in range(10)}
