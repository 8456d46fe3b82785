"""A consumer for tests to kill: python killed_consumer.py ADDRESS FOLDER; prints the publications that are complete."""

import sys
import time
from pathlib import Path
from typing import Any

from viviane.store import Column, RowLayout
from viviane.store.applied import AppliedRocksTier
from viviane.store.rocks import RocksDatabase
from viviane.store.subscriber import DeltaSubscriber

LAYOUT = RowLayout([Column("weight", "float32", 4)])


class Target:
    """One table in RocksDB, rows and positions in one write."""

    model = "m"

    def __init__(self, folder: Path) -> None:
        self.database = RocksDatabase(folder)
        self.tier = AppliedRocksTier(self.database, "t", LAYOUT)

    def row_bytes(self, table: str) -> int | None:
        return LAYOUT.row_bytes if table == "t" else None

    def applied(self, stream: tuple[str, int]) -> int:
        return int(self.tier.note(f"applied {stream[1]}") or 0)

    def publisher(self) -> int:
        return int(self.tier.note("publisher") or 0)

    def apply(self, changes: Any, last: Any, publisher: int, dense: bytes | None, publication: int) -> None:
        for own in changes.values():
            notes = {f"applied {partition}": str(seq).encode() for (_, partition), seq in last.items()}
            self.tier.apply(*own.merged(LAYOUT.row_bytes), {**notes, "publisher": str(publisher).encode()})


if __name__ == "__main__":
    target = Target(Path(sys.argv[2]))
    with DeltaSubscriber(sys.argv[1], target) as subscriber:
        while True:
            subscriber.check()
            print(subscriber.applier.status.publication, flush=True)
            time.sleep(0.01)
