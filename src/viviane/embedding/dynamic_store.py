"""The keys and rows of a dynamic table: rows for whatever keys come, added, changed, evicted, erased.

Shapes: N keys of a call, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, DataError
from viviane.core.seeds import derive_seed
from viviane.embedding.dynamic_admission import make_admission
from viviane.embedding.dynamic_changes import DynamicChanges
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_rows import DynamicRows
from viviane.embedding.initializers import table_seed
from viviane.embedding.keys import check_memory
from viviane.embedding.table_lock import TableLock, serialized
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.hash_table import Order, TableFullError, check_keys, distinct, make_index, make_marks, stamp_of
from viviane.ops.row_update import Entries, Scratch, sum_rows

_ORDERS: dict[str, Order] = {
    "lru": "stamp", "epoch_lru": "stamp", "lfu": "uses", "epoch_lfu": "epoch_uses", "custom": "uses"
}  # fmt: skip


class DynamicStore(nn.Module):
    """Vectors by key: an index of keys, and the rows and optimizer state that belong to them.

    Args:
        table: its settings.
        rule: optimizer whose state is kept beside the rows, or None.
        seed: of initial values and admission.
        device: of keys, rows and lookups.
        folder: of the files of rows, with memory="file"; None: that of temporary files.
    """

    def __init__(
        self,
        table: DynamicTableConfig,
        rule: AnyOptimizer | None,
        seed: int,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.lock = TableLock()
        self.device = torch.device(device)
        self.table = table
        self.rule = rule
        self._values = DynamicRows(table, self.rule, table_seed(seed, table.name), self.device, folder)
        self.index = make_index(
            self._values.max_rows,
            order=_ORDERS[table.eviction] if table.when_full == "evict" else "none",
            with_uses=table.eviction in ("lfu", "epoch_lfu", "custom"),
            initial_rows=table.initial_capacity,
            device=self.device,
        )
        self.admission = make_admission(table.admission, derive_seed(seed, "admission", table.name), self.device)
        self.clock = 0
        """Training lookups and insertions so far."""
        self.epoch = 0
        """Set by `next_epoch`."""
        self.num_steps = 0
        """Updates so far."""
        self.changes = DynamicChanges(self.device)
        """Rows that have changed since an increment asks for them."""
        self._held: int | None = None
        self._scratch = Scratch()
        self._marks = make_marks(self.device)

    # Size ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.index)

    @property
    def capacity(self) -> int:
        """Rows at present; grows by doubling up to max_capacity, and no row moves."""
        return self._values.capacity

    @property
    def load_factor(self) -> float:
        """Keys divided by slots of the index."""
        return len(self.index) / self.index.num_slots

    @property
    def weight(self) -> Tensor:
        """(capacity, D): the rows, for `viviane.ops.row_update.update_rows`; a new view after growth."""
        return self._values.weight

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state by name, each (capacity, D) or (capacity,)."""
        return self._values.state

    @property
    def storage(self) -> Tensor:
        """What `rows` counts in, for `viviane.ops.embedding_bag`: `weight`, then default vectors, (more than M, D)."""
        return self._values.storage

    @property
    def null_row(self) -> int:
        """The row of zeros that padding reads; the next one is that of absent keys."""
        return self._values.null_row

    @property
    def initial_seed(self) -> int:
        """Seed of the values that keys begin with, as `viviane.ops.hash_table.initial_rows` takes it."""
        return self._values.seed

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows and optimizer state in use, without the index."""
        return self._values.memory_bytes(self.index.num_rows)

    # Lookup -------------------------------------------------------------------------------------------------

    @serialized
    def rows(self, keys: Tensor, training: bool = True, scores: Tensor | None = None) -> Tensor:
        """Return the row of each key in `storage`, (N,), int64.

        In training, keys that are admitted get rows, and all rows given out stay with their keys until `release` or
        `step`: gradients that wait for an update find the rows they belong to. Keys without a row read the default
        vector, a row beyond `weight`, which updates leave alone; it holds until the next call.

        Args:
            keys: (N,), int32 or int64.
            training: whether this is a use that counts.
            scores: (N,), int64, for eviction="custom"; of a key's entries the last one counts.

        Raises:
            TableFullError: no row is left for a new key.
        """
        if training:
            return self._training_rows(keys, scores, narrow=False)
        return self._fill_absent(self.index.find(keys, self.null_row + 1 if self.table.absent == "zero" else -1), keys)

    def _training_rows(self, keys: Tensor, scores: Tensor | None, *, narrow: bool) -> Tensor:
        """Do `rows` in training; `narrow` allows int32."""
        self.lock.claim(self._where)
        self._check_scores(keys, scores)
        stamp = self._tick()
        held = stamp if self._held is None else self._held
        found = self._insert(keys, stamp, held, scores, admission=True, narrow=narrow)
        self._held = held
        if self.admission is None and self.table.padding_id is None:
            return found  # every key has a row
        return self._fill_absent(found, keys)

    def read_ahead(self, rows: Tensor, training: bool) -> None:
        """Bring rows that will be looked up, and updated in training, from a file into memory at once."""
        self._values.read_ahead(rows, training)

    @serialized
    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys' vectors, (N, D), default vectors where absent, and which are there, (N,)."""
        if self.index.fused and self.table.absent == "zero":
            return self.index.gather(keys, self.weight)
        found = self.index.find(keys)
        there = found >= 0
        return vectors_of(self, self._fill_absent(found, keys)), there

    @serialized
    def release(self) -> None:
        """Let the rows of past lookups be evicted again: nothing waits for an update of them any more."""
        self.lock.claim(self._where)
        self._held = None
        self.lock.free()

    # Content ------------------------------------------------------------------------------------------------

    @serialized
    def find_or_insert(self, keys: Tensor, scores: Tensor | None = None) -> Tensor:
        """Return the row of each key, (N,), int64; absent keys are added with their initial values, admission aside.

        Raises:
            TableFullError: no row is left; with when_full="raise" nothing is changed then.
            DataError: a key is the padding.
        """
        return self._find_or_insert(keys, scores, draw=True)

    def _find_or_insert(self, keys: Tensor, scores: Tensor | None, draw: bool) -> Tensor:
        self._check_scores(keys, scores)
        if self.table.padding_id is not None and bool(self._is_padding(keys).any()):
            raise DataError("padding is never stored", where=self._where, value=self.table.padding_id)
        stamp = self._tick()
        guard = stamp if self._held is None else self._held
        return self._insert(keys, stamp, guard, scores, admission=False, draw=draw)

    @serialized
    def insert_or_assign(self, keys: Tensor, values: Tensor, scores: Tensor | None = None) -> None:
        """Give keys values, (N, D); absent ones are added. Of the entries of one key the last one counts.

        Optimizer state of keys that are there stays; see `find_or_insert` for errors.
        """
        self._check_values(keys, values)
        rows = self._find_or_insert(keys, scores, draw=False)
        if self.index.fused and scores is None:
            self.index.write_last(self.weight, rows, values.contiguous())
        else:
            self._marks.assign(self.weight, rows, values.contiguous())

    @serialized
    def assign(self, keys: Tensor, values: Tensor) -> Tensor:
        """Give keys that are there values, (N, D), and return which are, (N,), bool; the last entry of a key counts."""
        self._check_values(keys, values)
        rows = self.index.find(keys)
        self.changes.mark(rows, self.capacity)
        self._marks.assign(self.weight, rows, values.contiguous())
        return rows >= 0

    @serialized
    def accumulate(self, keys: Tensor, deltas: Tensor) -> Tensor:
        """Add to the values of keys that are there, (N, D), and return which are, (N,), bool.

        Deltas of one key are summed in float32 first, in order; the sum is rounded to the rows' type once.
        """
        self._check_values(keys, deltas)
        rows = self.index.find(keys)
        self.changes.mark(rows, self.capacity)
        there = rows >= 0
        flat = deltas.to(torch.float32).contiguous().view(-1)
        own, sums = sum_rows(Entries(rows, flat), self.table.dim, num_rows=self.capacity, scratch=self._scratch)
        self.weight[own] = (self.weight[own].to(torch.float32) + sums).to(self.table.torch_dtype)
        return there

    @serialized
    def erase(self, keys: Tensor) -> int:
        """Take keys out, and return how many there were; their rows go to new keys. Absent keys are passed over."""
        self.check_released("erase")
        return self.index.erase(keys)

    @serialized
    def clear(self) -> None:
        """Take all keys out, and forget what waits for admission."""
        self.check_released("clear")
        self.index.clear()
        self._values.reset()
        self._scratch, self._marks = Scratch(), make_marks(self.device)
        if self.admission is not None:
            self.admission.clear()

    @serialized
    def next_epoch(self) -> None:
        """Begin a new epoch: for "epoch_lru" and "epoch_lfu" keys of earlier ones go first."""
        if not self.table.eviction.startswith("epoch"):
            raise ConfigError(
                "the eviction policy of this table has no epochs", where=f"table {self.table.name!r}",
                value=self.table.eviction, allowed="epoch_lru, epoch_lfu",
            )  # fmt: skip
        self.epoch += 1

    def _tick(self) -> int:
        self.clock += 1
        return stamp_of(self.epoch, self.clock)

    def _insert(
        self, keys: Tensor, stamp: int, guard: int, scores: Tensor | None, *, admission: bool, draw: bool = True,
        narrow: bool = False,
    ) -> Tensor:  # fmt: skip
        self._values.make_room(self.index.most_rows, len(keys))
        admits_all = not admission or self.admission is None
        if scores is None and admits_all and self.index.fused:
            return self._insert_fused(keys, stamp, guard, draw, narrow)
        rows = self.index.touch(keys, stamp, scores)
        entries = (rows < 0).nonzero().squeeze(1)
        if self.table.padding_id is not None:
            entries = entries[~self._is_padding(keys[entries])]
        if not admits_all and self.admission is not None and len(entries):
            entries = entries[self.admission.admit(keys[entries], self.clock)]
        if not len(entries):
            return rows
        free_rows = self.index.max_rows - len(self.index)
        if self.table.when_full == "raise" and len(entries) > free_rows and len(distinct(keys[entries])[0]) > free_rows:
            raise self._full()
        added = self.index.insert(keys, rows, entries, stamp, guard=guard, scores=scores)
        self._values.grow(self.index.most_rows)
        self._values.begin(added.rows, keys[added.entries])
        if not added.complete and len(self.index) < self.index.max_rows:
            raise TableFullError(
                "the keys fall on too few segments of the hash table",
                where=self._where,
                fix="use ids that were not chosen by their hash",
            )
        if not added.complete:
            raise self._full()
        return rows

    def _insert_fused(self, keys: Tensor, stamp: int, guard: int, draw: bool, narrow: bool) -> Tensor:
        """Do the same in one go, without waiting for the device where there is room for certain."""
        allowed = None if self.table.padding_id is None else ~self._is_padding(keys)
        rows, added = self.index.find_or_insert(
            keys,
            stamp,
            guard=guard,
            allowed=allowed,
            partial=self.table.when_full == "evict",
            narrow=narrow,
            last=not draw,
        )
        if added.given != 0:
            self._values.grow(self.index.most_rows)
            self._values.begin_added(keys, added, draw)
        if added.wanted != added.given:
            raise self._full()
        return rows

    @serialized
    def reset_state(self, rows: Tensor) -> None:
        """Put the optimizer state of rows back to its beginning."""
        self._check_rows(rows)
        self.changes.mark(rows, self.capacity)
        self._values.begin_state(rows)

    def _fill_absent(self, rows: Tensor, keys: Tensor) -> Tensor:
        if self.table.padding_id is not None:
            rows[self._is_padding(keys)] = self.null_row
        self._values.fill_absent(rows, keys)
        return rows

    def _is_padding(self, keys: Tensor) -> Tensor:
        assert self.table.padding_id is not None
        return torch.eq(keys.to(torch.int64), self.table.padding_id)

    def copied(self, part: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of some rows of `weight` or of a state; in a file again, with memory="file"."""
        self._check_rows(rows)
        return self._values.copied(part, rows)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the vectors of rows, (N, D), as `rows` gives them.

        Raises:
            DataError: a row that the table does not have.
        """
        self._check_rows(rows)
        return vectors_of(self, rows)

    @serialized
    def replace(self, saved: Mapping[str, Tensor]) -> None:
        """Replace everything by what a state_dict holds, names without prefix, checked by `misfits`.

        Where optimizer state or what waits for admission is left out, they start over.
        """
        self.clear()
        self.changes.stop()
        rows = saved["rows"].to(self.device)
        self.index.restore(saved["keys"], rows, saved["stamps"], saved.get("uses"), saved["free"])
        self._values.grow(self.index.num_rows)
        self.weight[rows] = saved["weight"].to(self.weight)
        self.reset_state(rows)
        for name, part in self.state.items():
            if f"state.{name}" in saved:
                part[rows] = saved[f"state.{name}"].to(self.device)
        start = "admission."
        waiting = {name.removeprefix(start): part for name, part in saved.items() if name.startswith(start)}
        if self.admission is not None and waiting:
            self.admission.load(waiting)
        self.clock, self.epoch, self.num_steps = saved["counters"].tolist()

    # Checks -------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"table {self.table.name!r}"

    def check_released(self, what: str) -> None:
        """Refuse to change rows that gradients wait for."""
        if self._held is not None:
            raise ConfigError(
                f"cannot {what} the table while looked-up rows wait for an update", where=self._where,
                fix="call step() or release() first",
            )  # fmt: skip

    def _check_scores(self, keys: Tensor, scores: Tensor | None) -> None:
        check_keys(keys, self.device)
        custom = self.table.eviction == "custom"
        if custom != (scores is not None):
            raise DataError(
                "eviction='custom' needs a score for each key" if custom else "scores are for eviction='custom'",
                where=self._where,
            )
        if scores is None:
            return
        if not isinstance(scores, Tensor):
            raise DataError("scores are no tensor", where=self._where, value=type(scores).__name__)
        check_memory(scores, f"{self._where}, scores")
        whole = scores.dtype in (torch.int32, torch.int64)
        if not whole or scores.shape != keys.shape or scores.device.type != self.device.type:
            raise DataError(
                "each key needs a score, a whole number beside the table", where=self._where,
                value=f"{tuple(scores.shape)} of {scores.dtype} on {scores.device}",
                allowed=f"{tuple(keys.shape)} of int64 on {self.device}",
            )  # fmt: skip

    def _check_values(self, keys: Tensor, values: Tensor) -> None:
        check_keys(keys, self.device)
        if not isinstance(values, Tensor):
            raise DataError("vectors are no tensor", where=self._where, value=type(values).__name__)
        check_memory(values, f"{self._where}, vectors")
        if values.is_quantized or values.is_complex() or values.device.type != self.device.type:
            raise DataError(
                "vectors must be real numbers beside the table", where=self._where,
                value=f"{values.dtype} on {values.device}", allowed=f"float32 on {self.device}",
            )  # fmt: skip
        if values.shape != (len(keys), self.table.dim):
            raise DataError(
                "each key needs a vector", where=self._where, value=tuple(values.shape),
                allowed=str((len(keys), self.table.dim)),
            )  # fmt: skip

    def _check_rows(self, rows: Tensor) -> None:
        check_keys(rows, self.device)
        count = len(self.storage)
        if len(rows) and not 0 <= (ends := torch.aminmax(rows)).min <= ends.max < count:
            raise DataError(
                "a row that the table does not have", where=self._where, value=f"{int(ends.min)} to {int(ends.max)}",
                allowed=f"0 <= row < {count}", fix="take those that `rows` gave since the table last changed",
            )  # fmt: skip

    def _full(self) -> TableFullError:
        return TableFullError(
            "the table is full", where=self._where, value=f"{len(self.index)} keys",
            allowed=f"max_capacity {self.index.max_rows}",
            fix="raise max_capacity, or set when_full='evict'" if self.table.when_full == "raise"
            else "raise max_capacity, or use smaller batches: keys of batches that wait for an update cannot go",
        )  # fmt: skip


def vectors_of(store: DynamicStore, rows: Tensor) -> Tensor:
    """Return the vectors of rows that a lookup found, (N, D); they are not checked again."""
    out = torch.empty(len(rows), store.table.dim, dtype=store.table.torch_dtype, device=store.device)
    gather_rows(store.storage, rows.unsqueeze(1), out, [0])
    return out
