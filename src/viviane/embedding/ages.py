"""How many updates each table of a storage has had, on the host or, for CUDA graphs, on the device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.ops.capture import is_capturing, refuse_capture


class TableAges(MutableMapping[str, int]):
    """The number of updates of each table.

    Replays of a CUDA graph count without the host. After `hold` the numbers lie on the device: reading one waits for
    it, counting does not. Which tables are of one age, so that one launch may move them, is then known from what
    was counted: tables that began alike and were always counted together.

    Args:
        tables: their names.

    Example:
        >>> ages = TableAges(["a", "b"])
        >>> ages.count(frozenset(["a"]))
        >>> dict(ages), ages.alike("a", "b")
        ({'a': 1, 'b': 0}, False)
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self._ages = dict.fromkeys(tables, 0)
        self._place = {name: i for i, name in enumerate(tables)}
        self._held: Tensor | None = None
        self._family: dict[str, int] = {}
        self._masks: dict[frozenset[str], Tensor] = {}
        self._bound: set[tuple[str, ...]] = set()
        self._unsure = False

    def __getitem__(self, name: str) -> int:
        return self._ages[name] if self._held is None else int(self._held[self._place[name]])

    def __setitem__(self, name: str, age: int) -> None:
        if name not in self._ages:
            raise KeyError(name)
        self._ages[name] = age
        if self._held is not None:
            self._held[self._place[name]] = age
            self._unsure = True

    def __delitem__(self, name: str) -> None:
        raise TypeError("tables of a storage stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._ages)

    def __len__(self) -> int:
        return len(self._ages)

    def hold(self, device: torch.device) -> None:
        """Count on the device from now on."""
        if self._held is None:
            refuse_capture(
                device, "the first step that counts on the device", fix="run an iteration with a tensor lr before"
            )
            self._held = torch.tensor(list(self._ages.values()), dtype=torch.int64).to(device)
            self._sort_families()

    def release(self) -> None:
        """Count on the host again; graphs recorded before are not to be replayed any more."""
        if self._held is not None:
            self._ages = dict(self)
            self._held, self._masks, self._bound, self._unsure = None, {}, set(), False

    def count(self, tables: frozenset[str], gate: Tensor | None = None) -> None:
        """Add one to each of some tables; on the device none to any where the gate is 0."""
        if self._held is None:
            for name in tables:
                self._ages[name] += 1
            return
        device = self._held.device
        if self._unsure:
            refuse_capture(device, "a step after tables were replaced", fix="run an iteration before the capture")
            self._sort_families()
        if tables not in self._masks:
            refuse_capture(device, "a step of tables that never moved together", fix="run such an iteration before")
            self._masks[tables] = torch.tensor([name in tables for name in self._ages], dtype=torch.int64).to(device)
        mask = self._masks[tables]
        if gate is None:
            self._held += mask
        else:
            self._held.addcmul_(mask, gate)
        families: dict[tuple[int, bool], int] = {}
        for name, family in self._family.items():
            self._family[name] = families.setdefault((family, name in tables), len(families))

    def _sort_families(self) -> None:
        assert self._held is not None
        self._ages = dict(zip(self._ages, self._held.tolist(), strict=True))
        known = {age: i for i, age in enumerate(dict.fromkeys(self._ages.values()))}
        # Tables that a graph counts apart stay apart, whatever their ages are now.
        signs = {name: (known[self._ages[name]], *(name in mask for mask in self._masks)) for name in self._ages}
        order = {sign: i for i, sign in enumerate(dict.fromkeys(signs.values()))}
        self._family = {name: order[sign] for name, sign in signs.items()}
        self._unsure = False

    @property
    def were_set(self) -> bool:
        """Whether an age on the device was set and tables have not been sorted by their ages since."""
        return self._unsure

    def alike(self, first: str, second: str) -> bool:
        """Whether two tables are of one age, and are counted together where graphs count."""
        known = self._ages if self._held is None else self._family
        return known[first] == known[second]

    def age(self, name: str) -> int | Tensor:
        """Return a table's number, or where it lies on the device, 0-dim."""
        return self._ages[name] if self._held is None else self._held[self._place[name]]

    def bind(self, tables: Sequence[str]) -> None:
        """Note that a launch moves tables by the age of the first; one that is recorded does so for good."""
        if self._held is not None and len(tables) > 1 and is_capturing(self._held.device):
            self._bound.add(tuple(tables))

    def check(self) -> None:
        """Refuse tables whose ages have parted though a recorded launch moves them by one.

        Raises:
            ConfigError: names the tables and their ages.
        """
        if not self._bound or self._held is None or is_capturing(self._held.device):
            return
        parted = [tables for tables in self._bound if len({self._family[name] for name in tables}) > 1]
        if not parted and not self._unsure:
            return
        now = dict(zip(self._ages, self._held.tolist(), strict=True))
        for tables in self._bound:
            if len({now[name] for name in tables}) > 1:
                self._bound.clear()
                raise ConfigError(
                    "a recorded CUDA graph moves tables by one count of steps, and their counts differ",
                    value=", ".join(f"{name} {now[name]}" for name in tables),
                    fix="record the graph again after replacing tables or stepping some of them alone",
                )
