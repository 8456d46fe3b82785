"""Requests that wait at the same time, predicted together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from pydantic import Field

from viviane.serving.server.admission import Backlog, QueueLimits, overloaded
from viviane.serving.server.together import Prediction, kind_of, predict_together
from viviane.serving.session import InferenceSession

_IDLE_S: Final = 5.0
"""A thread without work ends after so long; the next request starts one."""
_KEEPS_BUSY: Final = 32


class BatchSettings(QueueLimits):
    """How requests are predicted together.

    Args:
        max_rows: of a batch; a request with more rows is one of its own. 1 predicts every request alone.
        max_delay_ms: how long a request may wait for others; 0 takes those that wait already.
        max_queued: requests that may wait; more are refused with 429 or UNAVAILABLE.
        max_queued_rows: their rows.
    """

    max_rows: int = Field(default=1024, ge=1)
    max_delay_ms: float = Field(default=0, ge=0, le=10_000)


@dataclass(frozen=True)
class Outcome:
    """What became of one request, and what it took.

    Args:
        batch_rows: rows of the batch that the request was part of.
        queued_s, computed_s: how long it waited, and how long the batch took.
    """

    prediction: Prediction
    batch_rows: int = 0
    queued_s: float = 0.0
    computed_s: float = 0.0


@dataclass(eq=False)
class Work:
    """A request on its way.

    Args:
        rows: columns by name, or a list of dicts.
        num_rows: how many.
        done: called once, from a thread of the batcher; must not raise.
        cancelled: no client waits for the response.
    """

    rows: Any
    num_rows: int
    done: Callable[[Outcome], None]
    cancelled: bool = False
    since: float = field(default_factory=perf_counter)
    kind: Any = field(init=False)

    def __post_init__(self) -> None:
        self.kind = kind_of(self.rows)


class Batcher:
    """Predicts requests of one session on threads of its own, as many as the session has instances.

    Requests are taken in their order. Those that are predicted together have the same columns of the same types; a
    request that cannot be predicted fails alone.
    """

    def __init__(self, session: InferenceSession, settings: BatchSettings) -> None:
        self.session, self.settings = session, settings
        self.inputs, self.outputs = session.inputs, session.outputs  # recreated by each call of the session's
        self._max_rows = settings.max_rows if session.rows_are_independent else 1
        self.backlog = Backlog(settings)
        self._turn = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._waiting_rows = 0
        self._threads = self._idle = self._gathering = 0

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def keeps_busy(self) -> int:
        """With fewer waiting requests than this, the model would soon have nothing to do."""
        return _KEEPS_BUSY

    def is_full(self, num_rows: int = 1) -> bool:
        """Whether a request of so many rows is refused."""
        return self.settings.is_full(len(self._waiting), self._waiting_rows, num_rows)

    def submit(self, work: Work) -> None:
        """Queue a request.

        Raises:
            RequestError: too many wait already (status OVERLOADED).
        """
        with self._turn:
            if self.is_full(work.num_rows):
                raise overloaded(len(self._waiting), self._waiting_rows)
            self._waiting.append(work)
            self._waiting_rows += work.num_rows
            self._find_thread()

    def _find_thread(self) -> None:
        """Let a thread look for waiting requests, if one waits for some or may be started; under the lock."""
        if self._idle or self._gathering:
            self._turn.notify()
        elif self._threads < self.session.instances:
            self._threads += 1
            threading.Thread(target=self._work, name="viviane-serving", daemon=True).start()

    def _work(self) -> None:
        while True:
            batch = self._take()
            if batch is None:
                return
            try:
                self._predict(batch)
            except BaseException as error:  # every waiting request must get a response
                for work in batch:
                    work.done(Outcome(Prediction(None, (), error)))
            finally:
                with self._turn:
                    self.backlog.computing -= len(batch)

    def _take(self) -> list[Work] | None:
        """Wait for requests, and return those of the next batch; None: there were none for a while."""
        with self._turn:
            while not self._waiting:
                self._idle += 1
                came = self._turn.wait_for(lambda: bool(self._waiting), _IDLE_S)
                self._idle -= 1
                if not came:
                    self._threads -= 1
                    return None
            batch = [self._pop()]
            rows = batch[0].num_rows
            until = batch[0].since + self.settings.max_delay_ms / 1000
            while rows < self._max_rows:
                if self._waiting:
                    following = self._waiting[0]
                    if following.kind != batch[0].kind or rows + following.num_rows > self._max_rows:
                        break
                    batch.append(self._pop())
                    rows += following.num_rows
                    continue
                left = until - perf_counter()
                if left <= 0:
                    break
                self._gathering += 1
                self._turn.wait_for(lambda: bool(self._waiting), left)
                self._gathering -= 1
            if self._waiting:  # several may have come before this thread, which was idle, could take the first
                self._find_thread()
            self.backlog.computing += len(batch)
            return batch

    def _pop(self) -> Work:
        work = self._waiting.popleft()
        self._waiting_rows -= work.num_rows
        return work

    def _predict(self, batch: list[Work]) -> None:
        start = perf_counter()
        wanted = [work for work in batch if not work.cancelled]
        if not wanted:
            return
        rows = sum(work.num_rows for work in wanted)
        predictions = predict_together(self.session, [(work.rows, work.num_rows) for work in wanted])
        computed = perf_counter() - start
        for work, prediction in zip(wanted, predictions, strict=True):
            work.done(Outcome(prediction, rows, start - work.since, computed))
