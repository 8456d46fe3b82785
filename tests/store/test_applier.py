"""Deltas are applied once and in order, whatever the stream does to them."""

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import StoreError
from viviane.store.applier import Changes, DeltaApplier, DeltaGapError
from viviane.store.delta import Delta, DeltaHeader, DeltaKind, decode_delta
from viviane.store.outbox import Outbox, read_outbox

WIDTH = 8


class DictTarget:
    """Tables as dicts, whose rows and positions change together."""

    model = "ctr"
    base = 0

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, bytes]] = {"item": {}, "user": {}}
        self.last: dict[tuple[str, int], int] = {}
        self.owner = 0
        self.dense: list[bytes] = []
        self.fails = False
        self.log: list[int] = []

    def row_bytes(self, table: str) -> int | None:
        return WIDTH if table in self.tables else None

    def applied(self, stream: tuple[str, int]) -> int:
        return self.last.get(stream, 0)

    def publisher(self) -> int:
        return self.owner

    def apply(self, changes, last, publisher, dense, publication) -> None:
        if self.fails:
            raise StoreError("the disk is full")
        for table, change in changes.items():
            keys, rows, erased = change.merged(WIDTH)
            self.tables[table] |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
            for key in erased.tolist():
                self.tables[table].pop(key, None)
        self.last |= last
        self.owner = publisher
        self.log.append(publication)
        if dense is not None:
            self.dense.append(dense)


class Source:
    """Makes publications, and remembers what a replay of them gives."""

    def __init__(self, partitions: int = 2) -> None:
        self.partitions, self.seq, self.publication = partitions, {}, 0
        self.truth: dict[str, dict[int, bytes]] = {"item": {}, "user": {}}
        self.log: list[bytes] = []

    def delta(self, table: str, partition: int, kind: DeltaKind, keys: list[int], rows: np.ndarray, **more) -> bytes:
        seq = self.seq.get((table, partition), 0) + 1
        self.seq[table, partition] = seq
        head = DeltaHeader("ctr", table, 1, partition, seq, seq - 1, self.publication, 77, self.partitions, kind=kind,
                           **more)  # fmt: skip
        return Delta(head, np.array(keys, np.int64), rows).encode()

    def publish(self, changes: Iterable[tuple[str, int, int]], dense: bytes | None = None) -> list[bytes]:
        """changes: table, key, value; a value of 0 erases."""
        self.publication += 1
        made = []
        for table, key, value in changes:
            partition = key % self.partitions
            if value:
                made.append(self.delta(table, partition, DeltaKind.ROWS, [key], np.full((1, WIDTH), value, np.uint8)))
                self.truth[table][key] = bytes([value]) * WIDTH
            else:
                made.append(self.delta(table, partition, DeltaKind.ERASED, [key], np.empty((1, 0), np.uint8)))
                self.truth[table].pop(key, None)
        if dense is not None:
            for part in range(2):
                half = np.frombuffer(dense, np.uint8)[part * len(dense) // 2 : (part + 1) * len(dense) // 2]
                made.append(self.delta("", 0, DeltaKind.DENSE, [0], half[None], part=part, num_parts=2))
        for partition in range(self.partitions):
            last = {table: seq for (table, own), seq in self.seq.items() if own == partition and table}
            content = {"last": last, "dense": 2 if dense is not None and not partition else 0}
            data = np.frombuffer(json.dumps(content).encode(), np.uint8)[None]
            made.append(self.delta("", partition, DeltaKind.END, [0], data))
        self.log += made
        return made


changes = st.lists(
    st.lists(st.tuples(st.sampled_from(["item", "user"]), st.integers(0, 5), st.integers(0, 255)), max_size=6),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(changes, st.integers(0, 2**32), st.sampled_from(["row", "publication"]))
def test_duplicates_restarts_and_cut_batches_give_a_replay_of_the_log(publications, seed, visible) -> None:
    source, target, random = Source(), DictTarget(), Random(seed)
    for one in publications:
        source.publish(one)
    applier = DeltaApplier(target, 2, visible=visible)
    at = kills = 0
    while at < len(source.log):
        step = random.randint(1, 5)
        begin = max(0, at - random.randint(0, 8))  # messages come again
        target.fails = random.random() < 0.2
        try:
            applier.offer(source.log[begin : at + step])
        except StoreError:
            continue
        at += step
        if kills < 3 and random.random() < 0.2:  # killed: only what the target remembers is left
            applier, at, kills = DeltaApplier(target, 2, visible=visible), 0, kills + 1
    target.fails = False
    applier.offer(source.log)
    assert target.tables == source.truth
    applier.check()


def test_partitions_may_overtake_each_other() -> None:
    source, target = Source(), DictTarget()
    for number in range(1, 9):
        source.publish([("item", key, number) for key in range(6)])
    applier = DeltaApplier(target, 2)
    applier.offer(sorted(source.log, key=lambda data: decode_delta(data).header.partition))
    assert target.tables == source.truth


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 11))
def test_a_dropped_delta_raises_with_its_number(dropped: int) -> None:
    source, target = Source(), DictTarget()
    for number in range(1, 3):
        source.publish([("item", key, number) for key in range(4)])
    head = decode_delta(source.log[dropped]).header
    applier = DeltaApplier(target, 2)
    applier.offer([data for i, data in enumerate(source.log) if i != dropped])
    if head.table:
        with pytest.raises(DeltaGapError) as caught:
            applier.check()
        assert (caught.value.table, caught.value.partition, caught.value.seq) == ("item", head.partition, head.seq)
        assert all(source.truth["item"][key] == row for key, row in target.tables["item"].items()
                   if key % 2 != head.partition)  # fmt: skip
    applier.offer(source.log)  # it comes after all
    assert target.tables == source.truth


