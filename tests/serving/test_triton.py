"""Triton: what is written for it, and the real server where it is installed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pyarrow as pa
import pytest
from clients import Grpc, Http, binary_body, infer_fields, output_of, tensors_of

from viviane.core.errors import ConfigError, MissingExtraError, RemoteError
from viviane.serving import InferenceSession, ModelEntry, SessionSettings
from viviane.serving.triton import TritonEnvironment, TritonServer, TritonSettings, write_repository
from viviane.serving.triton.environment import environment_folder, install_triton
from viviane.serving.triton.python_model import split_excess
from viviane.serving.triton.repository import ModelPart, PythonModel

CPU = SessionSettings(device="cpu")


def entry(models, name: str, **session) -> ModelEntry:
    settings = SessionSettings(device="cpu", **session)
    return ModelEntry(name="_".join((name, *session.values())), path=str(models.path(name)), session=settings)


def test_a_written_repository_holds_all_that_it_needs(models, tmp_path) -> None:
    entries = [entry(models, "deepfm"), entry(models, "deepfm", rows="encoded")]
    settings = TritonSettings(max_batch_size=512, max_delay_ms=1.5, instances=2, max_queued=9)
    assert write_repository(tmp_path / "repository", entries, settings) == ["deepfm", "deepfm_encoded"]
    folder = tmp_path / "repository" / "deepfm_encoded"
    config = (folder / "config.pbtxt").read_text()
    assert 'name: "deepfm_encoded"\nbackend: "python"\nmax_batch_size: 512\n' in config
    assert '  name: "tags"\n  data_type: TYPE_INT32\n  dims: [-1]\n  allow_ragged_batch: true\n' in config
    assert '  name: "tags:lengths"\n  data_type: TYPE_INT32\n  dims: [1]\n  optional: true\n' in config
    assert "max_queue_delay_microseconds: 1500" in config
    assert "queue_policy" not in config  # with one, requests wait for half a second now and then
    assert "preferred_batch_size" not in config  # a model that refuses has to see all that wait
    assert "  count: 2\n  kind: KIND_CPU\n" in config
    assert "zero_data: true" in config
    part = ModelPart.from_json_file(folder / "1" / "session.json")
    assert (part.role, part.path, part.session.rows, part.max_queued) == ("whole", "model", "encoded", 9)
    with InferenceSession(
        folder / "1" / part.path, device="cpu"
    ) as session:  # whole, and apart from where it came from
        assert session.model_name == "deepfm"
    raw_config = (tmp_path / "repository" / "deepfm" / "config.pbtxt").read_text()
    assert '  name: "price"\n  data_type: TYPE_FP64\n' in raw_config
    assert '  name: "price:missing"\n  data_type: TYPE_BOOL\n' in raw_config
    write_repository(tmp_path / "repository", entries[:1], TritonSettings(max_batch_size=100))  # its own is replaced
    assert not folder.exists()
    written = tmp_path / "repository" / "deepfm" / "config.pbtxt"
    assert "preferred_batch_size: [100]" in written.read_text()
    write_repository(tmp_path / "repository", entries[:1], TritonSettings(max_queued=9, preferred_batch_size=64))
    assert "preferred_batch_size: [64]" in written.read_text()
    with pytest.raises(ConfigError, match="preferred_batch_size is larger than max_batch_size, 100"):
        TritonSettings(max_batch_size=100, preferred_batch_size=101)


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "a/b", "a\n", "viviane-triton.json", "x" * 3 + "\0"])
def test_names_stay_inside_the_repository(name: str, tmp_path: Path) -> None:
    """`viviane serve ..=recommender --write-only DIR` wrote beside the folder, and a mark was overwritten."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("x")
    before = sorted(str(one) for one in tmp_path.rglob("*"))
    other = PythonModel(name, tmp_path / "source", "module", (), ())
    with pytest.raises(ConfigError, match=r"not a name|of one name"):
        write_repository(tmp_path / "repository", [], others=[other])
    assert sorted(str(one) for one in tmp_path.rglob("*")) == before


def test_parts_of_an_ensemble_have_names_of_their_own(models, tmp_path) -> None:
    entries = [entry(models, "deepfm"), ModelEntry(name="deepfm.clean", path=str(models.path("deepfm")), session=CPU)]
    with pytest.raises(ConfigError, match="of one name"):
        write_repository(tmp_path / "repository", entries, TritonSettings(ensemble=True))
    assert not (tmp_path / "repository").exists()


