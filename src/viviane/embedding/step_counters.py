"""How many updates each table of a storage has had, on the host or, for CUDA graphs, on the device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.ops.capture import is_capturing, refuse_capture


class StepCounters(MutableMapping[str, int]):
    """The number of updates of each table.

    Replays of a CUDA graph count without the host. After `hold` the numbers lie on the device: reading one waits for
    it, counting does not. One launch may update all tables that share a count. On the device these are the tables that
    started with equal counts and were always counted together.

    Args:
        tables: their names.

    Attributes:
        version: differs from an earlier one if other tables may share a count now, among those that were counted last.

    Example:
        >>> counters = StepCounters(["a", "b"])
        >>> counters.count(frozenset(["a"]))
        >>> dict(counters)
        {'a': 1, 'b': 0}
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self._counts = dict.fromkeys(tables, 0)
        self._place = {name: i for i, name in enumerate(tables)}
        self._on_device: Tensor | None = None
        self._group: dict[str, int] = {}
        self._masks: dict[frozenset[str], Tensor] = {}
        self._bound: set[tuple[str, ...]] = set()
        self._is_stale = False
        self.version = 0
        self._last_counted: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> int:
        return self._counts[name] if self._on_device is None else int(self._on_device[self._place[name]])

    def __setitem__(self, name: str, count: int) -> None:
        if name not in self._counts:
            raise KeyError(name)
        self.version += 1
        self._counts[name] = count
        if self._on_device is not None:
            self._on_device[self._place[name]] = count
            self._is_stale = True

    def __delitem__(self, name: str) -> None:
        raise TypeError("tables of a storage stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def hold(self, device: torch.device) -> None:
        """Count on the device from now on."""
        if self._on_device is None:
            refuse_capture(
                device, "the first step that counts on the device", fix="run an iteration with a tensor lr before"
            )
            self._on_device = torch.tensor(list(self._counts.values()), dtype=torch.int64).to(device)
            self._group_tables()

    def release(self) -> None:
        """Count on the host again; graphs recorded before are not to be replayed any more."""
        if self._on_device is not None:
            self.version += 1
            self._counts = dict(self)
            self._on_device, self._masks, self._bound, self._is_stale = None, {}, set(), False

    def count(self, tables: frozenset[str], gate: Tensor | None = None) -> None:
        """Add one to each of some tables; on the device none to any where the gate is 0."""
        # Tables that are counted together keep their differences.
        if tables is not self._last_counted and tables != self._last_counted:
            self._last_counted, self.version = tables, self.version + 1
        if self._on_device is None:
            for name in tables:
                self._counts[name] += 1
            return
        device = self._on_device.device
        if self._is_stale:
            refuse_capture(device, "a step after tables were replaced", fix="run an iteration before the capture")
            self._group_tables()
        if tables not in self._masks:
            refuse_capture(device, "a step of tables that never moved together", fix="run such an iteration before")
            self._masks[tables] = torch.tensor([name in tables for name in self._counts], dtype=torch.int64).to(device)
        mask = self._masks[tables]
        if gate is None:
            self._on_device += mask
        else:
            self._on_device.addcmul_(mask, gate)
        groups: dict[tuple[int, bool], int] = {}
        for name, group in self._group.items():
            self._group[name] = groups.setdefault((group, name in tables), len(groups))

    def _group_tables(self) -> None:
        assert self._on_device is not None
        self.version += 1
        self._counts = dict(zip(self._counts, self._on_device.tolist(), strict=True))
        known = {count: i for i, count in enumerate(dict.fromkeys(self._counts.values()))}
        # Tables that a graph counts apart stay apart, whatever their counters are now.
        signs = {name: (known[self._counts[name]], *(name in mask for mask in self._masks)) for name in self._counts}
        order = {sign: i for i, sign in enumerate(dict.fromkeys(signs.values()))}
        self._group = {name: order[sign] for name, sign in signs.items()}
        self._is_stale = False

    @property
    def were_set(self) -> bool:
        """Whether a count on the device was set and tables have not been sorted by their counters since."""
        return self._is_stale

    @property
    def shared_counts(self) -> dict[str, int]:
        """A number for each table, equal for tables that have one count and are counted together."""
        return self._counts if self._on_device is None else self._group

    def counter(self, name: str) -> int | Tensor:
        """Return a table's number, or where it lies on the device, 0-dim."""
        return self._counts[name] if self._on_device is None else self._on_device[self._place[name]]

    def bind_shared(self, tables: Sequence[str]) -> None:
        """Note that a launch moves tables by the count of the first; one that is recorded does so for good."""
        if self._on_device is not None and len(tables) > 1 and is_capturing(self._on_device.device):
            self._bound.add(tuple(tables))

    def check(self) -> None:
        """Refuse tables whose counters have parted though a recorded launch moves them by one.

        Raises:
            ConfigError: names the tables and their counters.
        """
        if not self._bound or self._on_device is None or is_capturing(self._on_device.device):
            return
        parted = [tables for tables in self._bound if len({self._group[name] for name in tables}) > 1]
        if not parted and not self._is_stale:
            return
        now = dict(zip(self._counts, self._on_device.tolist(), strict=True))
        for tables in self._bound:
            if len({now[name] for name in tables}) > 1:
                self._bound.clear()
                raise ConfigError(
                    "a recorded CUDA graph moves tables by one count of steps, and their counts differ",
                    value=", ".join(f"{name} {now[name]}" for name in tables),
                    fix="record the graph again after replacing tables or stepping some of them alone",
                )
