"""The reader: batches of one epoch, in an order determined by seed and epoch, from any position on."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import torch

from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError
from viviane.core.locations import AnyPath
from viviane.core.renamed import renamed_method
from viviane.data.buffers import Buffers
from viviane.data.device_shuffle import DeviceShuffle
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import EpochPlan, RowGroup, Window
from viviane.data.prefetch import Prefetcher, Reading
from viviane.data.run import PendingBatch
from viviane.data.storage import DatasetFiles
from viviane.schema import Schema

DEFAULT_SHUFFLE_ROWS: Final = 524_288
STATE_VERSION: Final = 1
_T = TypeVar("_T")
_KEPT_WINDOWS: Final = 1 << 32  # bytes; allocating new memory takes longer than decoding rows into it


class ReadableDataset(Protocol):
    """The interface of `Dataset` that a reader uses."""

    path: AnyPath
    schema: Schema
    storage: DatasetFiles
    files: list[Path]
    groups: list[RowGroup]
    num_rows: int

    @property
    def fingerprint(self) -> str:
        """A hash of schema, file names, sizes and row counts."""


class Reader:
    """Iterates over the batches of one epoch, starting at its current position.

    The order is a function of (data set, seed, epoch, shuffle_rows), regardless of thread timing: row groups in
    random order over the complete set, gathered into windows of at least shuffle_rows rows, each window permuted.
    When an epoch is exhausted, the reader is at the start of the next one.

    Args:
        dataset: the data to read.
        batch_size: rows of a batch, B; the last batch may be shorter.
        shuffle: shuffle rows; otherwise they keep the order of the files.
        seed: determines the order.
        drop_last: skip a last batch that is shorter than batch_size.
        epoch: first epoch.
        num_threads: number of decoding threads.
        shuffle_rows: minimum number of rows that are shuffled together. Two such windows are in memory at a time.
        max_batches: end the epoch after this many batches.
        rank, num_ranks: share every batch among num_ranks readers; this one yields rows B r // n to B (r + 1) // n
            of a batch of B rows. All ranks yield the same number of batches: if the last one has fewer rows than
            ranks, some ranks get a batch of 0 rows. Together they read what one reader would. A saved position is
            valid for every rank and any number of ranks.
        pin_memory: yield batches in page-locked memory, from which a GPU copies asynchronously, in allocations of at
            most about 65,536 rows, or of one batch; a `DeviceFeed` copies each allocation in one transfer. An
            allocation is reused when no batch in it is referenced and its copies are finished.
        until_epoch: epochs before this one are read without a pause: while one ends, rows of the next are already
            decoded. Close the reader if it does not read them. By default nothing is read beyond the end of an epoch.
            The attribute may be changed; it takes effect when an epoch begins.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> from viviane.schema import Schema
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", Schema(dense=[{"name": "x"}]), [{"x": [0, 1, 2, 3]}])
        >>> reader = data.reader(3, shuffle=True, seed=1)
        >>> first = next(iter(reader))
        >>> state = reader.state()
        >>> rest = [batch.dense[:, 0].tolist() for batch in reader]
        >>> again = data.reader(3, shuffle=True, seed=1)
        >>> again.restore(state)
        >>> rest == [batch.dense[:, 0].tolist() for batch in again]
        True
    """

    def __init__(
        self,
        dataset: ReadableDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        epoch: int = 0,
        num_threads: int = 2,
        shuffle_rows: int = DEFAULT_SHUFFLE_ROWS,
        max_batches: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        pin_memory: bool = False,
        until_epoch: int = 0,
    ) -> None:
        at_least_one = {
            "batch_size": batch_size, "num_threads": num_threads, "shuffle_rows": shuffle_rows, "num_ranks": num_ranks,
        }  # fmt: skip
        if max_batches is not None:
            at_least_one["max_batches"] = max_batches
        for name, value in at_least_one.items():
            if value < 1:
                raise ConfigError(f"the reader's {name} is too small", value=value, allowed=f"{name} >= 1")
        if epoch < 0:
            raise ConfigError("the reader's epoch is negative", value=epoch, allowed="epoch >= 0")
        if not 0 <= rank < num_ranks:
            raise ConfigError("the reader's rank is out of range", value=rank, allowed=f"0 <= rank < {num_ranks}")
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError("page-locked memory needs a GPU", value=pin_memory, fix="remove pin_memory on a CPU")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.num_threads = num_threads
        self.shuffle_rows = shuffle_rows
        self.max_batches = max_batches
        self.rank, self.num_ranks = rank, num_ranks
        self.until_epoch = until_epoch
        self.rows_each = 1
        """Rows of a batch per row of the data set."""
        self._layout = PackedLayout(dataset.schema)
        self._buffers, self._windows = Buffers(pin_memory), Buffers(kept_bytes=_KEPT_WINDOWS)
        self._epoch = epoch
        self._delivered = 0
        self._active: weakref.ref[Generator[Any, None, None]] | None = None
        self._prefetcher: Prefetcher | None = None
        self._ahead: Prefetcher | None = None  # the next epoch, if the current one has already started reading it

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        rows = self.dataset.num_rows
        count = rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)
        return count if self.max_batches is None else min(count, self.max_batches)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Number of batches of this epoch that were yielded."""
        return self._delivered

    @property
    def ready(self) -> bool:
        """Whether the next batch, or the end, is available without waiting or computing."""
        return self._prefetcher is not None and self._prefetcher.ready

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the position in the current epoch is kept.

        Raises:
            ConfigError: the epoch is negative.
        """
        if epoch < 0:
            raise ConfigError("the reader's epoch is negative", value=epoch, allowed="epoch >= 0")
        if epoch != self._epoch:
            self.close()
            self._epoch, self._delivered = epoch, 0

    def __iter__(self) -> Iterator[Batch]:
        """Continue at the current position; an earlier iterator is closed."""
        return self._begun(self._batches())

    def pending_batches(self, shuffle_device: torch.device | None = None) -> Iterator[PendingBatch]:
        """Continue like `__iter__`, but yield each batch as a `PendingBatch`, without creating its tensors.

        Args:
            shuffle_device: each run will be moved to this device, in turn and on one stream; the device shuffles its
                rows, which are in the order of the files until then.

        Raises:
            ConfigError: `no_device_shuffle_reason` returns a reason.
        """
        if shuffle_device is not None and (reason := self.no_device_shuffle_reason(shuffle_device)):
            raise ConfigError(f"rows cannot be shuffled on the device: {reason}", where=str(self.dataset.path))
        return self._begun(self._pending_batches(shuffle_device))

    def no_device_shuffle_reason(self, device: torch.device) -> str | None:
        """Return why rows cannot be shuffled on a device; None if they can.

        A GPU can shuffle rows if the reader shuffles, each bag has its column's hotness, and this rank's rows of
        three windows take at most 1/32 of its memory.
        """
        if not self.shuffle:
            return "the reader does not shuffle"
        reason = self._layout.dynamic_shape_reason
        if reason is not None:
            return reason
        largest = max((group.num_rows for group in self.dataset.groups), default=0)
        window = min(self.dataset.num_rows, self.shuffle_rows + largest)
        own = -(-self.batch_size // self.num_ranks)
        window = min(window, (window // self.batch_size + 2) * own)  # a window may begin and end within a batch
        return DeviceShuffle.too_large_reason(self._layout, window, device)

    cuts = renamed_method("cuts", "pending_batches")
    why_not_mixed_on = renamed_method("why_not_mixed_on", "no_device_shuffle_reason")

    def _begun(self, iteration: Generator[_T, None, None]) -> Generator[_T, None, None]:
        self._stop()
        self._active = weakref.ref(iteration)
        return iteration

    def _batches(self) -> Generator[Batch, None, None]:
        with closing(self._pending_batches()) as pending_batches:
            for run, number, origin in pending_batches:
                yield run.batch(number, origin)

    def _pending_batches(self, shuffle_device: torch.device | None = None) -> Generator[PendingBatch, None, None]:
        prefetcher = self._prefetcher = self._begin(shuffle_device)
        with closing(iter(prefetcher)) as made:  # type: ignore[type-var]
            place, source, known = f"{self.dataset.path}, epoch {self._epoch}, batch", "", None
            for run, number, windows in made:
                if windows != known:
                    source, known = self._source(windows), windows
                origin = f"{place} {self._delivered} (from {source})"
                self._delivered += 1
                yield run, number, origin
        self._prefetcher, self._ahead = None, prefetcher.following
        self._epoch, self._delivered = self._epoch + 1, 0

    def _begin(self, shuffle_device: torch.device | None) -> Prefetcher:
        """Use the prefetcher that already reads this epoch, or start one at the current position."""
        dataset, epoch = self.dataset, self._epoch
        begun, self._ahead = self._ahead, None
        if begun is not None and begun.shuffle_device != shuffle_device:
            begun.close()
            begun = None
        if begun is None:
            reading = Reading(
                storage=dataset.storage,
                layout=self._layout,
                batch_size=self.batch_size,
                last_row=min(len(self) * self.batch_size, dataset.num_rows),
                share=(self.rank, self.num_ranks),
                buffers=self._buffers,
                windows=self._windows,
                num_threads=self.num_threads,
                device_shuffle=None if shuffle_device is None else DeviceShuffle(self._layout, shuffle_device),
            )
            plan = EpochPlan(dataset.groups, self.shuffle_rows if self.shuffle else None, self.seed, epoch)
            begun = Prefetcher(plan, reading, min(self._delivered * self.batch_size, dataset.num_rows))
        begun.until_epoch = self.until_epoch
        return begun

    def _source(self, windows: list[Window]) -> str:
        groups = [group for window in windows for group in window.groups]
        unit = self.dataset.storage.unit
        named = [f"{self.dataset.files[group.file].name} {unit} {group.index}" for group in groups[:3]]
        more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
        return ", ".join(named) + more

    def _identity(self) -> dict[str, Any]:
        """Return the values that must be equal for a position to refer to the same rows."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self.dataset.fingerprint,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shuffle_rows": self.shuffle_rows if self.shuffle else None,
        }

    def state(self) -> dict[str, Any]:
        """Return the position as plain data: batches yielded to the consumer, not prefetched ones."""
        return {**self._identity(), "epoch": self._epoch, "batches": self._delivered}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the batch after those yielded when `state` was called.

        Raises:
            CheckpointError: the state belongs to another data set, batch size, seed or order.
        """
        wanted = self._identity()
        missing = [name for name in (*wanted, "epoch", "batches") if name not in state]
        if missing:
            raise CheckpointError("not a reader's state: keys are missing", value=", ".join(missing))
        for name, value in wanted.items():
            if state[name] != value:
                what = "data set" if name == "fingerprint" else name
                raise CheckpointError(
                    f"the saved position belongs to another {what}",
                    where=f"reader of {self.dataset.path}",
                    value=state[name],
                    allowed=str(value),
                    fix=f"resume with the {what} of the run that was saved, or start a new run",
                )
        epoch, batches = state["epoch"], state["batches"]
        if not (isinstance(epoch, int) and isinstance(batches, int) and epoch >= 0 and batches >= 0):
            raise CheckpointError("not a position of a reader", value=f"epoch {epoch!r}, batch {batches!r}")
        self.close()
        self._epoch, self._delivered = epoch, batches

    def close(self) -> None:
        """Stop all threads, including those that read the next epoch; the position is kept."""
        self._stop()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _stop(self) -> None:
        """Stop a running iteration."""
        batches = self._active() if self._active is not None else None
        if batches is not None:
            batches.close()
        self._active = self._prefetcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