def test_a_folder_of_something_else_is_not_replaced(models, tmp_path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        write_repository(tmp_path, [entry(models, "deepfm")])
    assert (tmp_path / "precious.txt").exists()


def test_versions_have_to_agree_and_to_exist(models, tmp_path) -> None:
    several = tmp_path / "ctr"
    several.mkdir()
    (several / "1").symlink_to(models.path("deepfm"))
    (several / "2").symlink_to(models.path("mmoe"))
    with pytest.raises(ConfigError, match="same inputs and outputs"):
        write_repository(tmp_path / "r", [ModelEntry(name="ctr", path=str(several), versions="all", session=CPU)])
    with pytest.raises(ConfigError, match="no such version"):
        write_repository(tmp_path / "r", [ModelEntry(name="ctr", path=str(several), versions=(3,), session=CPU)])
    write_repository(tmp_path / "r", [ModelEntry(name="ctr", path=str(several), versions=(2,), session=CPU)])
    assert "versions: [2]" in (tmp_path / "r" / "ctr" / "config.pbtxt").read_text()


def test_an_ensemble_is_cleaning_and_prediction(models, tmp_path) -> None:
    settings = TritonSettings(ensemble=True)
    names = write_repository(tmp_path / "r", [entry(models, "deepfm")], settings)
    assert names == ["deepfm", "deepfm.clean", "deepfm.score"]
    config = (tmp_path / "r" / "deepfm" / "config.pbtxt").read_text()
    assert 'platform: "ensemble"' in config
    clean = (tmp_path / "r" / "deepfm.clean" / "config.pbtxt").read_text()
    assert "allow_ragged_batch" not in clean[clean.index("output {") :]  # outputs have no such field
    assert '      key: "tags:lengths"\n      value: "encoded tags:lengths"\n' in config
    with pytest.raises(ConfigError, match="no cleaning"):
        write_repository(tmp_path / "s", [entry(models, "deepfm", rows="encoded")], settings)


def test_without_an_installation_the_error_says_how(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VIVIANE_TRITON_ENV", str(tmp_path / "none"))
    with pytest.raises(MissingExtraError, match="--install-triton"):
        TritonEnvironment.find()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        install_triton(say=lambda line: None)
    assert (tmp_path / "none" / "precious.txt").exists()


# The real server -------------------------------------------------------------------------------------------


def free_ports() -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = dict(
        zip(("http_port", "grpc_port", "metrics_port"), (one.getsockname()[1] for one in sockets), strict=True)
    )
    for one in sockets:
        one.close()
    return found


def skip_without_triton() -> None:
    try:
        TritonEnvironment.find()
    except MissingExtraError:
        pytest.skip(f"Triton is not installed in {environment_folder()}: viviane serve --install-triton")


class Target:
    """Where the clients of these tests ask."""

    def __init__(self, settings: TritonSettings) -> None:
        self.http_port, self.grpc_target = settings.http_port, f"127.0.0.1:{settings.grpc_port}"


@pytest.fixture(scope="module")
def triton(models, tmp_path_factory):
    skip_without_triton()
    folder = tmp_path_factory.mktemp("triton")
    settings = TritonSettings(**free_ports(), log=str(folder / "log.txt"), max_batch_size=1024)
    entries = [
        entry(models, "deepfm"),
        entry(models, "mmoe"),
        *(entry(models, "deepfm", rows=form) for form in ("encoded", "matrices")),
    ]
    write_repository(folder / "repository", entries, settings)
    write_repository(folder / "other", [entry(models, "dcn")], settings.model_copy(update={"ensemble": True}))
    for one in (folder / "other").iterdir():
        if one.is_dir():
            one.rename(folder / "repository" / one.name)
    with TritonServer(folder / "repository", settings) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 7, 1024])
@pytest.mark.parametrize("model", ["deepfm", "mmoe", "dcn"])
def test_triton_gives_the_bits_of_the_session(triton, models, raw, model, count) -> None:
    rows = raw(count, seed=5)
    if model == "dcn":  # an ensemble has no optional inputs to mark missing whole numbers with
        rows = [
            {name: 1 if row[name] is None and name in ("age", "item") else row[name] for name in row} for row in rows
        ]
    with InferenceSession(models.path(model), device="cpu") as session:
        truth, inputs = session.predict(rows), session.inputs
    named = truth if isinstance(truth, dict) else {"click": truth}
    tensors = []
    for column, (name, _, shape, data) in zip(inputs, tensors_of(rows, inputs), strict=True):
        if column.dtype == "string":
            tensors.append((name, "BYTES", shape, data))
            continue
        values = [row[name] for row in rows]
        kind, dtype = ("FP64", np.float64) if column.dtype == "float64" else ("INT64", np.int64)
        filler = np.nan if kind == "FP64" else 0
        array = np.array([filler if one is None else one for one in values], dtype)
        tensors.append((name, kind, shape, array.tobytes()))
        if kind == "INT64" and model != "dcn":
            mask = np.array([one is None for one in values])
            tensors.append((f"{name}:missing", "BOOL", shape, mask.tobytes()))
    client = Grpc(Target(triton.settings))
    response = client.ask("ModelInfer", **infer_fields(model, tensors))
    for name, scores in named.items():
        np.testing.assert_array_equal(output_of(response, name)[:, 0], scores)
    client.close()


