"""Who is said to have stalled, where exchanges do not hold the host: two watches in one process."""

import time

import pytest
from torch.distributed import HashStore

from viviane.parallel.watch import Watch

TIMEOUT_S = 0.8


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(Watch, "_end", lambda self: None)  # it would end the process
    store = HashStore()
    store.set("1", '{"beat": 0, "step": 0, "calls": 0, "waits": false, "pid": 1, "host": "", "done": false}')
    both = [Watch(store, rank, 2, TIMEOUT_S) for rank in range(2)]
    yield both
    for one in both:
        one.close()


def failure_of(pair, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in pair:
            if one.failure is not None:
                return one.failure
        time.sleep(0.02)
    return None


@pytest.mark.parametrize("sign", ["exchange", "step"])
def test_the_one_that_is_behind_has_stalled(pair, sign):
    """Neither waits in an exchange: on a GPU the host only enters it; a replayed step enters none."""
    for one in pair:
        one.step = 7
        one.enter()
        one.leave()
    if sign == "exchange":
        pair[0].enter()
        pair[0].leave()
    else:
        pair[0].step = 8
    found = failure_of(pair, 20)
    assert found is not None
    assert found.startswith("rank 1 (process")
    assert "has stalled: no progress" in found


def test_processes_that_rest_at_one_place_have_not(pair):
    for one in pair:
        one.step = 7
        one.enter()
        one.leave()
    assert failure_of(pair, 3 * TIMEOUT_S) is None


def test_one_that_goes_on_has_not(pair):
    pair[0].step = 10**6
    end = time.monotonic() + 3 * TIMEOUT_S
    while time.monotonic() < end:
        pair[1].step += 1
        time.sleep(0.05)
    assert failure_of(pair, 0.1) is None
