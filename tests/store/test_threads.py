"""The pool that plans and copies rows."""

import os
import signal

import pytest

from viviane.store import threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_workers", lambda: 2)
    seen: list[int] = []
    jobs = [lambda: seen.append(0), lambda: seen.append(1)]
    threads.run_all(jobs)
    assert sorted(seen) == [0, 1]
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a job that no thread takes would keep the child waiting
        seen.clear()
        threads.run_all(jobs)
        os._exit(0 if sorted(seen) == [0, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0