def encoded_tensors(rows: list[dict], inputs) -> list[tuple[str, str, list[int], bytes]]:
    """Return encoded rows as tensors: ids, numbers, and lists side by side with their lengths."""
    tensors = []
    for column in inputs:
        values = [row[column.name] for row in rows]
        kind, dtype = ("FP32", np.float32) if column.dtype == "float32" else ("INT32", np.int32)
        if column.is_ragged:
            lengths = np.array([len(one) for one in values], np.int32)
            tensors.append((f"{column.name}:lengths", "INT32", [len(rows), 1], lengths.tobytes()))
            values = [one + [0] * (lengths.max() - len(one)) for one in values]
        array = np.array(values, dtype).reshape(len(rows), -1)
        tensors.append((column.name, kind, list(array.shape), array.tobytes()))
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("form", ["encoded", "matrices"])
def test_triton_takes_encoded_rows_and_refuses_bad_ones(triton, models, form) -> None:
    from viviane.serving.server.example_rows import example_rows

    with InferenceSession(models.path("deepfm"), device="cpu", rows=form) as session:
        rows = example_rows(session.inputs, 4, seed=2)
        rows[0]["tags"] = [3]
        truth, inputs = session.predict({name: [row[name] for row in rows] for name in rows[0]}), session.inputs
    tensors = encoded_tensors(rows, inputs)
    client, http = Grpc(Target(triton.settings)), Http(Target(triton.settings))
    response = client.ask("ModelInfer", **infer_fields(f"deepfm_{form}", tensors))
    np.testing.assert_array_equal(output_of(response, "click")[:, 0], truth)
    user = "user" if form == "encoded" else "one_hot"
    bad = [(n, k, s, np.full(s, 10**6, np.int32).tobytes() if n == user else d) for n, k, s, d in tensors]
    with pytest.raises(grpc.RpcError) as error:
        client.ask("ModelInfer", **infer_fields(f"deepfm_{form}", bad))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "column 'user'" in error.value.details()
    body, headers = binary_body(bad)
    answer = http.post(f"/v2/models/deepfm_{form}/infer", body, **headers)
    assert answer.status == 400
    assert "1000000" in answer.json["error"]
    client.close()
    http.close()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shared"), [("deepfm", False), ("deepfm_encoded", False), ("deepfm_matrices", True)])
def test_perf_analyzer_sends_requests_of_several_rows(triton, raw, model, shared) -> None:
    from viviane.serving.load import LoadSettings
    from viviane.serving.load.perf_analyzer import run_perf_analyzer

    table = pa.Table.from_pylist(raw(50)) if model == "deepfm" else None
    for rows in (1, 70):
        settings = LoadSettings(
            url=triton.grpc_target, protocol="grpc", model=model, rows=rows, concurrency=(2,), rates=(), seconds=0.5,
            shared_memory=shared,
        )  # fmt: skip
        [phase] = run_perf_analyzer(settings, table).phases
        assert phase.answered > 3
        assert phase.rows_per_s == pytest.approx(phase.throughput * rows)
    if model == "deepfm":
        with pytest.raises(RemoteError, match="rejects these rows"):  # made-up texts are no lists of numbers
            run_perf_analyzer(settings)


