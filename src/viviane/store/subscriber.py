"""A thread that follows a stream of deltas and applies them; it survives brokers that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from viviane.core.errors import DataError, RemoteError, StoreError
from viviane.core.logging import get_logger
from viviane.data.streaming.topic import READING, Message, Topic, refuse_fixed
from viviane.store.applier import DeltaApplier, DeltaTarget, Visible
from viviane.store.outbox import check_outbox, read_outbox
from viviane.store.stream import StreamAddress

_POLL_S: Final = 0.05
_MOST_MESSAGES: Final = 64
_RETRY_S: Final = 0.5
_WAIT_S: Final = 2.0  # so that a server can end while the brokers do not answer
_FETCH: Final = {"fetch.message.max.bytes": 4 << 20, "fetch.wait.max.ms": 10, "fetch.queue.backoff.ms": 5}
"""Defaults of librdkafka's settings: several deltas of up to 1 MiB per request and partition, and short waits."""
_log = get_logger("store")


class DeltaSubscriber:
    """Follows a stream; `target` has every delta applied once, in order.

    Args:
        address: kafka://host:port/topic.
        target: what is changed; it records what was applied before.
        visible: see `DeltaApplier`.
        outbox: the publisher's outbox, where missing deltas may be had; None: a gap stops its partition.
        settings: librdkafka's own; no credentials.

    Raises:
        ConfigError: a setting has one value here, such as enable.auto.commit.
        RemoteError: no broker answers within 3 seconds, or there is no such topic.
        StoreError: the outbox is not there, or is another model's.
    """

    def __init__(
        self, address: str, target: DeltaTarget, *, visible: Visible = "row", outbox: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.address = StreamAddress.of(address)
        self._settings = dict(settings or {})
        refuse_fixed(self._settings, READING, str(self.address))
        if outbox is not None:
            check_outbox(outbox, target.model)
        count = self.address.partitions(self._settings)
        repair = None if outbox is None else lambda *place: read_outbox(outbox, *place)
        self.applier = DeltaApplier(target, count, visible=visible, repair=repair)
        self.is_connected = True
        self._error: BaseException | None = None
        self._offsets: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="viviane-updates", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread, or a gap that nothing could fill.

        Raises:
            DeltaGapError: with the number of the delta that is missing.
        """
        if self._error is not None:
            raise StoreError("updates are no longer applied", where=str(self.address), value=str(self._error))
        self.applier.check()

    def wait_for(self, publication: int, timeout_s: float) -> bool:
        """Wait until a publication is complete here; False where time runs out."""
        end = time.monotonic() + timeout_s
        while self.applier.status.publication < publication:
            self.check()
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def status(self) -> dict[str, Any]:
        """Return what was applied, as plain data."""
        return {"address": str(self.address), "connected": self.is_connected, **self.applier.to_dict()}

    def close(self) -> None:
        """Stop after the messages that are being applied."""
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except (RemoteError, DataError) as error:
                self.is_connected = False
                self._offsets.clear()  # the topic may have been recreated; applied deltas are skipped anyway
                _log.warning("%s: %s; asked again", self.address, error.what)
                self._stopping.wait(_RETRY_S)
            except BaseException as error:  # raised again by check
                self._error = error
                _log.error("updates are no longer applied: %s", error)
                return

    def _follow(self) -> None:
        topic = Topic(self.address.servers, self.address.topic, {**_FETCH, **self._settings}, wait_s=_WAIT_S)
        try:
            topic.start({one: self._offsets.get(one, topic.bounds(one)[0]) for one in topic.partitions})
            self.is_connected = True
            while not self._stopping.is_set():
                found = [one for one in topic.poll(_MOST_MESSAGES, _POLL_S) if isinstance(one, Message)]
                if found:
                    self._offer(found)
        finally:
            topic.close()

    def _offer(self, messages: list[Message]) -> None:
        """Apply messages, again and again while the disk is full."""
        while not self._stopping.is_set():
            try:
                self.applier.offer(one.value or b"" for one in messages)
            except StoreError as error:
                self.applier.status.last_error = error.what
                _log.warning("updates wait: %s", str(error).replace("\n", ";"))
                self._stopping.wait(_RETRY_S)
                continue
            self._offsets |= {one.partition: one.offset + 1 for one in messages}
            return
