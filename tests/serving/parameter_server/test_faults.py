"""The table of faults and outcomes in docs/how-to/parameter-server.md, case by case, under load."""

from pathlib import Path
from typing import Any

import lost_updates
import numpy as np
import pytest
import tier_faults as faults
from slow_link import SlowLink

from viviane.core.errors import StoreError
from viviane.serving import InferenceSession

# name: tier, what happens, which outcomes are allowed while it lasts, without and with strict
CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "redis, kill -9": ("redis", {"same"}, {"same"}),
    "redis, SIGSTOP": ("redis", {"same"}, {"same"}),
    "redis, slow": ("redis", {"same"}, {"same"}),
    "redis, 100 times slower": ("redis", {"same"}, {"same"}),
    "redis, out of memory": ("redis", {"same"}, {"same"}),
    "redis, rows of another length": ("redis", {"same"}, {"same"}),
    "redis, keys of another type": ("redis", {"same"}, {"same"}),
    "redis, altered bytes": ("redis", {"same"}, {"same"}),
    "cache, fails": ("cache", {"same"}, {"same"}),
    "host, fails": ("host", {"same"}, {"same"}),
    "rocksdb, cannot be read": ("rocksdb", {"degraded"}, {"error"}),
    "rocksdb, disk full": ("rocksdb", {"same"}, {"same"}),
    "updates, a delta is lost": ("updates", {"older"}, {"older"}),
    "updates, a delta is lost, with its outbox": ("updates", {"same"}, {"same"}),
}
FAST = {"redis, altered bytes", "rocksdb, cannot be read"}


def fault_of(name: str, valkey: Any, link: SlowLink) -> Any:
    client = valkey.client()
    tier, _, what = name.partition(", ")
    made = {
        "kill -9": lambda _: faults.killed(valkey),
        "SIGSTOP": lambda _: faults.stopped(valkey.process),
        "slow": lambda _: faults.slow(link, 0.1),
        "100 times slower": lambda scene: faults.hundredfold(scene, link),
        "out of memory": lambda _: faults.full(client),
        "rows of another length": lambda _: faults.shortened(client),
        "keys of another type": lambda _: faults.other_kind(client),
        "altered bytes": lambda _: faults.altered(client),
        "fails": lambda scene: faults.failing(scene, tier, StoreError("the memory is gone")),
        "cannot be read": lambda scene: faults.failing(scene, tier, StoreError("the disk is gone")),
        "disk full": faults.no_room_on_disk,
    }
    return made[what]


def clause_of(name: str, tier: str, link: SlowLink, folder: Path, strict: bool) -> dict[str, Any]:
    timeout_ms = 10_000 if name == "redis, 100 times slower" else 50
    own: dict[str, Any] = {"cache": {}, "host": {"host": {"rows": 20}}, "rocksdb": {"rocksdb": {"folder": str(folder)}},
           "redis": {"redis": {"address": link.address, "timeout_ms": timeout_ms}}}[tier]  # fmt: skip
    return {"cache": {"rows": 3, "warm_up": False}, "strict": strict, **own}


def check(
    name: str, strict: bool, requests: int, saved: Path, rows: dict[str, Any], valkey: Any, broker: Any, folder: Path
) -> Any:
    """Run a case; returns its outcomes."""
    tier, loose_outcomes, strict_outcomes = CASES[name]
    if tier == "updates":
        found = lost_updates.run_case(broker, rows, folder, requests, strict, "outbox" in name)
        assert set(found["fault"]) == (strict_outcomes if strict else loose_outcomes), f"{name}: {found}"
        assert set(found["all"]) <= {"same", "older"}, f"{name}: {found}"
        return found
    valkey.client().flushall()
    with InferenceSession(saved, device="cpu") as session:
        wanted = [session.predict(faults.part_of(rows, first)) for first in range(60)]
    with SlowLink(valkey.port) as link:
        scene = faults.Scene(saved, rows, clause_of(name, tier, link, folder / "db", strict), wanted)
        found = faults.run_case(scene, fault_of(name, valkey, link), requests, tier)
    allowed = strict_outcomes if strict else loose_outcomes
    assert set(found["fault"]) == allowed, f"{name}: {found}"
    assert set(found["all"]) <= allowed | {"same"}, f"{name}: {found}"
    assert set(found["after"]) == {"same"}, f"{name}: {found}"
    return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in CASES])
def test_answers_are_right_counted_or_refused(
    name: str, strict: bool, saved: Path, rows: dict[str, Any], valkey: Any, broker: Any, tmp_path: Path
) -> None:
    check(name, strict, 20 if name in FAST else 30, saved, rows, valkey, broker, tmp_path)


def test_a_silent_mistake_would_be_seen(saved: Path, rows: dict[str, Any]) -> None:
    with InferenceSession(saved, device="cpu") as session:
        wanted = [session.predict(faults.part_of(rows, first)) + np.float32(1e-6) for first in range(3)]
    with faults.Scene(saved, rows, {"cache": {"rows": 3}}, wanted) as scene:
        scene.wait_for("before", 3)
    assert set(scene.outcomes["before"]) == {"SILENTLY WRONG"}


def test_the_documented_table_is_the_tested_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "parameter-server.md").read_text()
    table = page.split("| tier | fault | answers |")[1].split("\n\n")[0].splitlines()[2:]
    documented = {}
    for line in table:
        tier, fault, loose, strict = (cell.strip() for cell in line.strip("|").split("|"))
        documented[f"{tier}, {fault}"] = (tier, {loose}, {strict})
    assert documented == CASES
