"""Heartbeats between the ranks of a job: one that dies, fails or stalls ends all of them, and the error names it.

Every process writes a record to the job's store once a second: its count of beats, the step it is at, how many
exchanges it has entered, and whether it waits in one. A thread reads the others' records. A collective of Gloo or
NCCL does not notice a lost rank and would keep waiting, so the thread ends the process where the main thread cannot.
Replayed steps enter no exchange that the host sees: only their step number counts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from viviane.core.errors import ProcessError

EXIT_CODE: Final = 70
_FAILURE: Final = "failure"
_GRACE_S: Final = 3.0  # for the main thread to end by itself where it can
_LONG_GRACE_S: Final = 60.0  # where it is ending already


@dataclass
class _Seen:
    """The state of another rank as seen by this one, with the local time of the last change."""

    record: dict[str, Any] = field(default_factory=dict)
    beat_at: float = field(default_factory=monotonic)
    moved_at: float = field(default_factory=monotonic)

    def update(self, record: dict[str, Any]) -> None:
        now = monotonic()
        if record["beat"] != self.record.get("beat"):
            self.beat_at = now
        if any(record[key] != self.record.get(key) for key in ("step", "calls", "waits")):
            self.moved_at = now
        self.record = record


class Watch:
    """Exchanges failures between this rank and the others.

    Args:
        store: of the job; for this watch alone.
        rank, size: this process, and how many there are.
        timeout_s: seconds without a sign of life, or without progress while others wait, that end the job.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.step = 0
        self.failure: str | None = None
        self._calls = self._waits = self._beat = 0
        self._ending = False
        self._done = threading.Event()
        self._culprit: dict[str, Any] | None = None
        self._mine = _Seen()
        self._host = socket.gethostname()
        self._every_s = min(1.0, timeout_s / 8)
        self._publish()
        self._seen = {other: _Seen() for other in range(size) if other != rank}
        self._thread = threading.Thread(target=self._run, name="viviane-watch", daemon=True)
        self._thread.start()

    # Called by the main thread ------------------------------------------------------------------------------

    def enter(self) -> None:
        """Note that an exchange begins."""
        self._calls += 1
        self._waits += 1

    def leave(self) -> None:
        """Note that it has ended."""
        self._waits -= 1

    def lost(self, error: BaseException) -> ProcessError:
        """Return what to raise in place of an exchange's error: it names the process that is the cause."""
        self._ending = True
        end = monotonic() + max(_GRACE_S, 4 * self._every_s)
        while self.failure is None and monotonic() < end:
            sleep(0.05)
        what = self.failure or f"an exchange with the other processes failed: {str(error).splitlines()[0]}"
        return ProcessError(
            what,
            where=f"rank {self.rank}, step {self.step}",
            fix="see that process's own message; a run folder's last checkpoint is whole: continue with resume=True",
        )

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends with an error."""
        if self.failure is None:
            self._ending = True
            what = str(error) or type(error).__name__
            self._declare(f"rank {self.rank} failed at step {self.step}: {what}")

    def close(self) -> None:
        """Stop watching: this process is done."""
        if not self._closed:
            error = getattr(sys, "last_value", None)  # what ended the script, where something did
            if error is not None and not isinstance(error, ProcessError):
                self.report(error)
            self._done.set()
            with suppress(RuntimeError):  # the store went first, which is no news at the end
                self._publish()
            # A thread that comes back from the store while Python ends is stopped inside C++, which aborts the process.
            self._thread.join(_LONG_GRACE_S)

    @property
    def _closed(self) -> bool:
        return self._done.is_set()

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed and self.failure is None:
            try:
                self._publish()
                self.failure = self._look()
            except RuntimeError as error:
                if not self._closed:
                    self.failure = f"the job's store cannot be reached, its host has gone: {str(error).splitlines()[0]}"
            self._done.wait(self._every_s)
        if self.failure is not None and not self._closed:
            self._end()

    def _publish(self) -> None:
        self._beat += 1
        record = {
            "beat": self._beat, "step": self.step, "calls": self._calls, "waits": self._waits > 0, "pid": os.getpid(),
            "host": self._host, "done": self._closed,
        }  # fmt: skip
        self._mine.update(record)
        self._store.set(str(self.rank), json.dumps(record))

    def _look(self) -> str | None:
        """Return what is wrong with another process, if anything is."""
        if self._store.check([_FAILURE]):
            return str(self._store.get(_FAILURE).decode())
        others = [str(other) for other in self._seen]
        for other, text in zip(self._seen, self._store.multi_get(others), strict=True):
            self._seen[other].update(json.loads(text))
        wrong = self._judge()
        return None if wrong is None else self._declare(wrong)

    def _declare(self, wrong: str) -> str:
        """Let all ranks report the same error: the first one."""
        self.failure = self._store.compare_set(_FAILURE, "", wrong).decode() or wrong
        return self.failure

    def _judge(self) -> str | None:
        now = monotonic()
        for other, seen in self._seen.items():
            record = seen.record
            at = f"rank {other} (process {record['pid']} on {record['host']})"
            seen_at = f"it was last seen at step {record['step']}, and rank {self.rank} is at step {self.step}"
            late, silent = now - seen.moved_at, now - seen.beat_at
            # On a GPU the host enters an exchange and continues: a lack of progress shows that it waits.
            waits = self._waits > 0 or now - self._mine.moved_at > self.timeout_s
            ahead = (self.step, self._calls) > (record["step"], record["calls"])
            waited_for = not record["waits"] and waits and ahead
            if record["done"]:
                if late > self.timeout_s and waited_for:
                    return f"{at} has ended while others continue; {seen_at}"
                continue
            if record["host"] == self._host and not _is_alive(record["pid"]):
                return f"{at} has died; {seen_at}"
            if silent > self.timeout_s:
                self._culprit = record
                return f"{at} has stalled: no sign of life for {silent:.0f} s; {seen_at}"
            if late > self.timeout_s > 2 * silent and waited_for:
                self._culprit = record
                return f"{at} has stalled: no progress for {late:.0f} s while others wait; {seen_at}"
        return None

    def _end(self) -> None:
        """Give the main thread time to raise; where it hangs in an exchange, end the process."""
        if self._culprit is not None and self._culprit["host"] == self._host:
            # It does not react any more, and until it is gone the others' exchanges with it do not end.
            with suppress(OSError):
                os.kill(self._culprit["pid"], signal.SIGKILL)
        began = monotonic()
        while monotonic() - began < (_LONG_GRACE_S if self._ending else _GRACE_S):
            if self._closed:
                return
            self._done.wait(0.1)
        message = f"error: {self.failure}\n  where:   seen by rank {self.rank}, which waited at step {self.step}\n"
        sys.stderr.write(message)
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _is_alive(pid: int) -> bool:
    """Return whether a process of this machine lives; one that ended and was not collected yet does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # unknown on a system without /proc
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
