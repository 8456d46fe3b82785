"""Faults of tiers under load, and what becomes of the answers.

Every case opens a session whose tables are in a cache too small for them, and in the tier under test. Clients ask
without pause, before, during and after the fault. Each answer is compared with the model in memory. An outcome is
    same       the bits of the model in memory; nothing was counted as degraded
    degraded   counted as degraded
    error      an exception of Viviane
and never another row that was not counted. The tier has to be used again after the fault, without a restart.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from slow_link import SlowLink

from viviane.core.errors import StoreError, VivianeError
from viviane.serving import InferenceSession
from viviane.store.rocks import RocksTier

Fault = Callable[[Any], Any]


def part_of(rows: dict[str, Any], first: int) -> dict[str, Any]:
    """Return eight rows."""
    return {name: values[first : first + 8] for name, values in rows.items()}


class Scene:
    """A session under load and the servers behind it."""

    def __init__(self, saved: Path, rows: dict[str, Any], tiers: dict[str, Any], wanted: list[np.ndarray]) -> None:
        self.session = InferenceSession(saved, device="cpu", tables=tiers)
        self.rows, self.wanted = rows, wanted  # by first row: BLAS gives other bits for other numbers of rows
        self.outcomes: dict[str, Counter[str]] = {}
        self.slowest_s: dict[str, float] = {}
        self.phase, self._ended = "before", threading.Event()
        self._begun: dict[str, set[int]] = {}  # by phase the clients that have begun a request in it
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(2)]
        for level in self.levels():
            level.breaker.pause_s = 0.05

    def levels(self, kind: str | None = None) -> list[Any]:
        assert self.session.tables is not None
        found = [level for table in self.session.tables.hierarchies.values() for level in table.levels]
        return found if kind is None else [one for one in found if one.tier.name == kind]

    def degraded(self) -> int:
        assert self.session.tables is not None
        return sum(one.num_degraded for one in self.session.tables.hierarchies.values())

    def _ask(self, seed: int) -> None:
        random, count = np.random.default_rng(seed), len(self.wanted)
        while not self._ended.is_set():
            phase, first = self.phase, int(random.integers(0, count))
            self._begun.setdefault(phase, set()).add(seed)
            part = part_of(self.rows, first)
            before, start = self.degraded(), time.perf_counter()
            try:
                scores = self.session.predict(part)
                same = np.array_equal(scores, self.wanted[first])
                counted = self.degraded() > before
                outcome = "degraded" if counted else "same" if same else "SILENTLY WRONG"
            except VivianeError:
                outcome = "error"
            except Exception as error:
                outcome = f"raw {type(error).__name__}"
            self.outcomes.setdefault(phase, Counter())[outcome] += 1
            self.slowest_s[phase] = max(self.slowest_s.get(phase, 0.0), time.perf_counter() - start)

    def wait_for(self, phase: str, requests: int) -> None:
        self.phase = phase
        end = time.monotonic() + 60
        while sum(self.outcomes.get(phase, Counter()).values()) < requests:
            assert time.monotonic() < end, f"{phase}: {self.outcomes}"
            time.sleep(0.005)

    def enter(self, phase: str) -> None:
        """Begin a phase, and wait until all requests that began before it have ended."""
        self.phase = phase
        self.wait_until(lambda: len(self._begun.get(phase, ())) == len(self._threads), "a client does not go on")

    def wait_until(self, condition: Callable[[], bool], otherwise: str = "the tier was not used again") -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, otherwise
            time.sleep(0.01)

    def __enter__(self) -> Scene:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for one in self._threads:
            one.join()
        self.session.close()


@contextmanager
def stopped(process: Any) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def killed(server: Any) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def slow(link: SlowLink, seconds: float) -> Iterator[None]:
    link.delay_s = seconds
    try:
        yield
    finally:
        link.delay_s = 0.0


@contextmanager
def hundredfold(scene: Scene, link: SlowLink) -> Iterator[None]:
    """Let each call to the server take a hundred times as long as before, which is less than its time limit."""
    tier = scene.levels("redis")[0].tier
    keys, rows = np.arange(8), tier.layout.empty(8)

    def fastest(tries: int) -> float:
        found = []
        for _ in range(tries):
            start = time.perf_counter()
            tier.fetch(keys, rows)
            found.append(time.perf_counter() - start)
        return min(found)

    before = fastest(50)
    link.delay_s = 50 * before  # of the request and of the reply
    try:
        assert fastest(2) > 90 * before
        yield
    finally:
        link.delay_s = 0.0


@contextmanager
def full(client: Any) -> Iterator[None]:
    client.config_set("maxmemory", "1")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")


@contextmanager
def shortened(client: Any) -> Iterator[None]:
    """Replace all rows in the server by rows of another length."""
    names = client.keys("*")
    for name in names:
        for field in client.hkeys(name):
            client.hset(name, field, b"short")
    try:
        yield
    finally:
        client.flushall()


@contextmanager
def other_kind(client: Any) -> Iterator[None]:
    """Replace the hashes by strings."""
    for name in client.keys("*"):
        client.delete(name)
        client.set(name, b"no hash")
    try:
        yield
    finally:
        client.flushall()


@contextmanager
def altered(client: Any) -> Iterator[None]:
    """Change one byte of every row in the server; the length stays."""
    for name in client.keys("*"):
        for field, value in client.hgetall(name).items():
            client.hset(name, field, value[:1] + bytes([value[1] ^ 1]) + value[2:])
    try:
        yield
    finally:
        client.flushall()


@contextmanager
def failing(scene: Scene, kind: str, error: Exception) -> Iterator[None]:
    """Let the reads of a tier raise."""

    def fetch(keys: Any, out: Any) -> Any:
        raise error

    tiers = [level.tier for level in scene.levels(kind)]
    for tier in tiers:
        tier.fetch = fetch
    try:
        yield
    finally:
        for tier in tiers:
            del tier.__dict__["fetch"]


@contextmanager
def no_room_on_disk(scene: Scene) -> Iterator[None]:
    """No file may grow; an update is written to see that it is refused, and again when there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        refused = 0
        for level in scene.levels("rocksdb"):
            tier: RocksTier = level.tier
            rows = tier.layout.zeros(50_000)
            try:
                tier.put(np.arange(10**9, 10**9 + len(rows)), rows)
            except StoreError:
                refused += 1
        assert refused, "a full disk took rows"
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    for level in scene.levels("rocksdb"):
        level.tier.put(np.arange(10**9, 10**9 + 10), level.tier.layout.zeros(10))  # without a restart


def run_case(scene: Scene, fault: Callable[[Scene], Any], requests: int, kind: str) -> dict[str, Any]:
    """Return the outcomes by phase; the tier has to be read again when the fault has ended."""
    with scene:
        scene.wait_for("before", requests)
        with fault(scene):
            scene.enter("changing")
            scene.wait_for("fault", requests)
            scene.enter("ending")
        scene.phase = "recovery"
        hits = sum(one.hits + one.misses for one in scene.levels(kind))
        scene.wait_until(lambda: sum(one.hits + one.misses for one in scene.levels(kind)) > hits
                         and all(one.breaker.is_closed for one in scene.levels(kind)))  # fmt: skip
        scene.wait_for("after", requests)
    return {
        "fault": dict(scene.outcomes["fault"]), "after": dict(scene.outcomes["after"]),
        "all": dict(sum(scene.outcomes.values(), Counter())), "slowest_s": scene.slowest_s["fault"],
    }  # fmt: skip
