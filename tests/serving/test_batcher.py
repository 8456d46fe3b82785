"""Requests that cannot be predicted together are computed side by side where instances are free."""

import threading
import time

import numpy as np

from viviane.serving import InferenceSession
from viviane.serving.server.batcher import Batcher, BatchSettings, Work


class MeetingSession(InferenceSession):
    """Predicts a request only beside another, once there is a meeting."""

    meeting: threading.Barrier | None = None

    def try_predict(self, rows, *, raw=None):
        if self.meeting is not None:
            self.meeting.wait(5)
        return super().try_predict(rows, raw=raw)


def test_two_requests_that_come_at_once_to_one_idle_thread_take_both_instances(models, raw) -> None:
    session = MeetingSession(models.path("dlrm"), device="cpu", instances=2)
    batcher, outcomes = Batcher(session, BatchSettings(max_rows=1)), []
    ended = threading.Semaphore(0)

    def done(outcome) -> None:
        outcomes.append(outcome)
        ended.release()

    batcher.submit(Work(raw(1, seed=1), 1, done))
    assert ended.acquire(timeout=30)
    while not batcher._idle:
        time.sleep(0.001)
    session.meeting = threading.Barrier(2)
    with batcher._turn:  # the first request wakes the idle thread, which waits for this lock until both are there
        batcher.submit(Work(raw(1, seed=1), 1, done))
        batcher.submit(Work(raw(1, seed=1), 1, done))
    for _ in range(2):
        assert ended.acquire(timeout=30)
    assert [one.prediction.error for one in outcomes] == [None] * 3
    assert len({float(np.asarray(one.prediction.scores)[0]) for one in outcomes}) == 1


def test_a_batch_that_is_full_does_not_wait_for_its_delay(models, raw) -> None:
    session = InferenceSession(models.path("dlrm"), device="cpu", instances=1)
    batcher, outcomes = Batcher(session, BatchSettings(max_rows=2, max_delay_ms=10_000)), []
    ended, start = threading.Semaphore(0), time.perf_counter()

    def done(outcome) -> None:
        outcomes.append(outcome)
        ended.release()

    batcher.submit(Work(raw(1, seed=1), 1, done))
    while batcher.queued:  # until the thread has it, and waits for others
        time.sleep(0.001)
    batcher.submit(Work(raw(1, seed=2), 1, done))
    for _ in range(2):
        assert ended.acquire(timeout=30)
    assert [one.batch_rows for one in outcomes] == [2, 2]
    assert time.perf_counter() - start < 8