def test_the_outbox_fills_a_gap(tmp_path: Path) -> None:
    source, target = Source(), DictTarget()
    for number in range(1, 4):
        source.publish([("item", key, number) for key in range(4)])
    with Outbox(tmp_path, "ctr") as box:
        box.append(source.log)
        applier = DeltaApplier(target, 2, repair=lambda *place: read_outbox(tmp_path, *place))
        applier.offer([source.log[i] for i in (0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)])
    assert target.tables == source.truth
    assert applier.status.repaired > 0
    applier.check()


def test_a_publication_becomes_visible_together() -> None:
    source, target = Source(), DictTarget()
    first = source.publish([("item", 0, 1), ("item", 1, 1)], dense=b"weights!")
    second = source.publish([("item", 0, 2), ("item", 1, 2)])
    applier = DeltaApplier(target, 2, visible="publication")
    applier.offer(first[:-1])
    assert not target.tables["item"]
    assert not target.dense
    applier.offer([*first[-1:], *second[:-2]])
    assert target.tables["item"] == {0: b"\1" * WIDTH, 1: b"\1" * WIDTH}
    assert target.dense == [b"weights!"]
    applier.offer(second[-2:])
    assert target.tables == source.truth


def test_dense_weights_come_whole_and_again_after_a_crash() -> None:
    source, target = Source(), DictTarget()
    log = source.publish([], dense=b"12345678")
    applier = DeltaApplier(target, 2)
    applier.offer(log[:1])
    assert not target.dense
    DeltaApplier(target, 2).offer(log)
    assert target.dense == [b"12345678"]


def test_damaged_and_foreign_messages_are_counted_and_left_out() -> None:
    source, other, target = Source(), Source(partitions=3), DictTarget()
    log = source.publish([("item", 0, 9)])
    wrong = bytearray(log[0])
    wrong[200] ^= 1
    head = DeltaHeader("other", "item", 1, 0, 1, 0, num_partitions=2)
    foreign = Delta(head, np.arange(1), np.zeros((1, 8), np.uint8)).encode()
    wide = Delta(DeltaHeader("ctr", "item", 1, 0, 1, 0, num_partitions=2), np.arange(1), np.zeros((1, 16), np.uint8))
    applier = DeltaApplier(target, 2)
    applier.offer([b"", b"x" * 2_000_000, bytes(wrong), foreign, wide.encode(), *other.publish([("item", 0, 3)]), *log])
    assert target.tables == source.truth
    assert applier.status.foreign == 1
    assert applier.status.refused >= 5


def ending(content: bytes) -> bytes:
    head = DeltaHeader("ctr", "", 1, 0, 1, 0, 1, 77, 2, kind=DeltaKind.END)
    return Delta(head, np.zeros(1, np.int64), np.frombuffer(content, np.uint8)[None]).encode()


@pytest.mark.parametrize("visible", ["row", "publication"])
@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b'{"last": []}', b'{"last": {"item": "x"}}', b'{"last": {"item": -1}}', b"no", b"[" * 5000,
     b'{"last": {"item": 18446744073709551615}}', b'{"last": {}, "dense": -1}', b'{"last": {}, "dense": 65536}'],
)  # fmt: skip
def test_an_end_of_another_form_is_left_out(content: bytes, visible) -> None:
    """It was offered again and again, and nothing after it was applied."""
    source, target = Source(), DictTarget()
    applier = DeltaApplier(target, 2, visible=visible)
    applier.offer([ending(content)])
    assert applier.status.refused == 1
    applier.offer(source.publish([("item", 0, 9)]))
    assert target.tables == source.truth
    applier.check()


