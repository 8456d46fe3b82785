"""The running mean of all weights, with which a model evaluates, predicts and is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import CachedStorage, RowMean, Storage
from viviane.embedding.module_parts import collections_of, dense_buffers, dense_parameters
from viviane.embedding.row_mean import NUMBERS
from viviane.training.checkpoint.saved_table import MEAN, Progress
from viviane.training.checkpoint.table_files import table_files

_PREFIX = "mean/"
_WARM_UP_STEPS = 10


class WeightMean:
    """Exponential mean of weights: a_t = d_t a_{t-1} + (1 - d_t) w_t, d_t = min(decay, t / (t + 10)).

    Small d_t at the beginning let the mean leave the initial values quickly. Dense parameters and floating-point
    buffers follow every step; rows of tables follow when they move (see `RowMean`), so that a step costs no pass
    over the tables. It takes the memory of one more copy of the weights.

    Source: Polyak and Juditsky 1992; the exponential form as in Tarvainen and Valpola 2017.

    Args:
        module: whose weights to follow, from their present values on.
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
        self.num_steps = 0
        self._step_decay = 0.0
        self._held: Tensor | None = None
        floating = {name: b for name, b in dense_buffers(module).items() if b.is_floating_point()}
        self._dense: dict[str, Tensor] = {**dense_parameters(module), **floating}
        self._means = {name: tensor.detach().clone() for name, tensor in self._dense.items()}
        self._storages: list[Storage] = []
        self._of_rows: list[RowMean] = []
        self._module = module
        for collection in collections_of(module).values():
            for storage in collection.all_storages():
                if not isinstance(storage, Storage):
                    raise ConfigError(
                        "a running mean needs rows that stay: those of dynamic tables come and go",
                        where=f"table {next(iter(storage.tables))!r}",
                        fix="give the table a TableConfig (num_ids in the schema), or leave out ema_decay",
                    )
                if isinstance(storage, CachedStorage):
                    raise ConfigError(
                        "a running mean needs tables that are whole in memory",
                        where=f"tables {', '.join(storage.tables)}",
                        fix="leave out embedding_memory or ema_decay",
                    )
                if storage.weight.dtype != torch.float32:
                    raise ConfigError(
                        "a running mean needs rows of float32: steps of a mean are too small for 16 bits",
                        where=f"tables {', '.join(storage.tables)}",
                        value=storage.tables[next(iter(storage.tables))].dtype,
                        fix="set the tables' dtype to 'float32', or leave out ema_decay",
                    )
                self._of_rows.append(RowMean(storage.weight))
                self._storages.append(storage)
        self.attach(decay)

    def attach(self, decay: float) -> WeightMean:
        """Let the tables' steps keep the means of rows; again where another trainer has taken the module over."""
        self.decay = decay
        for storage, mean in zip(self._storages, self._of_rows, strict=True):
            storage.row_mean = mean
        return self

    def advance(self) -> None:
        """Begin a step, before weights move."""
        self.num_steps += 1
        self._step_decay = min(self.decay, self.num_steps / (self.num_steps + _WARM_UP_STEPS))
        for _, mean in self._row_means():
            mean.advance(self._step_decay)

    @torch.no_grad()
    def follow(self, gate: Tensor | None = None) -> None:
        """End a step, after weights moved.

        Args:
            gate: of a recorded step, which reads the numbers that `hold` was given; where it is 0 nothing is followed.
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

    # Recorded steps -----------------------------------------------------------------------------------------

    @property
    def numbers(self) -> list[float]:
        """What the present step computes with: the share of new weights, then the numbers of each mean of rows."""
        return [1 - self._step_decay, *(number for _, mean in self._row_means() for number in mean.numbers)]

    def hold(self, numbers: Tensor) -> None:
        """Say where on the device recorded steps find `numbers`, float64."""
        self._held = numbers
        for (_, mean), own in zip(self._row_means(), numbers[1:].view(-1, NUMBERS), strict=True):
            mean.held = own

    @property
    def place(self) -> tuple[float, ...]:
        """Where its steps stand; see `go_back`."""
        return self.num_steps, *(mean.place for _, mean in self._row_means())

    def go_back(self, place: Sequence[float]) -> None:
        """Take steps back that moved nothing.

        Args:
            place: what `place` was before them.
        """
        self.num_steps = int(place[0])
        for (_, mean), own in zip(self._row_means(), place[1:], strict=True):
            mean.go_back(own)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the means are in memory."""
        return tuple(one.data_ptr() for one in (*self._means.values(), *(mean.mean for _, mean in self._row_means())))

    def _row_means(self) -> list[tuple[Storage, RowMean]]:
        return [(storage, storage.row_mean) for storage in self._storages if storage.row_mean is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Return the means of dense weights as named tensors; a checkpoint finds those of rows beside the rows."""
        return {_PREFIX + name: tensor for name, tensor in self._means.items()}

    @torch.no_grad()
    def restore(self, place: Progress, num_steps: int) -> None:
        """Take over the means of a checkpoint that was loaded.

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
                    fix="go on without ema_decay, or begin anew with load_checkpoint(..., weights_only=True)",
                )  # fmt: skip
            for part in table.parts:
                own = part.mean
                if own is not None:
                    saved.copy_to(MEAN, own, part.keys, part.start, part.stop)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the module hold the means for the length of a block; memory is exchanged, nothing is copied."""
        for storage, mean in self._row_means():
            storage.settle()  # a checkpoint in work reads the rows as they are
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
