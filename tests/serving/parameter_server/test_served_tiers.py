"""`viviane serve` with models in tiers: every combination of tiers gives the bits of the model in memory over HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from viviane.serving import InferenceSession

ONE: dict[str, Any] = {
    "cache": {"rows": 5}, "host": {"rows": 30}, "redis": {"address": "REDIS"}, "rocksdb": {"folder": "DB"},
}  # fmt: skip
COMBINATIONS = [(), *((one,) for one in ONE), *combinations(ONE, 2), *combinations(ONE, 3), tuple(ONE)]


def clause(tiers: tuple[str, ...], folder: Path, address: str) -> dict[str, Any]:
    """Return the tables of one model; its database lies in a folder of its own."""
    text = json.dumps({"cache": None, **{name: ONE[name] for name in tiers}, "strict": True})
    return dict(json.loads(text.replace("REDIS", address).replace("DB", str(folder / "-".join(tiers)))))


@contextmanager
def command(config: Path, log: Path) -> Iterator[str]:
    """Start the command; gives its address, and ends it as an operator does."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "viviane", "serve", "--config", str(config)],
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        until = time.monotonic() + 240
        while "http://127.0.0.1:" not in log.read_text() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert "http://127.0.0.1:" in log.read_text(), log.read_text()
        yield "http://127.0.0.1:" + log.read_text().split("http://127.0.0.1:")[1].split()[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_every_combination_of_tiers_is_served_with_the_bits_of_memory(
    saved: Path, rows: dict[str, Any], tmp_path: Path, valkey: Any
) -> None:
    valkey.client().flushall()
    with InferenceSession(saved, device="cpu") as session:
        wanted = session.predict(rows)
    names = ["-".join(tiers) or "snapshot" for tiers in COMBINATIONS]
    models = [
        {"name": name, "path": str(saved.parent), "session": {"device": "cpu"},
         "tables": clause(tiers, tmp_path / "db", valkey.address)}
        for name, tiers in zip(names, COMBINATIONS, strict=True)
    ]  # fmt: skip
    config = tmp_path / "ps.json"
    config.write_text(json.dumps({"http_port": 0, "grpc_port": None, "inference": {"models": models}}))
    instances = [
        {name: np.asarray(values[i]).tolist() for name, values in rows.items()} for i in range(len(rows["item"]))
    ]
    body = json.dumps({"instances": instances}).encode()

    with command(config, tmp_path / "log.txt") as url, ThreadPoolExecutor(4) as pool:

        def ask(name: str) -> np.ndarray:
            request = urllib.request.Request(f"{url}/v1/models/{name}:predict", body)
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request, timeout=60) as reply:
                return np.float32(json.load(reply)["predictions"])

        # At once, and again when faster tiers have filled.
        for name, found in zip(names * 4, pool.map(ask, names * 4), strict=True):
            assert np.array_equal(found, wanted), name
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            metrics = reply.read().decode()
    for name, tiers in zip(names, COMBINATIONS, strict=True):
        for tier in tiers:
            assert f'viviane_tier_hits_total{{model="{name}",table="wide.item",tier="{tier}",version="1"}}' in metrics
        assert f'viviane_table_degraded_total{{model="{name}",table="wide.item",version="1"}} 0.0' in metrics
