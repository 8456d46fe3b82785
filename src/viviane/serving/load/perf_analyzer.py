"""Triton's own load generator, for clients that wait for their answers and for arrivals at a rate."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from viviane.core.errors import ConfigError
from viviane.serving.load.generator import LoadResult, prepare_load
from viviane.serving.load.phase import Phase
from viviane.serving.load.requests import PreparedRequest
from viviane.serving.load.settings import LoadSettings
from viviane.serving.server.tensors import BYTES, DATATYPES
from viviane.serving.triton.environment import TritonEnvironment, TritonError

_MOST_ROWS: Final = 64
"""Rows that are sent again and again, in one request too: perf_analyzer's start takes seconds for some hundred."""
_ROWS_A_SECOND: Final = 100
"""At least; perf_analyzer took 15 s to prepare requests of 4,096 rows and 39 inputs."""
_COLUMNS: Final = {"p50": "p50 latency", "p90": "p90 latency", "p99": "p99 latency"}


def run_perf_analyzer(
    settings: LoadSettings, table: pa.Table | None = None, *, progress: Callable[[Phase], None] = lambda phase: None
) -> LoadResult:
    """Run perf_analyzer once for each phase; it counts latencies from when it sends a request.

    Raises:
        MissingExtraError: it is not installed. TritonError: it failed.
        ConfigError: a rate that is relative, where perf_analyzer takes requests a second; several processes.
    """
    environment = TritonEnvironment.find()
    if any(rate < 0 for rate in settings.rates):
        raise ConfigError("perf_analyzer takes rates in requests a second", where="rates", value=list(settings.rates),
                          fix="--rates '' for clients alone")  # fmt: skip
    if settings.processes > 1:
        raise ConfigError(
            "perf_analyzer has threads of its own", where="processes", value=settings.processes, allowed="1"
        )
    model, requests = prepare_load(settings, table, warm_up=1)  # names what the server rejects
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory(prefix="viviane-perf-") as name:
        folder = Path(name)
        (folder / "input.json").write_text(json.dumps({"data": _entries(requests, settings.rows)}))
        for count in settings.concurrency:
            options = [f"--concurrency-range={count}"]
            phases.append(_phase(environment, settings, model, folder, options, "closed", count))
            progress(phases[-1])
        for rate in settings.rates:
            options = [f"--request-rate-range={rate:g}", "--request-distribution=poisson"]
            phases.append(_phase(environment, settings, model, folder, options, "open", rate))
            progress(phases[-1])
    return LoadResult(settings, model, tuple(phases))


def _entries(requests: Sequence[PreparedRequest], rows: int) -> list[dict[str, Any]]:
    """Return the rows of requests as perf_analyzer reads them, an entry each; it joins as many as `-b` says."""
    entries = (entry for request in requests for entry in rows_of(request, rows))
    return list(islice(entries, _MOST_ROWS))


def rows_of(request: PreparedRequest, rows: int) -> list[dict[str, Any]]:
    """Return a request's rows: numbers as lists, texts in base64."""
    found: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, datatype, shape, data in request.inputs:
        contents: Iterable[Any]
        if datatype == BYTES:
            contents = ({"b64": base64.b64encode(own).decode()} for own in _cut_texts(data, rows))
        else:
            contents = np.frombuffer(data, DATATYPES[datatype]).reshape(rows, -1).tolist()
        for entry, content in zip(found, contents, strict=True):
            entry[name] = {"content": content, "shape": list(shape[1:])}
    return found


def _cut_texts(data: bytes, rows: int) -> list[bytes]:
    """Cut texts behind their 4-byte lengths into as many parts of equally many texts."""
    ends, at = [0], 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        ends.append(at)
    per_row = (len(ends) - 1) // rows
    return [data[ends[row * per_row] : ends[(row + 1) * per_row]] for row in range(rows)]


def _phase(
    environment: TritonEnvironment,
    settings: LoadSettings,
    model: str,
    folder: Path,
    options: list[str],
    kind: Any,
    load: float,
) -> Phase:
    report = folder / "report.csv"
    report.unlink(missing_ok=True)
    target = urlsplit(settings.url if "://" in settings.url else f"//{settings.url}").netloc
    command = [
        str(environment.perf_analyzer), "-m", model, "-i", settings.protocol, "-u", target, "-b", str(settings.rows),
        "--input-data", str(folder / "input.json"), "--measurement-interval", str(int(settings.seconds * 1000)),
        "--stability-percentage", "999", "--max-trials", "3", "-f", str(report), *options,
    ]  # fmt: skip
    command += ["-x", settings.version] if settings.version else []
    command += ["--shared-memory", "system"] if settings.shared_memory else []
    environ = {**os.environ, "LD_LIBRARY_PATH": environment.perf_analyzer_libraries()}
    limit_s = settings.seconds * 10 + settings.timeout_s + settings.rows / _ROWS_A_SECOND
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TritonError("perf_analyzer did not end", where=" ".join(command)) from None
    if not report.exists() or done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise TritonError("perf_analyzer failed", where=" ".join(command), value="\n".join(said))
    with report.open() as file:
        row = next(csv.DictReader(file))
    latency = {name: float(row[column]) / 1000 for name, column in _COLUMNS.items() if row.get(column)}
    rows = float(row["Inferences/Second"])
    rate = rows / settings.rows
    count = round(rate * settings.seconds)
    return Phase(kind, load, settings.seconds, count, count, {}, rate, rows, latency)
