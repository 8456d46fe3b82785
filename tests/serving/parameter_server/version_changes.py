"""Requests during changes of versions: each is answered by one version that was loaded, and none fails."""

from __future__ import annotations

import gc
import threading
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from click_models import build, train

import viviane as vv
from viviane.serving import ModelEntry, SessionSettings
from viviane.serving.parameter_server import TableSettings

_POOL = 16
ROWS = 16


@dataclass
class Outcome:
    """What happened.

    Args:
        requests, failed, mixed: answers in all, errors, and answers that no loaded version gives.
        before_ms, during_ms: latencies without and during a change.
        hit_rates: of the cache, by change: in the time before, and in the first moments of the new version.
        handles, threads, resident: of the process, after each change.
    """

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    mixed: int = 0
    before_ms: list[float] = field(default_factory=list)
    during_ms: list[float] = field(default_factory=list)
    hit_rates: list[tuple[float, float]] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


def pool_of_rows() -> list[dict[str, Any]]:
    """Return requests whose keys are Zipf distributed, so that a cache matters."""
    found = []
    for seed in range(_POOL):
        random = np.random.default_rng(seed)
        found.append({
            "d": random.random(ROWS, dtype=np.float32), "item": np.minimum(random.zipf(1.3, ROWS), 299),
            "city": random.integers(0, 4, ROWS), "user": np.minimum(random.zipf(1.5, ROWS), 50),
            "past": [np.minimum(random.zipf(1.3, 3), 299).tolist() for _ in range(ROWS)],
        })  # fmt: skip
    return found


def save_versions(folder: Path, count: int, requests: list[dict[str, Any]]) -> dict[int, list[bytes]]:
    """Save versions 1 to `count` + 1; returns what each gives for each request."""
    model, answers = build(), {}
    for version in range(1, count + 2):
        train(model, 1, version)
        model.save(folder / str(version))
        answers[version] = [model.predict(rows)[:, 0].tobytes() for rows in requests]
    return answers


def run(folder: Path, changes: int, least_requests: int, *, quiet_s: float, settle_s: float) -> Outcome:
    """Change versions `changes` times under two clients; `quiet_s`: before the first; `settle_s`: between two."""
    requests, outcome = pool_of_rows(), Outcome()
    expected = save_versions(folder, changes, requests)
    tiers = TableSettings.from_dict({"cache": {"rows": 150}})
    started, ready = {1: 0.0}, {1: 0.0}  # when loading a version began, and ended
    windows: list[tuple[float, float]] = []
    done: list[tuple[float, float, int, bytes]] = []
    ended = threading.Event()
    with vv.ModelRepository() as repository:
        repository.add(ModelEntry(name="ctr", path=str(folder), versions=(1,), tables=tiers,
                                  session=SessionSettings(device="cpu")))  # fmt: skip
        assert repository.predict("ctr", requests[0]).tobytes() == expected[1][0]

        def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            while not ended.is_set():
                number, begin = int(random.integers(_POOL)), time.perf_counter()
                try:
                    score = repository.predict("ctr", requests[number]).tobytes()
                except Exception as error:  # counted: none may fail
                    outcome.failed.append(repr(error))
                    continue
                done.append((begin, time.perf_counter(), number, score))

        clients = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for one in clients:
            one.start()
        time.sleep(quiet_s)
        for version in range(2, changes + 2):
            before = hit_counts(repository, version - 1)
            time.sleep(settle_s)
            old = rate(before, hit_counts(repository, version - 1))
            started[version] = time.perf_counter()
            repository.load("ctr", version=version)
            ready[version] = time.perf_counter()
            first = hit_counts(repository, version)
            repository.unload("ctr", version - 1)
            windows.append((started[version], time.perf_counter()))
            time.sleep(settle_s)
            outcome.hit_rates.append((old, rate(first, hit_counts(repository, version))))
            gc.collect()
            process = psutil.Process()
            outcome.handles.append(process.num_fds())
            outcome.threads.append(process.num_threads())
            outcome.resident.append(process.memory_info().rss)
        while len(done) < least_requests and not outcome.failed:
            time.sleep(0.05)
        ended.set()
        for one in clients:
            one.join()
    judge(outcome, done, windows, expected, started, ready)
    return outcome


def judge(
    outcome: Outcome, done: list[tuple[float, float, int, bytes]], windows: list[tuple[float, float]],
    expected: dict[int, list[bytes]], started: dict[int, float], ready: dict[int, float],
) -> None:  # fmt: skip
    """Compare every answer with those of the versions that were loaded while it was computed."""
    begins, readies = [started[v] for v in sorted(started)], [ready[v] for v in sorted(ready)]
    starts, stops = [a for a, _ in windows], [b for _, b in windows]
    outcome.requests = len(done)
    for begin, end, number, score in done:
        # Never older than the version that was ready before the request, nor newer than what was being loaded.
        low, high = bisect_right(readies, begin), bisect_left(begins, end)
        outcome.mixed += all(expected[v][number] != score for v in range(max(1, low), high + 1))
        overlaps = bisect_right(stops, begin) < bisect_left(starts, end)
        (outcome.during_ms if overlaps else outcome.before_ms).append((end - begin) * 1e3)


def hit_counts(repository: vv.ModelRepository, version: int) -> tuple[int, int]:
    """Return hits and misses of a version's caches, all tables together."""
    tables = repository.get("ctr", version).tables
    assert tables is not None
    caches = [one["tiers"][0] for one in tables.status()["tables"]]
    return sum(one["hits"] for one in caches), sum(one["misses"] for one in caches)


def rate(before: tuple[int, int], after: tuple[int, int]) -> float:
    hits, misses = (b - a for a, b in zip(before, after, strict=True))
    return hits / max(1, hits + misses)
