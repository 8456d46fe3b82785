"""Servers from start to end: ports, overload, models that come and go, and ends without a lost answer."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import grpc
import numpy as np
import pytest
from clients import Grpc, Http, infer_fields, raw_socket, tensors_of

from viviane.core.errors import CheckpointError, ConfigError
from viviane.serving import ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.server import BatchSettings, InferenceServer, ServerSettings
from viviane.serving.server.messages import SERVICE


def settings(models, **more) -> ServerSettings:
    entry = ModelEntry(name="ctr", path=str(models.path("deepfm")), session=SessionSettings(device="cpu"))
    return ServerSettings(http_port=0, grpc_port=0, inference=RepositorySettings(models=(entry,)), **more)


def slow_down(server: InferenceServer, seconds: float) -> None:
    """Let every batch take so long, at least."""
    session = server.repository.get("ctr")
    usual = session.try_predict

    def slowly(rows, **named):
        time.sleep(seconds)
        return usual(rows, **named)

    session.try_predict = slowly


@contextlib.contextmanager
def held(server: InferenceServer, raw):
    """Let the model `ctr` compute one request and another one wait, until the event is set or the block ends."""
    row, goes_on, statuses = raw(1, seed=1)[0], threading.Event(), []
    session = server.repository.get("ctr")
    usual = session.try_predict
    session.try_predict = lambda rows, **named: usual(rows, **named) if goes_on.wait(30) else None

    def ask() -> None:
        client = Http(server)
        statuses.append(client.post("/v1/models/ctr:predict", {"instances": [row]}).status)
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    until = time.monotonic() + 20
    for waiting, thread in enumerate(threads):
        thread.start()
        while server.service.queued("ctr") != waiting or server.service.under_way != waiting + 1:
            assert time.monotonic() < until
            time.sleep(0.01)
    try:
        yield goes_on
    finally:
        goes_on.set()
        for thread in threads:
            thread.join()
    assert statuses == [200, 200]


@pytest.fixture
def full_server(models, raw):
    """A server of which every request is refused: one is computed, and one waits."""
    batching = BatchSettings(max_queued=1, max_rows=1)
    with InferenceServer(settings(models, batching=batching, keep_alive_s=1)) as server, held(server, raw):
        yield server


def test_a_port_is_never_shared(models) -> None:
    with InferenceServer(settings(models)) as first:
        for taken in ({"http_port": first.http_port}, {"grpc_port": first.grpc_port}):
            with pytest.raises(ConfigError, match="cannot listen"):
                InferenceServer(settings(models).changed(**taken))
    with pytest.raises(ConfigError, match="share port"):
        settings(models).changed(http_port=8000, grpc_port=8000)
    with pytest.raises(ConfigError, match=r"cannot be used|cannot listen"):
        InferenceServer(settings(models).changed(host="192.0.2.1"))


def test_a_model_that_is_not_there_leaves_no_port_open(models, tmp_path) -> None:
    broken = settings(models).changed(inference={"models": [{"name": "x", "path": str(tmp_path)}]})
    with pytest.raises(CheckpointError):
        InferenceServer(broken)


def whole_requests(server, row, count: int) -> list[socket.socket]:
    """Connect, and send one complete request on each connection."""
    body = json.dumps({"instances": [row]}).encode()
    head = f"POST /v1/models/ctr:predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", server.http_port), timeout=30) for _ in range(count)]
    for one in sockets:
        one.sendall(head.encode() + body)
    return sockets


def status_of_answer(one: socket.socket) -> int:
    with one:
        return int(one.recv(65536).split(b" ", 2)[1])


def test_requests_that_wait_to_be_parsed_count_against_the_limit_of_the_queue(models, raw, monkeypatch) -> None:
    """Where the event loop is the slower part, the queue of the model stays short however many requests wait."""
    row = raw(1, seed=1)[0]
    batching = BatchSettings(max_queued=8)
    with InferenceServer(settings(models, batching=batching, max_lag_ms=60_000)) as server:
        for one in whole_requests(server, row, 3):  # what the first requests load and compile is there now
            assert status_of_answer(one) == 200
        parsed = []
        infer = server.service.infer_rows

        def slow(*rows, **options):
            parsed.append(1)
            time.sleep(0.02)  # on the event loop, while the model's threads have nothing to do
            return infer(*rows, **options)

        monkeypatch.setattr(server.service, "infer_rows", slow)
        for _ in range(2):
            parsed.clear()
            server._loop.call_soon_threadsafe(time.sleep, 0.5)
            time.sleep(0.05)
            statuses = Counter(map(status_of_answer, whole_requests(server, row, 40)))
            assert statuses[200] + statuses[429] == 40
            assert statuses[200] >= 8
            assert len(parsed) < 20, "requests were parsed although as many as the queue holds waited"


def test_connections_that_end_leave_the_count_of_waiting_requests(models, raw) -> None:
    row = raw(1, seed=1)[0]
    batching = BatchSettings(max_queued=4, max_rows=1)
    with InferenceServer(settings(models, batching=batching)) as server:
        with held(server, raw):
            for one in whole_requests(server, row, 3):
                one.close()
            time.sleep(0.2)
        (batcher,) = server.service._batchers.values()
        counts, until = batcher.backlog, time.monotonic() + 10
        while (counts._arrived or counts.computing) and time.monotonic() < until:
            time.sleep(0.01)
        assert (counts._arrived, counts.computing) == (0, 0)
        assert [status_of_answer(one) for one in whole_requests(server, row, 1)] == [200]


def test_excess_is_refused_and_what_was_accepted_is_answered(models, raw) -> None:
    row = raw(1, seed=1)[0]
    with InferenceServer(settings(models, batching=BatchSettings(max_queued=4, max_rows=2))) as server:
        truth = float(server.repository.get("ctr").predict([row])[0])
        slow_down(server, 0.2)
        tensors = tensors_of([row], server.repository.get("ctr").inputs)
        found: list[tuple[object, ...]] = []

        def ask_http() -> None:
            client = Http(server)
            answer = client.post("/v1/models/ctr:predict", {"instances": [row]})
            found.append((answer.status, answer.headers.get("retry-after"), answer.json.get("predictions")))
            client.close()

        def ask_grpc() -> None:
            client = Grpc(server)
            try:
                response = client.ask("ModelInfer", **infer_fields("ctr", tensors))
                found.append(("OK", None, [float(np.frombuffer(response.raw_output_contents[0], "<f4")[0])]))
            except grpc.RpcError as error:
                found.append((error.code(), None, None))
            client.close()

        threads = [threading.Thread(target=one) for one in (ask_http, ask_grpc) * 16]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = Counter(status for status, *_ in found)
        assert set(counts) <= {200, 429, "OK", grpc.StatusCode.UNAVAILABLE}, counts
        assert counts[429] + counts[grpc.StatusCode.UNAVAILABLE] > 0
        assert counts[200] + counts["OK"] >= 4
        assert sum(counts.values()) == 32
        for status, retry, predictions in found:
            assert status != 429 or retry == "1"
            assert status not in (200, "OK") or abs(predictions[0] - truth) < 1e-6
        client = Http(server)
        assert client.post("/v1/models/ctr:predict", {"instances": [row]}).status == 200
        assert 'code="UNAVAILABLE"' in client.get("/metrics").body.decode()
        client.close()


def test_a_refused_request_leaves_its_connection_in_order(models, raw) -> None:
    row = raw(1, seed=1)[0]
    path, content = "/v1/models/ctr:predict", {"instances": [row]}
    with InferenceServer(settings(models, batching=BatchSettings(max_queued=1, max_rows=1))) as server:
        client = Http(server)
        with held(server, raw):
            for _ in range(3):
                reply = client.post(path, content)
                assert (reply.status, reply.headers["retry-after"]) == (429, "1")
                assert "too many requests wait" in reply.json["error"]
            socket = client.connection.sock
            assert client.post("/v2/models/ctr/versions/1/infer", b"{}").status == 429
            assert client.post("/v1/models/none:predict", content).status == 404
            assert client.get("/v2/health/ready").status == 200
            assert client.connection.sock is socket
            reply = client.post(path, b" " * (1 << 17))  # too long to be read for nothing
            assert (reply.status, reply.headers["connection"]) == (429, "close")
        assert client.post(path, content).status == 200
        lines = client.get("/metrics").body.decode().splitlines()
        assert sum(float(line.split()[-1]) for line in lines if "_total{" in line and "UNAVAILABLE" in line) == 5
        client.close()


def test_a_full_queue_refuses_over_grpc_before_the_message_is_read(models, raw) -> None:
    """With one model by the queue alone; beside another model by the name at the start of the message."""
    row = raw(1, seed=1)[0]
    for others in (
        (),
        (ModelEntry(name="other", path=str(models.path("deepfm")), session=SessionSettings(device="cpu")),),
    ):
        entry = ModelEntry(name="ctr", path=str(models.path("deepfm")), session=SessionSettings(device="cpu"))
        wanted = settings(models, batching=BatchSettings(max_queued=1, max_rows=1))
        wanted = wanted.changed(inference=RepositorySettings(models=(entry, *others)).to_dict())
        with InferenceServer(wanted) as server, held(server, raw) as goes_on:
            client = Grpc(server)
            infer = client.channel.unary_unary(f"/{SERVICE}/ModelInfer")
            name = b"\x0a\x03ctr"
            for message in (name, name + b"\xff" * 5000):  # the second one is no message, and is never looked at
                with pytest.raises(grpc.RpcError) as error:
                    infer(message, timeout=30)
                assert error.value.code() == grpc.StatusCode.UNAVAILABLE
                assert "too many requests wait" in error.value.details()
            if others:
                fields = infer_fields("other", tensors_of([row], server.repository.get("other").inputs))
                assert client.ask("ModelInfer", **fields).model_name == "other"
                with pytest.raises(grpc.RpcError) as error:  # a name that does not come first is read late
                    infer(b"\x1a\x017" + name, timeout=30)
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            goes_on.set()
            client.close()


def test_requests_of_every_form_are_refused_by_a_full_queue(full_server) -> None:
    data = b"POST /v1/models/ctr:predict HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y\r\ncontent-length: 2\r\n\r\n{}"
    last = b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"

    def check(change, status: bytes, times: int = 1, *, goes_on: bool = True) -> None:
        said = raw_socket(full_server, change + last)
        assert said.split(b" ")[1] == status, said[:200]
        assert said.count(b"HTTP/1.1 " + status) == times
        assert said.count(b'{"live": true}') == goes_on

    check(data, b"429")
    check(data * 3, b"429", 3)
    check(data.replace(b"content-length", b"Content-Length"), b"429")
    check(data.replace(b"HTTP/1.1", b"HTTP/1.0"), b"429", goes_on=False)
    check(data.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"429", goes_on=False)
    chunked = data.replace(b"content-length: 2", b"transfer-encoding: chunked").replace(b"{}", b"0\r\n\r\n")
    check(chunked, b"429", goes_on=False)
    check(data.replace(b"POST", b"GET"), b"405")
    twice = data.replace(b"content-length: 2", b"content-length: 2\r\ncontent-length: 3")
    check(twice, b"400", goes_on=False)
    check(data.replace(b"content-length: 2", b"content-length: -2"), b"400", goes_on=False)
    check(data.replace(b"x: y", b"x: " + b"y" * 40_000), b"431", goes_on=False)


def test_a_connection_whose_requests_are_refused_stays_open(full_server) -> None:
    """Longer than an idle one would."""
    client = Http(full_server)
    socket = None
    for _ in range(8):
        assert client.post("/v1/models/ctr:predict", b"{}").status == 429
        assert socket in (None, client.connection.sock)
        socket = client.connection.sock
        time.sleep(0.25)
    time.sleep(1.3)
    assert socket.recv(1) == b""  # an idle one is closed
    client.close()


def test_too_many_requests_under_way_are_refused(models, raw) -> None:
    with InferenceServer(settings(models, max_concurrent=2)) as server:
        slow_down(server, 0.2)
        statuses: list[int] = []

        def ask() -> None:
            client = Http(server)
            statuses.append(client.post("/v1/models/ctr:predict", {"instances": raw(1)}).status)
            client.close()

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(statuses) == {200: 2, 429: 4} or Counter(statuses).keys() == {200, 429}


@pytest.mark.slow
def test_models_come_and_go_under_load(models, raw) -> None:
    row = raw(1, seed=1)[0]
    with InferenceServer(settings(models, allow_load=True)) as server:
        truth = float(server.repository.get("ctr").predict([row])[0])
        statuses: Counter[int] = Counter()
        wrong: list[object] = []
        ended = threading.Event()

        def ask() -> None:
            client = Http(server)
            while not ended.is_set():
                answer = client.post("/v1/models/ctr:predict", {"instances": [row]})
                statuses[answer.status] += 1
                if answer.status == 200 and abs(answer.json["predictions"][0] - truth) > 1e-6:
                    wrong.append(answer.json)
            client.close()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        control, other = Http(server), Grpc(server)
        for _ in range(3):
            assert control.post("/v2/repository/models/ctr/load", {}).status == 200  # again, next to the old one
            other.ask("RepositoryModelUnload", model_name="ctr")
            assert control.get("/v2/models/ctr/ready").status == 404
            assert control.get("/v2/health/ready").status == 503  # no model is loaded
            assert control.post("/v2/repository/models/ctr/unload", {}).status == 404
            other.ask("RepositoryModelLoad", model_name="ctr")
            assert control.get("/v2/models/ctr/ready").status == 200
        assert control.post("/v2/repository/models/../load", {}).status == 404
        assert control.post("/v2/repository/models/nothing/load", {}).status == 404
        ended.set()
        for thread in threads:
            thread.join()
        assert set(statuses) <= {200, 404}
        assert statuses[200] > 0
        assert not wrong
        control.close()
        other.close()


def test_an_end_in_order_answers_what_was_accepted(models, raw) -> None:
    server = InferenceServer(settings(models)).start()
    slow_down(server, 0.5)
    found: list[int] = []
    grpc_found: list[object] = []
    tensors = tensors_of(raw(1), server.repository.get("ctr").inputs)

    def ask() -> None:
        client = Http(server)
        found.append(client.post("/v1/models/ctr:predict", {"instances": raw(1)}).status)
        client.close()

    def ask_grpc() -> None:
        client = Grpc(server)
        grpc_found.append(client.ask("ModelInfer", **infer_fields("ctr", tensors)))
        client.close()

    threads = [threading.Thread(target=one) for one in (ask, ask, ask, ask_grpc)]
    for thread in threads:
        thread.start()
    while server.service.under_way < 4:
        time.sleep(0.01)
    server.stop()
    for thread in threads:
        thread.join()
    assert found == [200, 200, 200]
    assert len(grpc_found) == 1
    with pytest.raises(OSError, match=r"refused|reset"):
        Http(server).get("/v2/health/live")


def test_the_end_loses_no_request_that_was_sent(models, raw) -> None:
    """Clients that ask again and again saw a closed connection, or 503, instead of the answer of a last request."""
    server = InferenceServer(settings(models)).start()
    statuses: Counter[int] = Counter()
    lost: list[str] = []
    body = {"instances": raw(1)}

    def ask() -> None:
        client = Http(server)
        while True:
            try:
                reply = client.post("/v1/models/ctr:predict", body)
            except (OSError, http.client.HTTPException) as error:
                lost.append(repr(error))
                return
            statuses[reply.status] += 1
            if reply.headers.get("connection") == "close":
                return

    with socket.create_connection(("127.0.0.1", server.http_port)) as idle:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        while statuses[200] < 40:
            time.sleep(0.01)
        server.stop()
        for thread in threads:
            thread.join(30)
        assert idle.recv(1) == b""  # closed without an error
    assert lost == []
    assert set(statuses) == {200}


def test_an_idle_connection_may_send_a_last_request_while_the_server_ends(models, raw, monkeypatch) -> None:
    monkeypatch.setattr("viviane.serving.server.connection._LAST_REQUEST_S", 20)
    server = InferenceServer(settings(models)).start()
    client = Http(server)
    client.get("/v2/health/live")
    ending = threading.Thread(target=server.stop)
    ending.start()
    until = time.monotonic() + 20
    while time.monotonic() < until:  # the port is closed before connections are
        try:
            socket.create_connection(("127.0.0.1", server.http_port)).close()
        except OSError:
            break
        time.sleep(0.01)
    reply = client.post("/v1/models/ctr:predict", {"instances": raw(1)})
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    ending.join(10)
    assert not ending.is_alive()


def test_a_client_that_leaves_costs_nothing(models, raw) -> None:
    with InferenceServer(settings(models)) as server:
        slow_down(server, 0.1)
        tensors = tensors_of(raw(1), server.repository.get("ctr").inputs)
        client = Grpc(server)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as error:
                client.ask("ModelInfer", timeout=0.02, **infer_fields("ctr", tensors))
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        client.close()
        until = time.monotonic() + 10
        while server.service.under_way and time.monotonic() < until:
            time.sleep(0.02)
        assert server.service.under_way == 0


@pytest.mark.slow
def test_the_command_serves_until_sigterm(models, raw, tmp_path) -> None:
    """A process under load, ended by SIGTERM: every accepted request is answered, and the exit code is 0."""
    out = tmp_path / "out.txt"
    model = f"ctr={models.path('deepfm')}"
    command = [sys.executable, "-m", "viviane", "serve", model, "--device", "cpu"]
    command += ["--port", "0", "--grpc-port", "0", "--set", "batching.max_delay_ms=1"]
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
    try:
        until = time.monotonic() + 120
        while "gRPC:" not in out.read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        text = out.read_text()
        assert "model ctr: version 1" in text, text
        port = int(text.split("127.0.0.1:")[1].split()[0])
        answers: Counter[object] = Counter()
        body = {"instances": raw(2)}

        class Target:
            http_port = port

        def ask() -> None:
            client = Http(Target)
            while True:
                try:
                    answers[client.post("/v1/models/ctr:predict", body).status] += 1
                except ConnectionRefusedError:
                    return
                except (OSError, Exception) as error:
                    answers[type(error).__name__] += 1
                    client.close()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while answers[200] < 20:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for thread in threads:
            thread.join()
        assert out.read_text().endswith("ended\n"), "libraries have nothing to report at exit"
        assert set(answers) == {200}
    finally:
        process.kill()
        process.wait()