@pytest.mark.slow
def test_a_port_is_not_shared_with_triton(triton, tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        TritonServer(tmp_path, triton.settings)


@pytest.mark.slow
def test_many_clients_wait_for_no_missed_wake_up_and_excess_is_refused(models, tmp_path) -> None:
    """With a queue policy every hundredth request waited 0.5 s, in Triton's batcher."""
    from viviane.serving.load import LoadSettings, run_load

    skip_without_triton()
    for most, concurrency in ((0, 8), (4, 32)):
        settings = TritonSettings(**free_ports(), log=str(tmp_path / "log.txt"), max_queued=most)
        write_repository(tmp_path / f"repository{most}", [entry(models, "deepfm", rows="encoded")], settings)
        with TritonServer(tmp_path / f"repository{most}", settings) as server:
            [phase] = run_load(
                LoadSettings(
                    url=server.grpc_target, protocol="grpc", model="deepfm_encoded", concurrency=(concurrency,),
                    rates=(), seconds=4,
                )
            ).phases  # fmt: skip
        assert phase.answered > 200
        refused = phase.errors.pop("UNAVAILABLE", 0)
        assert (refused > 100) == bool(most), refused
        assert not phase.errors
        assert phase.answered + refused == phase.sent
        assert phase.latency_ms["p99"] < 400


@pytest.mark.slow
def test_throughput_holds_beyond_saturation(models, tmp_path) -> None:
    """Every request is answered, at no less than half the best rate: clients share the processors with Triton."""
    from viviane.serving.load import LoadSettings, run_load

    skip_without_triton()
    settings = TritonSettings(**free_ports(), log=str(tmp_path / "log.txt"))
    write_repository(tmp_path / "repository", [entry(models, "deepfm", rows="encoded")], settings)
    with TritonServer(tmp_path / "repository", settings) as server:
        best, beyond = run_load(
            LoadSettings(
                url=server.grpc_target, protocol="grpc", model="deepfm_encoded", concurrency=(64,), rates=(-2.0,),
                seconds=3,
            )
        ).phases  # fmt: skip
    beyond.errors.pop("not sent", 0)  # the clients' own limit
    assert not beyond.errors
    assert beyond.answered == beyond.sent
    assert beyond.throughput > 0.5 * best.throughput  # .16 where the model refused what came after 256 requests


def test_the_first_requests_that_wait_are_taken() -> None:
    error = type("TritonError", (), {"UNAVAILABLE": 4, "__new__": lambda _, *words: words})
    backend = SimpleNamespace(TritonError=error, InferenceResponse=lambda tensors, error: (tensors, error))
    for most, taken in ((0, 5), (5, 5), (3, 3), (1, 1)):
        first, refused = split_excess(backend, range(5), most)
        assert list(first) == list(range(taken))
        assert len(refused) == 5 - taken
        assert all(words[1] == 4 and "max_queued" in words[0] for _, words in refused)


@pytest.mark.slow
def test_models_are_unloaded_and_loaded_over_the_network(models, tmp_path) -> None:
    from viviane.serving.server.example_rows import example_rows

    skip_without_triton()
    settings = TritonSettings(**free_ports(), log=str(tmp_path / "log.txt"), allow_load=True)
    write_repository(tmp_path / "repository", [entry(models, "deepfm", rows="encoded")], settings)
    with InferenceSession(models.path("deepfm"), device="cpu", rows="encoded") as session:
        rows = example_rows(session.inputs, 4, seed=2)
        inputs = session.inputs
    body, headers = binary_body(encoded_tensors(rows, inputs))
    path = "/v2/models/deepfm_encoded"
    with TritonServer(tmp_path / "repository", settings):
        http, answers = Http(Target(settings)), []
        for _ in range(2):
            answers.append(http.post(f"{path}/infer", body, **headers))
            assert answers[-1].status == 200, answers[-1].json
            assert http.post("/v2/repository/models/deepfm_encoded/unload", b"{}").status == 200
            until = time.monotonic() + 60
            while http.get(f"{path}/ready").status == 200 and time.monotonic() < until:
                time.sleep(0.1)
            assert http.post(f"{path}/infer", body, **headers).status in (400, 404)
            assert http.post("/v2/repository/models/deepfm_encoded/load", b"{}").status == 200
        assert answers[0].body == answers[1].body
        http.close()


@pytest.mark.slow
def test_the_command_ends_triton_in_order_and_leaves_nothing(models, tmp_path) -> None:
    skip_without_triton()
    ports = free_ports()
    command = [sys.executable, "-m", "viviane", "serve", f"ctr={models.path('deepfm')}", "--engine", "triton",
               "--device", "cpu", "--port", str(ports["http_port"]), "--grpc-port", str(ports["grpc_port"]),
               "--set", f"metrics_port={ports['metrics_port']}", "--set", f"log={tmp_path / 'log.txt'}"]  # fmt: skip
    out = tmp_path / "out.txt"
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
    try:
        until = time.monotonic() + 200
        while "gRPC:" not in out.read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert "gRPC:" in out.read_text(), out.read_text()
        prefix = f"viviane_triton_{process.pid}_"
        assert list(Path("/dev/shm").glob(f"{prefix}*"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        assert "ended" in out.read_text()
        assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    finally:
        process.kill()
        process.wait()
