"""The load generator: what it counts, and that it hides nothing."""

import asyncio
import base64
import json
import multiprocessing
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError, DataError, RemoteError
from viviane.serving.load import LoadSettings, run_load
from viviane.serving.load.described import checked_columns, checked_inputs
from viviane.serving.load.generator import prepare_load
from viviane.serving.load.loops import closed_loop, open_loop
from viviane.serving.load.perf_analyzer import rows_of
from viviane.serving.load.requests import PreparedRequest, RequestSource, read_rows
from viviane.serving.load.senders import Senders
from viviane.serving.server import ServerSettings


def rows_of_server(http) -> float:
    """Rows that the server has counted in its metrics."""
    text = http.get("/metrics").body.decode()
    return float(re.search(r'^viviane_rows_total\{model="deepfm"\} (\S+)', text, re.MULTILINE).group(1))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_load_is_counted_by_server_and_client_alike(server, http, raw, protocol) -> None:
    url = server.http_url if protocol == "http" else server.grpc_target
    http.post("/v1/models/deepfm:predict", {"instances": raw(1)})
    before = rows_of_server(http)
    settings = LoadSettings(url=url, protocol=protocol, model="deepfm", rows=3, concurrency=(2,), rates=(20,),
                            seconds=0.5, warm_up=1)  # fmt: skip
    result = run_load(settings, pa.Table.from_pylist(raw(50)))
    closed, opened = result.phases
    for phase in result.phases:
        assert phase.sent == phase.answered + sum(phase.errors.values())
        assert not phase.errors
        assert 0 < phase.latency_ms["p50"] <= phase.latency_ms["p99"] <= phase.latency_ms["max"]
    assert closed.kind == "closed"
    assert opened.load == 20
    assert rows_of_server(http) - before == 3 * (closed.answered + opened.answered + 1)


class Stalling:
    """A server that answers one request at a time, and stops for a while in the middle."""

    def __init__(self) -> None:
        self.free, self.count = asyncio.Lock(), 0

    async def send(self, _: object) -> str:
        async with self.free:
            self.count += 1
            await asyncio.sleep(0.5 if self.count == 20 else 0.001)
        return "OK"


def test_the_time_that_requests_wait_for_a_stalled_server_counts() -> None:
    """A generator that waits for answers sees one slow request in the stall; arrivals at a rate see them all."""
    settings = LoadSettings(url="http://x", seconds=1, seed=1)
    waiting = asyncio.run(closed_loop(Stalling(), [b""], 1, settings)).phase("closed", 1, 1)
    arriving = asyncio.run(open_loop(Stalling(), [b""], 100, settings)).phase("open", 100, 1)
    assert waiting.latency_ms["p90"] < 50
    assert arriving.latency_ms["p90"] > 300
    assert arriving.latency_ms["max"] > 450


def test_requests_that_could_not_be_sent_do_not_count_as_sent() -> None:
    class Silent:
        async def send(self, _: object) -> str:
            await asyncio.sleep(0.4)
            return "OK"

    settings = LoadSettings(url="http://x", seconds=0.3, max_outstanding=5)
    phase = asyncio.run(open_loop(Silent(), [b""], 200, settings)).phase("open", 200, 1)
    assert (phase.sent, phase.answered) == (5, 5)
    assert phase.errors["not sent"] > 20


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_processes_share_clients_and_rate(server, http, raw, protocol) -> None:
    url = server.http_url if protocol == "http" else server.grpc_target
    http.post("/v1/models/deepfm:predict", {"instances": raw(1)})
    before = rows_of_server(http)
    settings = LoadSettings(url=url, protocol=protocol, model="deepfm", concurrency=(3,), rates=(60,), seconds=0.5,
                            warm_up=1, processes=2)  # fmt: skip
    result = run_load(settings, pa.Table.from_pylist(raw(50)))
    closed, opened = result.phases
    assert not closed.errors
    assert not opened.errors
    assert opened.load == 60
    assert 30 - 5 * np.sqrt(30) < opened.sent < 30 + 5 * np.sqrt(30)
    assert rows_of_server(http) - before == closed.answered + opened.answered + 1


def test_a_process_that_ends_is_an_error_with_its_number(server, raw) -> None:
    settings = LoadSettings(url=server.http_url, model="deepfm", seconds=0.2, processes=2)
    model, made = prepare_load(settings, pa.Table.from_pylist(raw(5)))
    with Senders(settings, model, made) as senders:
        children = multiprocessing.active_children()
        children[0].kill()
        children[0].join()
        with pytest.raises(RemoteError, match="a process of the load test ended") as error:
            senders.run("closed", 2)
        assert str(children[0].pid) in str(error.value)
    assert not set(multiprocessing.active_children()) & set(children)