@pytest.mark.parametrize("message", ["rows", "end"])
@pytest.mark.parametrize("seq", [10**12, 2**63 - 1])
def test_a_gap_may_be_of_any_size(seq: int, message: str) -> None:
    """All numbers of the gap were listed, which takes all memory."""
    head = DeltaHeader("ctr", "item", 1, 0, seq, seq - 1, 1, 77, 2)
    rows = Delta(head, np.arange(1), np.zeros((1, WIDTH), np.uint8)).encode()
    applier = DeltaApplier(DictTarget(), 2, repair=lambda *_: [])
    applier.offer([rows if message == "rows" else ending(f'{{"last": {{"item": {seq}}}}}'.encode())])
    with pytest.raises(DeltaGapError, match="seq 1"):
        applier.check()


def test_the_outbox_of_another_publisher_fills_no_gap(tmp_path: Path) -> None:
    source, target = Source(), DictTarget()
    head = DeltaHeader("ctr", "item", 1, 0, 1, 0, 1, publisher=78, num_partitions=2)
    other = Delta(head, np.zeros(1, np.int64), np.full((1, WIDTH), 5, np.uint8)).encode()
    log = source.publish([("item", 0, 1)])
    log += source.publish([("item", 0, 2)])
    with Outbox(tmp_path, "ctr") as box:
        box.append([other])
    applier = DeltaApplier(target, 2, repair=lambda *place: read_outbox(tmp_path, *place))
    applier.offer(log[1:])
    assert not target.tables["item"]
    with pytest.raises(DeltaGapError, match="another model or publisher"):
        applier.check()


def test_deltas_of_a_second_publisher_are_refused() -> None:
    source, target = Source(), DictTarget()
    DeltaApplier(target, 2).offer(source.publish([("item", 0, 9)]))
    target.owner = 5
    applier = DeltaApplier(target, 2)
    applier.offer(source.publish([("item", 0, 10)]))
    assert applier.status.refused > 0
    assert target.tables["item"][0] == bytes([9]) * 8


def test_the_last_change_of_a_key_counts() -> None:
    made = Source()
    parts = [made.delta("item", 0, DeltaKind.ROWS, [3, 4, 3], np.arange(3, dtype=np.uint8)[:, None].repeat(8, 1)),
             made.delta("item", 0, DeltaKind.ERASED, [4], np.empty((1, 0), np.uint8))]  # fmt: skip
    keys, rows, erased = Changes([decode_delta(one) for one in parts]).merged(8)
    assert (keys.tolist(), rows[:, 0].tolist(), erased.tolist()) == ([3], [2], [4])


def by_partition(log: list[bytes], partitions: int) -> list[list[bytes]]:
    return [[one for one in log if decode_delta(one).header.partition == part] for part in range(partitions)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_dense_weights_become_visible_with_their_rows_in_any_order_of_partitions(seed: int, publications: int) -> None:
    source, target, random = Source(), DictTarget(), Random(seed)
    for number in range(1, publications + 1):
        source.publish([("item", 0, number), ("item", 1, number)], dense=bytes([number]) * 8)
    applier = DeltaApplier(target, 2, visible="publication")
    queues = by_partition(source.log, 2)
    while any(queues):
        applier.offer([random.choice([one for one in queues if one]).pop(0)])
        rows = target.tables["item"]
        assert (target.dense[-1:] or [None]) == [rows.get(0)] == [rows.get(1)]
    assert rows[0] == bytes([publications]) * 8


def test_a_publication_waits_for_dense_weights_that_were_lost(tmp_path: Path) -> None:
    source, target = Source(), DictTarget()
    log = source.publish([("item", 0, 1), ("item", 1, 1)], dense=b"weights!")
    lost = next(one for one in log if decode_delta(one).header.kind is DeltaKind.DENSE)
    applier = DeltaApplier(target, 2, visible="publication")
    applier.offer([one for one in log if one != lost])
    assert not target.tables["item"]
    with pytest.raises(DeltaGapError, match="seq 1"):
        applier.check()
    applier.offer(source.publish([("item", 0, 2)], dense=b"WEIGHTS!"))  # the next publication contains everything
    assert target.tables["item"] == source.truth["item"]
    assert target.dense == [b"WEIGHTS!"]
    applier.check()
    with Outbox(tmp_path, "ctr") as outbox:
        outbox.append(log)
        target = DictTarget()
        applier = DeltaApplier(target, 2, visible="publication", repair=lambda *place: read_outbox(tmp_path, *place))
        applier.offer([one for one in log if one != lost])
    assert target.tables["item"] == {0: b"\1" * 8, 1: b"\1" * 8}
    assert target.dense == [b"weights!"]
