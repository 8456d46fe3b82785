"""A server whose models are in tiers: one file, metrics, versions that change under load, and the dashboard."""

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import viviane as vv

ROOT = Path(__file__).parents[3]


def test_versions_change_under_load_and_back(saved: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    from click_models import build, train

    model = build()
    train(model, 12)
    model.save(saved.parent / "2")
    config = tmp_path / "ps.json"
    entry = {"name": "ctr", "path": str(saved.parent), "versions": [1], "session": {"device": "cpu"},
             "tables": {"cache": {"rows": 50}, "rocksdb": {"folder": str(tmp_path / "db")}}}  # fmt: skip
    config.write_text(json.dumps({"http_port": 0, "grpc_port": None, "inference": {"models": [entry]}}))
    answers: list[bytes] = []
    ended = threading.Event()
    with vv.Server(config) as server:
        first = server.predict("ctr", rows).tobytes()

        def ask() -> None:
            while not ended.is_set():
                answers.append(server.predict("ctr", rows).tobytes())

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for one in threads:
            one.start()
        for _ in range(4):
            assert server.load("ctr", version=2) == 2
            assert server.unload("ctr", 2)  # back to the first
        server.load("ctr", version=2)
        second = server.predict("ctr", rows)
        ended.set()
        for one in threads:
            one.join()
        assert np.array_equal(second, model.predict(rows)[:, 0])
        assert set(answers) <= {first, second.tobytes()}
        text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        stats = json.loads(urllib.request.urlopen(f"{server.url}/v2/models/ctr/stats").read())
        assert set(server.statistics()) == {("ctr", 1), ("ctr", 2)}
    assert re.search(r'viviane_tier_hits_total\{model="ctr",table="wide.item",tier="cache",version="2"\} [1-9]', text)
    assert 'viviane_table_degraded_total{model="ctr",table="wide.item",version="1"} 0.0' in text
    assert stats["model_stats"][0]["parameter_server"]["tables"]
    board = (ROOT / "examples" / "grafana" / "parameter-server.json").read_text()
    names = set(re.findall(r"viviane_\w+", board))
    assert names
    assert all(name.removesuffix("_total").removesuffix("_bucket") in text for name in names)


@pytest.mark.parametrize(("changes", "requests"), [(2, 50), pytest.param(100, 100_000, marks=pytest.mark.slow)])
def test_every_request_is_of_one_version_and_none_fails(changes: int, requests: int, tmp_path: Path) -> None:
    from version_changes import run

    found = run(tmp_path, changes, requests, quiet_s=0.05, settle_s=0.05)
    assert not found.failed
    assert found.mixed == 0
    assert found.requests >= requests
    assert found.handles[-1] <= found.handles[0]
    assert found.threads[-1] <= found.threads[0] + 1  # a mover's thread ends after a second


def test_answers_of_a_version_that_was_not_loaded_count_as_mixed() -> None:
    from version_changes import Outcome, judge

    expected = {1: [b"a"], 2: [b"b"], 3: [b"c"]}
    started, ready = {1: 0.0, 2: 10.0, 3: 20.0}, {1: 0.0, 2: 11.0, 3: 21.0}
    for begin, end, score, mixed in [(5, 6, b"a", 0), (5, 6, b"b", 1), (9, 10.5, b"b", 0), (12, 13, b"a", 1),
                                     (10.5, 20.5, b"c", 0), (12, 13, b"ab", 1)]:  # fmt: skip
        found = Outcome()
        judge(found, [(begin, end, 0, score)], [(10.0, 11.5), (20.0, 21.5)], expected, started, ready)
        assert found.mixed == mixed, (begin, end, score)
        assert bool(found.during_ms) == (end > 10 and not 11.5 <= begin <= end <= 20)