def test_arrivals_are_a_poisson_process_of_their_rate() -> None:
    class Instant:
        async def send(self, _: object) -> str:
            return "429"

    tally = asyncio.run(open_loop(Instant(), [b""], 2000, LoadSettings(url="http://x", seconds=0.5)))
    phase = tally.phase("open", 2000, 1)
    assert 1000 - 5 * np.sqrt(1000) < phase.sent < 1000 + 5 * np.sqrt(1000)
    assert phase.errors == {"429": phase.sent}
    assert phase.answered == 0
    assert phase.latency_ms == {}


def test_rows_that_a_server_refuses_and_servers_that_are_not_there(server, raw) -> None:
    with pytest.raises(ConfigError, match="which model"):
        run_load(LoadSettings(url=server.http_url))
    bad = pa.Table.from_pylist([{**row, "when": "never"} for row in raw(5)])
    with pytest.raises(RemoteError, match="rejects these rows"):
        run_load(LoadSettings(url=server.http_url, model="deepfm"), bad)
    with pytest.raises(RemoteError, match="does not respond"):
        run_load(LoadSettings(url="http://127.0.0.1:9", model="x"))


def test_the_command_writes_figures_and_a_plot(server, raw, tmp_path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "load.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in raw(20)))
    assert read_rows(file, 7).num_rows == 7
    done = CliRunner().invoke(
        app,
        ["load-test", server.http_url, "--model", "mmoe", "--rows", str(file), "--concurrency", "1,4",
         "--rates", "0.5x,2x", "--seconds", "0.3", "-o", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert [phase["kind"] for phase in content["phases"]] == ["closed", "closed", "open", "open"]
    assert content["phases"][3]["load"] == pytest.approx(4 * content["phases"][2]["load"])
    assert out.with_suffix(".html").read_text().count("<svg") == 2


INPUT = {"name": "city", "datatype": "INT64", "shape": [-1, 1]}


@pytest.mark.parametrize("described", [
    3, [], {}, {"inputs": []}, {"inputs": [3]}, {"inputs": [{**INPUT, "datatype": "INT65"}]},
    {"inputs": [{**INPUT, "shape": [-1, 2**62]}]}, {"inputs": [{**INPUT, "shape": "x"}]},
    {"inputs": [{**INPUT, "name": ""}]}, {"inputs": [{**INPUT, "shape": [1e308]}]},
])  # fmt: skip
def test_descriptions_of_another_form_are_refused(described: Any) -> None:
    with pytest.raises(RemoteError, match="no description of the model's inputs"):
        checked_inputs(described, "http://a")


def test_rows_that_do_not_fit_and_requests_that_are_too_large_are_refused() -> None:
    for table, problem in (
        (pa.table({"city": ["a"]}), "does not fit its input"), (pa.table({"city": pa.array([], "int64")}), "no rows"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=problem):
            RequestSource([INPUT], None, table).prepared(1, 0)
    wide = {"name": "city", "datatype": "INT8", "shape": [-1, 1 << 20]}
    with pytest.raises(ConfigError, match="too large"):
        RequestSource([wide], None, None).prepared(65, 0)
    with pytest.raises(DataError, match="does not fit its input"):
        RequestSource([wide], None, pa.table({"city": [1]})).prepared(1, 0)
    column = {"name": "city", "dtype": "int64", "shape": [-1], "raw": False, "num_ids": 9}
    assert checked_columns({"inputs": [column]}, [INPUT]) is not None
    for change in ({"num_ids": 0}, {"name": "other"}, {"dtype": "int65"}, {"shape": []}):
        assert checked_columns({"inputs": [{**column, **change}]}, [INPUT]) is None


@pytest.mark.parametrize("url", ["http://a..b:80", "http://[::1", "a:99999", f"http://{'x' * 5000}:1"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not (the address of a server|a valid host)"):
        LoadSettings(url=url)
    with pytest.raises(ConfigError, match="not a valid host"):
        ServerSettings(host=url)


def test_shared_memory_needs_perf_analyzer() -> None:
    with pytest.raises(ConfigError, match="perf_analyzer"):
        run_load(LoadSettings(url="http://127.0.0.1:1", shared_memory=True))


def test_rows_of_a_request_become_entries_of_perf_analyzer() -> None:
    texts = b"".join(len(one).to_bytes(4, "little") + one for one in (b"a", b"", b"bcd", b"e", b"f", b"gh"))
    numbers = np.arange(6, dtype=np.float32)
    request = PreparedRequest((("t", "BYTES", (3, 2), texts), ("x", "FP32", (3, 2), numbers.tobytes())))
    entries = rows_of(request, 3)
    assert [one["x"] for one in entries] == [{"content": [2.0 * i, 2.0 * i + 1], "shape": [2]} for i in range(3)]
    assert all(one["t"]["shape"] == [2] for one in entries)
    assert b"".join(base64.b64decode(one["t"]["content"]["b64"]) for one in entries) == texts
    assert base64.b64decode(entries[1]["t"]["content"]["b64"]) == b"\3\0\0\0bcd\1\0\0\0e"
