"""The running mean of all weights, with which a model evaluates, predicts and is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from viviane.core.errors import ConfigError
from viviane.embedding import DynamicStorage, RowMean, Storage
from viviane.training.dense_state import collections_of, dense_buffers, dense_parameters

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
        self.decay = decay
        self.num_steps = 0
        self._step_decay = 0.0
        floating = {name: b for name, b in dense_buffers(module).items() if b.is_floating_point()}
        self._dense: dict[str, Tensor] = {**dense_parameters(module), **floating}
        self._means = {name: tensor.detach().clone() for name, tensor in self._dense.items()}
        self._storages: dict[str, Storage] = {}
        for name, collection in collections_of(module).items():
            for i, storage in enumerate(collection.all_storages()):
                if isinstance(storage, DynamicStorage):
                    raise ConfigError(
                        "a running mean needs rows that stay: those of dynamic tables come and go",
                        where=f"table {next(iter(storage.tables))!r}",
                        fix="give the table a TableConfig (num_ids in the schema), or leave out ema_decay",
                    )
                if storage.weight.dtype != torch.float32:
                    raise ConfigError(
                        "a running mean needs rows of float32: steps of a mean are too small for 16 bits",
                        where=f"tables {', '.join(storage.tables)}",
                        value=storage.tables[next(iter(storage.tables))].dtype,
                        fix="set the tables' dtype to 'float32', or leave out ema_decay",
                    )
                storage.row_mean = RowMean(storage.weight)
                self._storages[f"{name}.{i}"] = storage

    def advance(self) -> None:
        """Begin a step, before weights move."""
        self.num_steps += 1
        self._step_decay = min(self.decay, self.num_steps / (self.num_steps + _WARM_UP_STEPS))
        for mean in self._row_means().values():
            mean.advance(self._step_decay)

    @torch.no_grad()
    def follow(self) -> None:
        """End a step, after weights moved."""
        if self._dense:
            torch._foreach_lerp_(
                list(self._means.values()), [t.detach() for t in self._dense.values()], 1 - self._step_decay
            )

    def _row_means(self) -> dict[str, RowMean]:
        return {name: s.row_mean for name, s in self._storages.items() if s.row_mean is not None}

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Return the means as named tensors for a checkpoint; rows are brought up to date first."""
        rows = {name: mean.catch_up(self._storages[name].weight).mean for name, mean in self._row_means().items()}
        return {_PREFIX + name: tensor for name, tensor in {**self._means, **rows}.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Take over what `tensors` gave."""
        self.num_steps = num_steps
        for name, mean in self._means.items():
            mean.copy_(tensors[_PREFIX + name])
        for name, row_mean in self._row_means().items():
            row_mean.restart(tensors[_PREFIX + name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the module hold the means for the length of a block; memory is exchanged, nothing is copied."""
        for name, mean in self._row_means().items():
            with torch.no_grad():
                mean.catch_up(self._storages[name].weight)
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, tensor in self._dense.items():
            tensor.data, self._means[name] = self._means[name], tensor.data
        for name, mean in self._row_means().items():
            storage = self._storages[name]
            storage.weight, mean.mean = mean.mean, storage.weight
