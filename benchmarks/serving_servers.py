"""What a server adds to the session behind it: latency at 1, 16 and 64 clients, and throughput beyond saturation.

The local server, Triton (where it is installed) and the session itself serve the same DLRM of 26 tables on the CPU, in
one run. Rows are encoded, one a request, with a tensor for each of 39 columns; "matrices" have two tensors. Beyond
saturation requests arrive at two and four times the best rate.

On four processor cores or more, half of them serve and the others send, in a process each. Where server and clients
share processors, the clients take time from the server. So answers are also counted by the second of processor time
that the server had: a share of 1 says that refusals cost nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
import traceback
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import viviane as vv
from record import record
from viviane.core.errors import MissingExtraError
from viviane.serving import InferenceSession, ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.load import LoadSettings, run_load
from viviane.serving.load.generator import Phase
from viviane.serving.server import InferenceServer, ServerSettings
from viviane.serving.server.example_rows import example_rows
from viviane.serving.triton import TritonEnvironment, TritonServer, TritonSettings, write_repository

CORES = sorted(os.sched_getaffinity(0))
SENDING = CORES[len(CORES) // 2 :] if len(CORES) >= 4 else CORES
SERVING = CORES[: len(CORES) // 2] if len(CORES) >= 4 else CORES
PROCESSES = len(SENDING) if len(CORES) >= 4 else 1
REFUSED = ("429", "503", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "not sent")
BEYOND = (-2.0, -4.0)
SHAPE = {
    "tables": 26,
    "dim": 16,
    "rows a request": 1,
    "cores that serve": len(SERVING),
    "processes that send": PROCESSES,
}


def save_model(folder: Path) -> Path:
    columns = [{"name": f"c{number}", "num_ids": 20_000} for number in range(26)]
    dense = [{"name": f"d{number}"} for number in range(13)]
    schema = vv.Schema(labels=[{"name": "click"}], dense=dense, categorical=columns)
    model = vv.Model(vv.Solver(device="cpu"), schema, name="ctr")
    model.add(vv.zoo.DLRM(dim=16, bottom_mlp=[64, 32], top_mlp=[128, 64]))
    model.compile()
    return Path(model.save(folder / "model"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def session_ms(model: Path, seconds: float) -> tuple[float, float]:
    """Median and 99th percentile of the session alone, called as a server calls it."""
    with InferenceSession(model, device="cpu") as session:
        rows = example_rows(session.inputs, 256)
        inputs = [{name: np.array([value]) for name, value in row.items()} for row in rows]
        times = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for columns in inputs:
                start = time.perf_counter()
                session.predict(columns)
                times.append((time.perf_counter() - start) * 1000)
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


def processor_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    name: str,
    url: str,
    protocol: str,
    seconds: float,
    alone: tuple[float, float],
    pid: int | None = None,
    model: str = "ctr",
) -> None:
    """Put a server under load; `pid` is its process, where its processor time is to be recorded."""
    settings = LoadSettings(url=url, protocol=protocol, model=model, concurrency=(1, 16, 64), rates=BEYOND,
                            seconds=seconds, processes=PROCESSES)  # fmt: skip
    used = [0.0 if pid is None else processor_s(pid)]

    def ended(phase: Phase) -> None:
        print(name, protocol, phase)
        used.append(0.0 if pid is None else processor_s(pid))

    phases = run_load(settings, progress=ended).phases
    one, *several = phases[:3]
    case = f"{name}, {protocol}" + ("" if model == "ctr" else f", {model}")
    for quantile, base, must in (("p50", alone[0], 1.0), ("p99", alone[1], 2.0)):
        record(bench="serving_servers", case=case, metric=f"added to the session, 1 client, {quantile}",
               value=one.latency_ms[quantile] - base, unit="ms", better="lower", goal=must, peer="the session alone",
               peer_value=base, shape=SHAPE)  # fmt: skip
    for phase in several:
        record(bench="serving_servers", case=case, metric=f"throughput, {phase.load:g} clients",
               value=phase.throughput, unit="answers/s", better="higher", shape=SHAPE)  # fmt: skip
        record(bench="serving_servers", case=case, metric=f"p99, {phase.load:g} clients",
               value=phase.latency_ms["p99"], unit="ms", better="lower", shape=SHAPE)  # fmt: skip
    best = max(phase.throughput for phase in several)
    spent = [after - before for before, after in pairwise(used)]
    per_s = [phase.answered / max(taken, 0.01) for phase, taken in zip(phases, spent, strict=True)]
    for factor, phase, rate in zip(BEYOND, phases[3:], per_s[3:], strict=True):
        arrivals = f"arrivals at {-factor:g} times the best rate"
        record(bench="serving_servers", case=case, metric=f"{arrivals}: answers, share of the best",
               value=phase.throughput / best, unit="", better="higher", goal=0.9, shape=SHAPE)  # fmt: skip
        if pid is not None:
            record(bench="serving_servers", case=case, value=rate / max(per_s[1:3]), unit="", better="higher", goal=0.9,
                   metric=f"{arrivals}: answers by the server's processor time, share of the best",
                   shape=SHAPE)  # fmt: skip
        unsent = phase.errors.get("not sent", 0)
        record(bench="serving_servers", case=case, metric=f"{arrivals}: share that the clients could not send",
               value=unsent / (phase.sent + unsent), unit="", better="lower", shape=SHAPE)  # fmt: skip
        record(bench="serving_servers", case=case, metric=f"{arrivals}: p99 of answers",
               value=phase.latency_ms["p99"], unit="ms", better="lower", shape=SHAPE)  # fmt: skip
        lost = sum(count for kind, count in phase.errors.items() if kind not in REFUSED)
        record(bench="serving_servers", case=case, metric=f"{arrivals}: neither answered nor refused",
               value=lost, unit="requests", better="lower", goal=0, shape=SHAPE)  # fmt: skip


def entries(model: Path) -> tuple[ModelEntry, ...]:
    """The model with a tensor for each column, and with one for all numbers and one for all ids."""
    cpu = SessionSettings(device="cpu")
    return (
        ModelEntry(name="ctr", path=str(model), session=cpu),
        ModelEntry(name="matrices", path=str(model), session=cpu.model_copy(update={"rows": "matrices"})),
    )


def local_server(model: Path, seconds: float, alone: tuple[float, float]) -> None:
    settings = ServerSettings(http_port=0, grpc_port=0, inference=RepositorySettings(models=entries(model)))
    pid, ports = serve_in_a_process(settings)
    try:
        for protocol, port in ports.items():
            measure("viviane", f"127.0.0.1:{port}", protocol, seconds, alone, pid)
            measure("viviane", f"127.0.0.1:{port}", protocol, seconds, alone, pid, "matrices")
            before = resident_bytes(pid)
            run_load(LoadSettings(url=f"127.0.0.1:{port}", protocol=protocol, model="ctr", concurrency=(64,), rates=(),
                                  seconds=4 * seconds, processes=PROCESSES))  # fmt: skip
            growth = (resident_bytes(pid) - before) / 2**20
            record(bench="serving_servers", case=f"viviane, {protocol}", metric="memory after another load, growth",
                   value=growth, unit="MiB", better="lower", shape=SHAPE)  # fmt: skip
    finally:
        os.kill(pid, 15)
        os.waitpid(pid, 0)


def serve_in_a_process(settings: ServerSettings) -> tuple[int, dict[str, int]]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.sched_setaffinity(0, SERVING)
            server = InferenceServer(settings)
            server.run(lambda: os.write(writing, f"{server.http_port} {server.grpc_port}\n".encode()) and None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)  # so that the end of a server that fails ends the wait
    ports = os.read(reading, 100)
    os.close(reading)
    if not ports:
        raise SystemExit("the server did not start")
    http, grpc = ports.split()
    return pid, {"http": int(http), "grpc": int(grpc)}


def triton_server(model: Path, folder: Path, seconds: float, alone: tuple[float, float]) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    http, grpc, metrics = (one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    settings = TritonSettings(http_port=http, grpc_port=grpc, metrics_port=metrics, log=str(folder / "triton.log"))
    write_repository(folder / "repository", entries(model), settings)
    os.sched_setaffinity(0, SERVING)  # which Triton inherits
    server = TritonServer(folder / "repository", settings)
    os.sched_setaffinity(0, SENDING)
    with server:
        for protocol, target in (("grpc", server.grpc_target), ("http", server.http_url)):
            measure("Triton 2.51", target, protocol, seconds, alone)
            measure("Triton 2.51", target, protocol, seconds, alone, model="matrices")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a second a phase")
    parser.add_argument("--server", choices=("local", "triton"), help="one server; default: both")
    arguments = parser.parse_args()
    seconds = 1.0 if arguments.small else 5.0
    torch.set_num_threads(1)
    os.sched_setaffinity(0, SENDING)
    assert threading.active_count() == 1  # a process is forked
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder)
        alone = tuple(
            statistics.median(one) for one in zip(*(session_ms(model, seconds / 2) for _ in range(3)), strict=True)
        )
        print("session alone, ms:", alone)
        if arguments.server != "triton":
            local_server(model, seconds, alone)
        if arguments.server == "local":
            return
        try:
            TritonEnvironment.find()
        except MissingExtraError as error:
            print(error)
        else:
            triton_server(model, folder, seconds, alone)


if __name__ == "__main__":
    main()
