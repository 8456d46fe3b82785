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
    names = set(re.findall(r"viviane_(?:tier|table)_\w+", board))
    assert names
    assert all(name.removesuffix("_total") in text for name in names)


@pytest.mark.slow
def test_a_hundred_thousand_requests_during_a_hundred_changes(saved: Path, tmp_path: Path) -> None:
    """The score says the version: each answer is wholly of one, none fails."""
    import psutil
    from click_models import build, train

    model = build()
    train(model, 12)
    model.save(saved.parent / "2")
    few = {"d": np.ones(1, np.float32), "item": [3], "city": [1], "user": [7], "past": [[5]]}
    settings = vv.ModelRepository()
    answers: dict[bytes, int] = {}
    lock, ended = threading.Lock(), threading.Event()
    with settings as repository:
        from viviane.serving import ModelEntry
        from viviane.serving.parameter_server import TableSettings

        tiers = TableSettings.from_dict({"cache": {"rows": 50}})
        repository.add(ModelEntry(name="ctr", path=str(saved.parent), versions=(1,), tables=tiers))
        allowed = {repository.predict("ctr", few).tobytes()}

        def ask() -> None:
            while not ended.is_set():
                score = repository.predict("ctr", few).tobytes()
                with lock:
                    answers[score] = answers.get(score, 0) + 1

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for one in threads:
            one.start()
        handles = []
        changes = 0
        while changes < 100 or sum(answers.values()) < 100_000:
            repository.load("ctr", version=2)
            allowed.add(repository.predict("ctr", few).tobytes())
            repository.unload("ctr", 2)
            changes += 1
            handles.append(psutil.Process().num_fds())
        ended.set()
        for one in threads:
            one.join()
    assert set(answers) <= allowed
    assert len(allowed) == 2
    assert handles[-1] <= handles[5] + 5
