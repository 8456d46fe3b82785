"""A delta that the stream loses between a publisher and a server, under load.

A relay copies the messages of one topic to another, but for one delta. Outcomes are
    same     the bits of the model as it was published last
    older    those of a whole earlier publication, while the gap is reported with the number of the lost delta
and never a mixture of publications.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click_models import build, train

from viviane.serving import InferenceSession
from viviane.store.applier import DeltaGapError
from viviane.store.delta import DeltaKind, decode_delta

PARTITIONS = 3


def relay(broker: Any, source: str, target: str, last: int, lost: int) -> tuple[str, int, int]:
    """Copy publications up to `last` from a topic to another; the first rows of `lost` stay out, and are returned."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    client = Consumer({"bootstrap.servers": broker.servers, "group.id": "relay", "enable.auto.commit": False})
    client.assign([TopicPartition(source, one, OFFSET_BEGINNING) for one in range(PARTITIONS)])
    kept: dict[int, list[bytes]] = {one: [] for one in range(PARTITIONS)}
    left_out, ended, end = None, set[int](), time.monotonic() + 30
    while len(ended) < PARTITIONS:
        assert time.monotonic() < end, "the publications did not arrive"
        for message in client.consume(64, 0.1):
            assert message.error() is None
            head = decode_delta(message.value(), where="relay").header
            if left_out is None and head.publication == lost and head.kind == DeltaKind.ROWS:
                left_out = (head.table, head.partition, head.seq)
                continue
            kept[message.partition()].append(message.value())
            if head.kind == DeltaKind.END and head.publication == last:
                ended.add(message.partition())
    client.close()
    for partition, messages in kept.items():
        broker.write(target, messages, partition)
    assert left_out is not None
    return left_out


def run_case(
    broker: Any, rows: dict[str, Any], folder: Path, requests: int, strict: bool, with_outbox: bool
) -> dict[str, Any]:
    """Lose a delta of the second of three publications; returns the outcomes."""
    published, received = (f"{name}-{uuid4().hex[:8]}" for name in ("published", "received"))
    for one in (published, received):
        broker.make(one, PARTITIONS)
    model = build()
    model.save(folder / "models" / "1")
    updates = {"address": f"kafka://{broker.servers}/{received}", "visible": "publication"}
    updates |= {"outbox": str(folder / "outbox")} if with_outbox else {}
    clause = {"cache": {"rows": 30}, "rocksdb": {"folder": str(folder / "lost")}, "updates": updates, "strict": strict}
    publication = model.publish(f"kafka://{broker.servers}/{published}", outbox=folder / "outbox")
    wanted = [model.predict(rows)[:, 0].tobytes()]
    for first in (10, 20, 30):
        train(model, 4, first, publication)
        publication.publish()
        wanted.append(model.predict(rows)[:, 0].tobytes())
    publication.barrier()
    outcomes: dict[str, Counter[str]] = {"before": Counter(), "fault": Counter()}
    phase, stopping = "before", threading.Event()
    with InferenceSession(folder / "models", device="cpu", tables=clause) as session:
        assert session.tables is not None
        subscriber = session.tables.updates
        assert subscriber is not None

        def ask() -> None:
            while not stopping.is_set():
                own, reported = phase, bool(subscriber.status()["gaps"])
                scores = session.predict(rows).tobytes()
                place = wanted.index(scores) if scores in wanted else -1
                if own == "fault":
                    outcome = "same" if place == 3 else "older" if place == 1 and reported else "SILENTLY WRONG"
                else:
                    outcome = "same" if place >= 0 else "SILENTLY WRONG"
                outcomes[own][outcome] += 1

        client = threading.Thread(target=ask)
        client.start()
        table, partition, seq = relay(broker, published, received, last=3, lost=2)
        if with_outbox:
            assert subscriber.wait_for(3, 30)
        else:
            with pytest.raises(DeltaGapError, match=f"seq {seq}"):
                subscriber.wait_for(3, 30)
            assert {"table": table, "partition": partition, "seq": seq} in subscriber.status()["gaps"]
            end = time.monotonic() + 30
            while subscriber.applier.status.publication < 1 and time.monotonic() < end:
                time.sleep(0.01)
        phase = "fault"
        end = time.monotonic() + 60
        while sum(outcomes["fault"].values()) <= requests and time.monotonic() < end:
            time.sleep(0.01)
        stopping.set()
        client.join()
    publication.close()
    return {name: dict(found) for name, found in outcomes.items()} | {
        "all": dict(outcomes["before"] + outcomes["fault"])
    }
