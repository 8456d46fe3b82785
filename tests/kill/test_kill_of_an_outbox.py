"""kill -9 at every write of a publisher's outbox: appended deltas stay, and the next publisher continues after them."""

import json
from pathlib import Path

from kill.killed import restore
from viviane.store.delta import decode_delta
from viviane.store.outbox import Outbox, read_outbox
from warm import Warm

KILLED = Path(__file__).with_name("killed.py")
GOAL = 4
PUBLISH = f"""
import numpy as np
from viviane.store.delta import Delta, DeltaHeader
from viviane.store.outbox import Outbox
with Outbox("outbox", "ctr", base=5, keep_bytes=0) as box:
    if not box.publication:
        box.begin_with(7)
    while box.publication < {GOAL}:
        number = box.publication + 1
        head = DeltaHeader("ctr", "item", 1, 0, number, number - 1, publication=number)
        box.append([Delta(head, np.arange(3), np.full((3, 8), number, np.uint8)).encode()])
        if number % 2 == 0:
            box.confirm(box.next_frame)
    box.end_with(11)
"""


def publish(warm: Warm, place: Path, limit: str = "0") -> list[str]:
    done = warm.run([KILLED, limit, PUBLISH], cwd=place)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def published(folder: Path) -> list[int]:
    """Return the publications that consumers could ask for, read beside a publisher."""
    if not (folder / "outbox.json").exists():
        return []
    with Outbox(folder, "ctr") as box:
        last = box.last.get(("item", 0), 0)
        assert box.base in (5, 7)
        found = [decode_delta(data).header.seq for _, data in box.frames(0)]
    assert [decode_delta(data).header.seq for data in read_outbox(folder, "item", 0, 1, last)] == found
    return found


def test_every_write(warm: Warm, tmp_path: Path) -> None:
    whole, recorded = tmp_path / "whole", tmp_path / "recorded"
    whole.mkdir()
    writes = publish(warm, whole, f"record:{recorded}")
    everything = list(range(1, GOAL + 1))
    assert published(whole / "outbox") == everything
    assert not list(whole.rglob(".*"))
    kept = json.loads((recorded / "states.json").read_text())
    assert len(kept["moments"]) == len(writes) > 15
    lengths = []
    for number, entries in enumerate(kept["states"]):
        place = tmp_path / f"killed-{number}"
        restore(recorded, entries, place)
        found = published(place / "outbox")
        assert found == everything[: len(found)]
        lengths.append(len(found))
        if (place / "outbox/outbox.json").exists():
            assert not list(place.rglob(".*")), "the next start leaves something behind"
        publish(warm, place)
        assert published(place / "outbox") == everything
        assert not list(place.rglob(".*"))
    assert lengths == sorted(lengths)
    assert {*lengths} == {0, *everything}
