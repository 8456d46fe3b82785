"""The outbox: what append has returned from is there after any crash, and damage is found."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from viviane.core.errors import RemoteError, StoreError
from viviane.store.delta import Delta, DeltaHeader, decode_delta
from viviane.store.outbox import Outbox, read_outbox


def delta(seq: int, table: str = "item", rows: int = 3) -> bytes:
    head = DeltaHeader("ctr", table, 1, 0, seq, seq - 1, publication=seq)
    return Delta(head, np.arange(rows), np.full((rows, 8), seq % 251, np.uint8)).encode()


def seqs(box: Outbox) -> list[int]:
    return [decode_delta(data).header.seq for _, data in box.frames(0)]


def test_frames_come_back_in_order_after_closing(tmp_path: Path) -> None:
    with Outbox(tmp_path, "ctr") as box:
        assert box.append([delta(1), delta(2)]) == range(2)
        assert box.append([delta(3)]) == range(2, 3)
        box.confirm(2)
        publisher = box.publisher
    with Outbox(tmp_path, "ctr") as box:
        assert (box.publisher, box.sent, box.next_frame, box.num_waiting) == (publisher, 2, 3, 1)
        assert box.last == {("item", 0): 3}
        assert box.publication == 3
        assert seqs(box) == [1, 2, 3]
        assert [number for number, _ in box.frames(2)] == [2]


def test_one_publisher_at_a_time_and_one_model(tmp_path: Path) -> None:
    with Outbox(tmp_path, "ctr"), pytest.raises(StoreError, match="another publisher"):
        Outbox(tmp_path, "ctr")
    with pytest.raises(StoreError, match="another model"):
        Outbox(tmp_path, "other")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2000))
def test_a_torn_end_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    with Outbox(folder, "ctr") as box:
        box.append([delta(seq) for seq in range(1, 5)])
    file = next(folder.glob("*.vvlog"))
    whole = file.stat().st_size
    kept = whole * cut // 2000
    os.truncate(file, kept)
    with Outbox(folder, "ctr") as box:
        found = seqs(box)
        assert found == list(range(1, 1 + 4 * kept // whole))
        box.append([delta(len(found) + 1)])
        assert seqs(box) == list(range(1, len(found) + 2))


def test_damage_in_the_middle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.store.outbox._SEGMENT_BYTES", 1)  # a file a call
    with Outbox(tmp_path, "ctr") as box:
        for seq in range(1, 4):
            box.append([delta(seq)])
    files = sorted(tmp_path.glob("*.vvlog"))
    data = bytearray(files[1].read_bytes())
    data[40] ^= 1
    files[1].write_bytes(data)
    with pytest.raises(StoreError):
        Outbox(tmp_path, "ctr")
    files[1].unlink()
    with pytest.raises(StoreError, match="missing"):
        Outbox(tmp_path, "ctr")


def test_confirmed_files_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.store.outbox._SEGMENT_BYTES", 1)
    with Outbox(tmp_path, "ctr", keep_bytes=0) as box:
        for seq in range(1, 6):
            box.append([delta(seq)])
        box.confirm(3)
        assert seqs(box) == [4, 5]
        box.confirm(5)
        assert seqs(box) == [5]  # the last file is written to
    with Outbox(tmp_path, "ctr") as box:
        assert box.last == {("item", 0): 5}
        assert box.num_waiting == 0
    with pytest.raises(StoreError, match="no longer has"):
        list(read_outbox(tmp_path, "item", 0, 2, 5))


def test_a_consumer_reads_what_it_lost_beside_the_publisher(tmp_path: Path) -> None:
    with Outbox(tmp_path, "ctr") as box:
        box.append([delta(1), delta(1, "user"), delta(2), delta(3)])
        found = [decode_delta(data).header for data in read_outbox(tmp_path, "item", 0, 2, 3)]
        assert [(one.table, one.seq) for one in found] == [("item", 2), ("item", 3)]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Outbox(tmp_path, "ctr") as box:
        box.append([delta(1)])
        write = os.write

        def full(handle: int, data: bytes) -> int:
            write(handle, bytes(data)[:10])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with pytest.raises(StoreError, match="cannot be written"):
                box.append([delta(2)])
        assert box.last == {("item", 0): 1}
        box.append([delta(2)])
        assert seqs(box) == [1, 2]


WRITER = """
import sys
import numpy as np
from viviane.store.delta import Delta, DeltaHeader
from viviane.store.outbox import Outbox
with Outbox(sys.argv[1], "ctr") as box:
    while True:
        seq = box.last.get(("item", 0), 0) + 1
        head = DeltaHeader("ctr", "item", 1, 0, seq, seq - 1)
        box.append([Delta(head, np.arange(50), np.full((50, 64), seq % 251, np.uint8)).encode()])
        print(seq, flush=True)
"""


def test_what_append_returned_from_survives_kill_9(tmp_path: Path) -> None:
    acknowledged = 0
    for moment in (0.02, 0.05, 0.11):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            first = int(child.stdout.readline())
            assert first > acknowledged
            time.sleep(moment)
            child.send_signal(signal.SIGKILL)
            lines = child.stdout.read().split("\n")
        acknowledged = max([first, *(int(line) for line in lines[:-1])])
        with Outbox(tmp_path, "ctr") as box:
            found = seqs(box)
            assert found == list(range(1, len(found) + 1))
            assert len(found) >= acknowledged
            acknowledged = len(found)


def test_an_outbox_to_read_from_has_to_be_there(tmp_path: Path) -> None:
    """A wrong path was noticed only when a delta was missing, and then called for a newer snapshot."""
    from viviane.store.subscriber import DeltaSubscriber

    class Target:
        model = "ctr"

    target: Any = Target()
    with Outbox(tmp_path / "of another", "other"):
        pass
    (tmp_path / "file").write_text("x")
    address = "kafka://127.0.0.1:1/updates"
    for name, what in {"missing": "no such outbox", "file": "no such outbox", "of another": "another model"}.items():
        with pytest.raises(StoreError, match=what):
            DeltaSubscriber(address, target, outbox=tmp_path / name)
    with pytest.raises(StoreError, match="no such outbox"):
        list(read_outbox(tmp_path / "missing", "item", 0, 1, 2))
    (tmp_path / "empty").mkdir()  # of a publisher that has not begun
    with pytest.raises(RemoteError):
        DeltaSubscriber(address, target, outbox=tmp_path / "empty", settings={"socket.timeout.ms": 300})
