"""The running mean of all weights, used to evaluate, predict and save a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import DynamicTableConfig, RowMean, TableStorage
from viviane.embedding.module_parts import collections_of, dense_buffers, dense_parameters
from viviane.embedding.row_mean import NUMBERS
from viviane.parallel import Group
from viviane.training.checkpoint.saved_table import MEAN, Progress
from viviane.training.checkpoint.table_files import table_files

_PREFIX = "mean/"
_WARM_UP_STEPS = 10


def check_running_mean(module: nn.Module, group: Group | None = None) -> None:
    """Refuse tables whose rows have no running mean, on all processes alike, whichever of them has the table.

    Raises:
        ConfigError: a table is dynamic, has 16-bit rows, or lies in tiers.
    """
    collections = collections_of(module).values()
    for name, table in ((name, table) for one in collections for name, table in one.tables.items()):
        if isinstance(table, DynamicTableConfig):
            raise ConfigError(
                "a running mean needs permanent rows: dynamic tables add and evict rows", where=f"table {name!r}",
                fix="give the table a TableConfig (num_ids in the schema), or remove ema_decay",
            )  # fmt: skip
        if table.torch_dtype != torch.float32:
            raise ConfigError(
                "a running mean needs float32 rows: changes of a mean are too small for 16 bits",
                where=f"table {name!r}", value=table.dtype,
                fix="set the table's dtype to 'float32', or remove ema_decay",
            )  # fmt: skip
    in_tiers = [name for one in collections for storage in one.all_storages() if storage.in_tiers
                for name in storage.tables]  # fmt: skip
    every = [in_tiers] if group is None else group.gather_data(in_tiers)
    if found := sorted({name for names in every for name in names}):
        raise ConfigError(
            "a running mean needs tables that are completely in memory", where=f"tables {', '.join(found)}",
            fix="remove embedding_memory or ema_decay",
        )  # fmt: skip


class WeightMean:
    """Exponential mean of weights: a_t = d_t a_{t-1} + (1 - d_t) w_t, d_t = min(decay, t / (t + 10)).

    Small d_t at the beginning let the mean leave the initial values quickly. Dense parameters and floating-point
    buffers are averaged in every step; rows of tables only when they are updated (see `RowMean`), so that a step needs
    no pass over the tables. The mean takes the memory of one more copy of the weights.

    Source: Polyak and Juditsky 1992; the exponential form as in Tarvainen and Valpola 2017.

    Args:
        module: its weights are averaged, starting from their current values.
        decay: 0 < decay < 1; about 1 / (1 - decay) steps are averaged.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> mean = WeightMean(layer, 0.99)
        >>> mean.advance()
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(3.0)
        >>> mean.follow()
        >>> with mean.in_place():
        ...     held = layer.weight.item()
        >>> held != 3.0, layer.weight.item()
        (True, 3.0)
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        check_running_mean(module)
        self.num_steps = 0
        self._step_decay = 0.0
        self._held: Tensor | None = None
        floating = {name: b for name, b in dense_buffers(module).items() if b.is_floating_point()}
        self._dense: dict[str, Tensor] = {**dense_parameters(module), **floating}
        self._means = {name: tensor.detach().clone() for name, tensor in self._dense.items()}
        self._storages: list[TableStorage] = []
        self._of_rows: list[RowMean] = []
        self._module = module
        for collection in collections_of(module).values():
            for storage in collection.all_storages():
                self._of_rows.append(RowMean(storage.weight))
                self._storages.append(storage)
        self.attach(decay)

    def attach(self, decay: float) -> WeightMean:
        """Attach the means of rows to the tables' updates; called again if another trainer had replaced them."""
        self.decay = decay
        for storage, mean in zip(self._storages, self._of_rows, strict=True):
            storage.row_mean = mean
        return self

    def advance(self) -> None:
        """Begin a step, before weights are updated."""
        self.num_steps += 1
        self._step_decay = min(self.decay, self.num_steps / (self.num_steps + _WARM_UP_STEPS))
        for _, mean in self._row_means():
            mean.advance(self._step_decay)

    @torch.no_grad()
    def follow(self, gate: Tensor | None = None) -> None:
        """End a step, after weights were updated.

        Args:
            gate: gate of a captured step, which reads the tensor given to `hold`; if it is 0, no mean is updated.
        """
        means, weights = list(self._means.values()), [one.detach() for one in self._dense.values()]
        if gate is None:
            if means:
                torch._foreach_lerp_(means, weights, 1 - self._step_decay)
            return
        assert self._held is not None
        share = (self._held[0] * gate).to(torch.float32)
        for mean, weight in zip(means, weights, strict=True):
            mean.lerp_(weight, share)

    # Captured steps -----------------------------------------------------------------------------------------

    @property
    def numbers(self) -> list[float]:
        """Values of the current step: the share of new weights, then the values of each mean of rows."""
        return [1 - self._step_decay, *(number for _, mean in self._row_means() for number in mean.numbers)]

    def hold(self, numbers: Tensor) -> None:
        """Set the device tensor from which captured steps read `numbers`, float64."""
        self._held = numbers
        for (_, mean), own in zip(self._row_means(), numbers[1:].view(-1, NUMBERS), strict=True):
            mean.held = own

    @property
    def place(self) -> tuple[float, ...]:
        """Its step counts; see `roll_back_to`."""
        return self.num_steps, *(mean.place for _, mean in self._row_means())

    def roll_back_to(self, place: Sequence[float]) -> None:
        """Roll back steps that updated nothing.

        Args:
            place: the value of `place` before these steps.
        """
        self.num_steps = int(place[0])
        for (_, mean), own in zip(self._row_means(), place[1:], strict=True):
            mean.roll_back_to(own)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Memory addresses of the means."""
        return tuple(one.data_ptr() for one in (*self._means.values(), *(mean.mean for _, mean in self._row_means())))

    def _row_means(self) -> list[tuple[TableStorage, RowMean]]:
        return [(storage, storage.row_mean) for storage in self._storages if storage.row_mean is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the means of dense weights as named tensors; a checkpoint stores the means of rows with the rows."""
        return {_PREFIX + name: tensor for name, tensor in self._means.items()}

    @torch.no_grad()
    def restore(self, place: Progress, num_steps: int) -> None:
        """Restore the means from a loaded checkpoint.

        Raises:
            CheckpointError: a table of the checkpoint has no mean.
        """
        self.num_steps = num_steps
        for name, mean in self._means.items():
            mean.copy_(place.tensors[_PREFIX + name])
        for table in table_files(self._module):
            saved = place.tables[table.full]
            if not saved.entry.has_mean:
                raise CheckpointError(
                    "the checkpoint has no running mean of a table's rows",
                    where=f"{saved.folder}, table {table.name!r}",
                    fix="remove ema_decay, or restart with load_checkpoint(..., weights_only=True)",
                )  # fmt: skip
            for part in table.parts:
                own = part.mean
                if own is not None:
                    saved.copy_to(MEAN, own, part.keys, part.start, part.stop)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the means into the module for a block; memory is swapped, not copied."""
        for storage, mean in self._row_means():
            storage.settle()  # an active checkpoint reads the current rows
            with torch.no_grad():
                mean.catch_up(storage.weight)
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, tensor in self._dense.items():
            tensor.data, self._means[name] = self._means[name], tensor.data
        for storage, mean in self._row_means():
            storage.weight, mean.mean = mean.mean, storage.weight
