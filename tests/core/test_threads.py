"""Work on several items at once, by threads that may be refused, and the switch interval."""

import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viviane.core.threads import map_at_once, short_switch_interval


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_results_are_in_the_order_of_the_items(most: int) -> None:
    def work(one: int) -> int:
        time.sleep(0.001 * (one % 3))
        return one * one

    assert map_at_once(work, iter(range(50)), most) == [one * one for one in range(50)]
    assert map_at_once(work, [], most) == []


def test_so_many_run_at_once() -> None:
    meeting = threading.Barrier(3, timeout=30)
    assert map_at_once(lambda one: meeting.wait() >= 0, range(3), 3) == [True] * 3


@pytest.mark.parametrize("most", [1, 4])
def test_the_first_error_is_raised_and_nothing_else_is_begun(most: int) -> None:
    begun: list[int] = []

    def work(one: int) -> None:
        begun.append(one)
        if one == 5:
            raise KeyboardInterrupt(one)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt, match="5"):
        map_at_once(work, range(1000), most)
    assert 5 in begun
    assert len(begun) < 20


def test_without_further_threads_this_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_at_once(lambda one: -one, range(10), 8) == [-one for one in range(10)]


@given(st.lists(st.booleans(), max_size=20), st.sampled_from([0.005, 0.02, 0.0001]))
def test_blocks_of_short_switch_intervals_may_overlap_in_any_order(opens: list[bool], before: float) -> None:
    """True opens a block, False closes the oldest: the interval is never long meanwhile, and restored at the end."""
    approx = partial(pytest.approx, abs=2e-6)  # Python keeps whole microseconds, rounded down
    first = sys.getswitchinterval()
    sys.setswitchinterval(before)
    blocks: deque[ExitStack] = deque()
    try:
        for opening in opens:
            if opening:
                blocks.append(ExitStack())
                blocks[-1].enter_context(short_switch_interval())
            elif blocks:
                blocks.popleft().close()
            assert sys.getswitchinterval() == approx(min(before, 0.0005) if blocks else before)
    finally:
        while blocks:
            blocks.popleft().close()
        ended = sys.getswitchinterval()
        sys.setswitchinterval(first)
    assert ended == approx(before)
