"""A dynamic embedding table: a model trains straight from raw ids.

Shapes: N keys of a call, K keys in the table, D numbers a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.core.seeds import derive_seed
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_content import DynamicContent, export_keys, import_keys, load_entries, state_entries
from viviane.embedding.dynamic_store import DynamicStore, vectors_of
from viviane.embedding.keys import check_key_type
from viviane.embedding.table_lock import serialized
from viviane.ops.row_update import Entries, prepare_rows, sum_rows, update_rows


class DynamicTable(DynamicStore):
    """An embedding table keyed by any int64.

    Called with keys it gives their vectors, and in training mode adds the keys it does not know. Backward keeps the
    gradients; `step` applies the optimizer's rule to the rows of the batch. `rows`, `weight` and `state` serve those
    who look up and update by themselves.

    Any thread may call it: calls are made one after another. One thread trains it at a time: from a lookup in training
    until `step` or `release`, lookups in training, `step` and `release` of another thread raise ConfigError.

    Args:
        table: its settings.
        optimizer: the rule, where the settings have none; None: the table cannot `step`.
        seed: of initial values, admission and stochastic rounding.
        device: of keys, rows and lookups; the table stays there. The same calls give the same rows, keys and counts on
            the CPU and on a GPU; values agree as those of `update_rows` and `initial_rows` do.
        folder: of the files of rows, with memory="file"; None: that of temporary files.

    Example:
        >>> from viviane.config import SGD
        >>> settings = DynamicTableConfig(name="user", dim=2, init={"type": "constant", "value": 1.0})
        >>> table = DynamicTable(settings, SGD())
        >>> out = table(torch.tensor([10**15, -7, 10**15])); out.shape, len(table)
        (torch.Size([3, 2]), 2)
        >>> out.sum().backward(); table.step(lr=0.25)
        >>> table.find(torch.tensor([10**15, -7, 8]))
        (tensor([[0.5000, 0.5000], [0.7500, 0.7500], [0.0000, 0.0000]]), tensor([ True,  True, False]))
    """

    def __init__(
        self,
        table: DynamicTableConfig,
        optimizer: AnyOptimizer | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        rule = (table.optimizer or optimizer) if table.trainable else None
        if getattr(rule, "update", "local") == "global":
            raise ConfigError(
                "update='global' would move rows that have no key", where=f"table {table.name!r}",
                allowed="'local', 'lazy_global'",
            )  # fmt: skip
        super().__init__(table, rule, seed, device, folder)
        self._seed, self._folder = seed, folder
        self._rounding = derive_seed(seed, "rounding", table.name) % 2**32
        self._pending: list[tuple[Tensor, Tensor]] = []

    @serialized
    def forward(self, keys: Tensor, scores: Tensor | None = None) -> Tensor:
        """Return the vectors of keys of any shape: (..., D).

        Raises:
            DataError: keys or scores are no whole numbers in a tensor.
        """
        check_key_type(keys, self.table.name)
        if scores is not None:
            check_key_type(scores, f"{self.table.name}, scores")
        training = self.training and torch.is_grad_enabled() and self.rule is not None
        shape, flat_keys = (*keys.shape, self.table.dim), keys.reshape(-1)
        if not training:
            return self.find(flat_keys)[0].view(shape)
        # Narrow rows are half to read and to sort; those of absent keys' own initial values lie too far out.
        narrow = self.table.absent == "zero"
        found = self._training_rows(flat_keys, None if scores is None else scores.reshape(-1), narrow=narrow)
        if not self._pending:
            prepare_rows(found, self._scratch)
        anchor = torch.empty(0, requires_grad=True)
        flat: Tensor = _Lookup.apply(anchor, self, found)  # type: ignore[no-untyped-call]
        return flat.view(shape)

    # Update -------------------------------------------------------------------------------------------------

    @serialized
    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor = 1.0) -> None:
        """Sum the waiting gradients by key, move rows and state by the optimizer's rule, and release the rows.

        Args:
            lr: learning rate, unless the rule has its own.
            scale: what gradients are multiplied by first.
        """
        self._need_rule()
        self.lock.claim(self._where)
        if self._pending:
            rows, gradients = self._pending[0]
            if len(self._pending) > 1:
                rows = torch.cat([rows for rows, _ in self._pending])
                gradients = torch.cat([gradient for _, gradient in self._pending])
            self.update(Entries(rows, gradients), lr, scale=scale)
        self.release()

    @serialized
    @torch.no_grad()
    def update(
        self,
        entries: Entries,
        lr: float | Tensor,
        *,
        factor: float | Tensor = 1.0,
        scale: float | Tensor = 1.0,
    ) -> None:
        """Sum the gradients of equal rows, and move rows and state by the optimizer's rule.

        Args:
            entries: rows as `rows` gave them since the last release, and their gradients; rows of absent keys and of
                padding are passed over.
            lr: learning rate, unless the rule has its own.
            factor: what a rate of the rule's own is multiplied by.
            scale: what gradients are multiplied by first.
        """
        rule = self._need_rule()
        self.lock.claim(self._where)
        self.num_steps += 1
        self.changes.mark(entries.rows, self.capacity)
        update_rows(
            self.weight, self.state, entries, rule, lr=lr if rule.lr is None else rule.lr * factor,
            step=self.num_steps, scale=scale, seed=self._rounding, scratch=self._scratch,
        )  # fmt: skip

    @serialized
    def prepare(self, rows: Tensor) -> None:
        """Begin the part of an update that needs no gradients, for rows that will be trained."""
        prepare_rows(rows, self._scratch)

    @serialized
    def summed(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Sum gradients by row: the distinct rows that keys own, (U,), rising, and the sums, (U, D)."""
        return sum_rows(entries, self.table.dim, num_rows=self.capacity, scratch=self._scratch)

    def _need_rule(self) -> AnyOptimizer:
        if self.rule is None:
            raise ConfigError("the table has no optimizer", where=self._where, fix="give it one")
        return self.rule

    @serialized
    def release(self) -> None:
        """Drop gradients that wait, and let the rows of past lookups be evicted again."""
        super().release()
        self._pending.clear()

    @serialized
    def keep_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Keep the gradient of looked-up rows, (N,) and (N * D,), until the next step."""
        self._pending.append((rows, gradient))

    # Content ------------------------------------------------------------------------------------------------

    @serialized
    def export(self, *, since: int | None = None, min_score: int | None = None) -> DynamicContent:
        """Copy out keys and all that belongs to them, in order of their rows.

        Args:
            since: only keys used after the `clock` had this value: what changed since an earlier export.
            min_score: only keys with this score or a larger one.
        """
        return export_keys(self, since, min_score)

    @serialized
    def keys_by_row(self) -> tuple[Tensor, Tensor]:
        """Return the key of each row, (R,), int64, and which rows are in use, (R,), bool; copies.

        A row keeps its key until the key is evicted or erased, so two results show which keys were evicted in between.
        """
        in_use = torch.zeros(self.index.num_rows, dtype=torch.bool, device=self.device)
        in_use[self.index.rows_in_use()] = True
        return self.index.keys[: self.index.num_rows].clone(), in_use

    @serialized
    def import_(self, content: DynamicContent) -> None:
        """Add keys, or replace what belongs to them; other keys stay.

        Their time of use is now; numbers of uses and your scores are taken over. Without state in `content` the
        optimizer starts over for these keys.

        Raises:
            CheckpointError: width or state do not fit; nothing is changed then.
        """
        self.check_released("import into")
        import_keys(self, content)

    @serialized
    def follow_changes(self) -> None:
        """Note from now on which keys are used, added or changed, and forget what changed before.

        What is written to `weight` or `state` by others is not noticed.
        """
        self.changes.follow(self.clock, self._held)

    @serialized
    def changed_rows(self) -> Tensor | None:
        """Return the rows with keys that have changed since `follow_changes`, rising, (U,); None: all may have."""
        return self.changes.rows(self.index)

    # Saving -------------------------------------------------------------------------------------------------

    @serialized
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update(state_entries(self, prefix))

    @serialized
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = load_entries(self, prefix, state_dict, missing_keys, error_msgs)
        unexpected_keys.extend(name for name in state_dict if name.startswith(prefix) and name not in known)

    @serialized
    def __reduce__(self) -> Any:
        """Copy and pickle the content: rows lie among reserved addresses, or in a file of this table's own.

        Raises:
            ConfigError: looked-up rows wait for a step.
        """
        self.check_released("copy")
        settings = (self.table, self.rule, self._seed, self.device, self._folder)
        return _with_content, (settings, self.training, self.state_dict())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        probe = fn(torch.zeros(1, device=self.device))
        if probe.dtype != torch.float32 or probe.device.type != self.device.type:
            raise ConfigError(
                "a dynamic table keeps its type and its device", where=self._where,
                allowed="DynamicTableConfig(dtype='float32'), 'float16' or 'bfloat16', and DynamicTable(device=...)",
                fix="build it so, and carry its content over with load_state_dict or import_",
            )  # fmt: skip
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _with_content(settings: tuple[Any, ...], training: bool, content: dict[str, Tensor]) -> DynamicTable:
    table, rule, seed, device, folder = settings
    made = DynamicTable(table, rule, seed=seed, device=device, folder=folder)
    made.load_state_dict(content)
    return made.train(training)


class _Lookup(torch.autograd.Function):
    """The lookup as autograd sees it: backward hands gradients to the table and returns none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, table: DynamicTable, rows: Tensor) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return vectors_of(table, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.table.keep_gradient(ctx.rows, gradients[0].contiguous().view(-1))
        return None, None, None
