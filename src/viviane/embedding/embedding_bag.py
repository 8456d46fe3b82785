"""One table with the calls of `torch.nn.EmbeddingBag`.

Shapes: V rows of the table, D their width, B bags, N ids of all bags, H ids of each bag of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Bag
from viviane.config.optimizers import SGD, AnyOptimizer
from viviane.core.errors import ConfigError, DataError
from viviane.embedding.collection import EmbeddingCollection
from viviane.embedding.config import FeatureConfig, NormalInit, RowType, TableConfig
from viviane.embedding.entry_pooling import pool_entries, scale_gradient_by_frequency
from viviane.embedding.keys import check_memory
from viviane.embedding.state import TableState, check_content
from viviane.embedding.storage import Storage

_NAME = "bag"
_ROW_TYPES: Mapping[torch.dtype, RowType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class EmbeddingBag(nn.Module):
    """A table that pools bags, called as `torch.nn.EmbeddingBag` is, and trained by `step` instead of `Parameter.grad`.

    With the same rows it gives the same numbers. What differs: gradients go to the touched rows alone, whatever
    `sparse` says; a padding row is zero and stays zero; a key out of range raises `KeyRangeError`, on a GPU by the
    next `step`; initial values are drawn by `seed`. Rows looked up in mode "max" count as touched where another row is
    the greatest, too: a rule with momentum moves them.

    Sums and means are pooled as they are looked up. Mode "max", `scale_grad_by_freq` and weights that require grad
    need the vectors of all entries, (N, D).

    Args:
        num_embeddings, embedding_dim: V and D.
        max_norm: each call scales the looked-up rows whose norm is larger to it, in place, in `eval()` mode too.
        norm_type: p of that norm.
        scale_grad_by_freq: divide gradients by how often their row is in the call; for modes "sum" and "mean".
        mode: "sum", "mean" or "max".
        sparse: either value.
        _weight: initial rows, (V, D), copied; None draws them from N(0, 1).
        include_last_offset: offsets are (B + 1,) and end with N.
        padding_idx: an id that is left out of its bag; counted from the end where negative.
        device: where the table is.
        dtype: of rows and output: float32, float16, bfloat16; None takes that of `_weight`, or float32.
        optimizer: the rule of `step`.
        seed: of the initial values.

    Example:
        >>> bag = EmbeddingBag(10, 3, mode="sum")
        >>> out = bag(torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])); out.shape
        torch.Size([2, 3])
        >>> out.sum().backward(); bag.step(lr=0.1)
        >>> from torch.nn import functional as F
        >>> torch.allclose(F.embedding_bag(torch.tensor([[1, 2]]), bag.weight, mode="sum"), bag(torch.tensor([[1, 2]])))
        True
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: AnyOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        flags = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse, "include_last_offset": include_last_offset}
        _check_options(mode, max_norm, norm_type, flags, _weight)
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if not _is_number(value, Integral) or value < 1:
                raise ConfigError(f"{name} is no size", value=value, allowed="a whole number from 1")
        is_row = _is_number(padding_idx, Integral) and -num_embeddings <= (padding_idx or 0) < num_embeddings
        if padding_idx is not None and not is_row:
            raise ConfigError(
                "padding_idx is no row", value=padding_idx, allowed=f"{-num_embeddings} to {num_embeddings - 1}"
            )
        dtype = dtype or (torch.float32 if _weight is None else _weight.dtype)
        if dtype not in _ROW_TYPES:
            raise ConfigError("no such type of rows", value=str(dtype), allowed="float32, float16, bfloat16")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.sparse, self.include_last_offset = mode, sparse, include_last_offset
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, float(norm_type)
        self.scale_grad_by_freq = scale_grad_by_freq
        self.optimizer = optimizer or SGD()
        table = TableConfig(
            name=_NAME,
            num_rows=num_embeddings,
            dim=embedding_dim,
            dtype=_ROW_TYPES[dtype],
            init=NormalInit(std=1.0),
            padding_id=self.padding_idx,
        )
        feature = FeatureConfig(name=_NAME, table=_NAME, combiner="mean" if mode == "mean" else "sum")
        self.collection = _Table(
            [table],
            [feature],
            self.optimizer,
            device=device or torch.get_default_device(),
            seed=seed,
            output_dtype=dtype,
        )
        if _weight is not None:
            self.collection.import_table(_NAME, TableState(_weight.detach()))

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> EmbeddingBag:
        """Build from rows (V, D), copied, with the other options of the class; frozen tables do not move.

        Example:
            >>> EmbeddingBag.from_pretrained(torch.eye(3), mode="sum")(torch.tensor([[0, 2]])).tolist()
            [[1.0, 0.0, 1.0]]
        """
        num_embeddings, embedding_dim = embeddings.shape
        bag = cls(num_embeddings, embedding_dim, _weight=embeddings, **options)
        if freeze:
            bag.collection.freeze(_NAME)
        return bag

    @property
    def weight(self) -> Tensor:
        """The rows, a view (V, D) of the live memory; no Parameter."""
        return self.collection.export_table(_NAME, copy=False).weight

    def forward(
        self,
        input: Tensor,  # noqa: A002 - the name that nn.EmbeddingBag gives it
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool the bags: (B, D).

        Args:
            input: ids of all bags, (N,), or bags of equal length, (B, H); int32 or int64.
            offsets: where each bag of a (N,) input begins, (B,), or (B + 1,) with `include_last_offset`.
            per_sample_weights: shaped as input; for mode "sum". They get gradients where they require them.

        Raises:
            DataError: shapes do not fit.
            KeyRangeError: an id is not in 0 <= id < V; on a GPU `step` raises it.
        """
        for name, value in (("input", input), ("offsets", offsets), ("per_sample_weights", per_sample_weights)):
            if not isinstance(value, Tensor) and (value is not None or name == "input"):
                raise DataError(f"{name} is no tensor", value=type(value).__name__)
            if value is not None:
                check_memory(value, f"EmbeddingBag, {name}")
        if input.dim() == 2 and offsets is None:
            size, length = input.shape
            bounds = torch.arange(size + 1, device=input.device) * length
        elif input.dim() == 1 and offsets is not None and offsets.dim() == 1:
            bounds = self._bounds(offsets, len(input))
        else:
            shapes = f"{tuple(input.shape)}, {None if offsets is None else tuple(offsets.shape)}"
            raise DataError("input and offsets do not fit", value=shapes, allowed="(N,) with offsets (B,), or (B, H)")
        weights = None if per_sample_weights is None else self._weights(per_sample_weights, input.shape)
        ids = input.reshape(-1)
        if self.max_norm is not None:
            self.collection.limit_norms(_NAME, ids, float(self.max_norm), self.norm_type)
        differentiates = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if self.mode == "max" or self.scale_grad_by_freq or differentiates:
            return self._pool_entries(ids, bounds, weights)
        out: Tensor = self.collection({_NAME: Bag(ids, bounds, weights)}).flat
        return out

    def _pool_entries(self, ids: Tensor, bounds: Tensor, weights: Tensor | None) -> Tensor:
        """Pool vectors that are looked up one by one, (N, D)."""
        vectors: Tensor = self.collection({_NAME: ids}).flat
        if self.scale_grad_by_freq:
            vectors = scale_gradient_by_frequency(vectors, ids)
        skipped = None if self.padding_idx is None else ids == self.padding_idx
        return pool_entries(vectors, bounds, self.mode, skipped, weights)

    def _bounds(self, offsets: Tensor, num_ids: int) -> Tensor:
        if offsets.dtype not in (torch.int64, torch.int32):
            raise DataError("offsets must be whole numbers", value=str(offsets.dtype), allowed="int64 or int32")
        bounds = offsets.to(torch.int64)
        if not self.include_last_offset:
            bounds = torch.cat([bounds, bounds.new_full((1,), num_ids)])
        # A GPU, or compiled code, would have to wait for the numbers.
        if bounds.is_cpu and not torch.compiler.is_compiling():
            rising = len(bounds) > 0 and int(bounds[0]) == 0 and bool((bounds[1:] >= bounds[:-1]).all())
            if not rising or int(bounds[-1]) != num_ids:
                raise DataError("offsets must rise from 0 to the number of ids", value=offsets.tolist()[:16])
        return bounds

    def _weights(self, weights: Tensor, shape: torch.Size) -> Tensor:
        if self.mode != "sum":
            raise ConfigError("per_sample_weights need mode='sum'", value=self.mode)
        if weights.shape != shape:
            raise DataError("per_sample_weights differ in shape from the ids", value=tuple(weights.shape))
        if not weights.is_floating_point():
            raise DataError("per_sample_weights must be floating-point numbers", value=str(weights.dtype))
        # A GPU, or compiled code, would have to wait for the numbers.
        if weights.is_cpu and not torch.compiler.is_compiling() and not bool(weights.isfinite().all()):
            raise DataError("per_sample_weights must be finite", value=weights[~weights.isfinite()][0].item())
        return weights.reshape(-1).to(torch.float32)

    def step(self, lr: float, scale: float | Tensor = 1.0, factor: float = 1.0) -> None:
        """Move the touched rows; see `EmbeddingCollection.step`.

        Raises:
            ConfigError: a number is not finite; it would make the rows NaN.
        """
        for name, value in (("lr", lr), ("scale", scale), ("factor", factor)):
            if not isinstance(value, Tensor) and not (_is_number(value) and math.isfinite(value)):
                raise ConfigError(f"{name} is no finite number", where="EmbeddingBag.step", value=value)
        self.collection.step(lr, scale, factor)

    # A state dict has what that of nn.EmbeddingBag has: the rows. The optimizer's state is apart, as torch's is.

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state by name, and the number of steps as "step": views of the live memory.

        Example:
            >>> sorted(EmbeddingBag(3, 2).optimizer_state_dict())
            ['step']
        """
        return {key: value for key, value in self._storage.state_entries(_NAME, "").items() if key != "weight"}

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what `optimizer_state_dict` returned.

        Raises:
            CheckpointError: names or shapes differ; nothing is changed then.
        """
        own = self.optimizer_state_dict()
        check_content(_NAME, own, state)
        self._storage.load_entries(_NAME, "", {"weight": self.weight, **state}, [], [])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self._storage.state_entries(_NAME, prefix)[f"{prefix}weight"]

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
        given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        optimizer_state = {prefix + name: value for name, value in self.optimizer_state_dict().items()}
        loaded = dict(given)
        if not given.keys() & optimizer_state.keys():  # version 0.1.0 wrote the optimizer's state beside the rows
            loaded |= optimizer_state
        known = self._storage.load_entries(_NAME, prefix, loaded, missing_keys, error_msgs)
        unexpected_keys += [key for key in given if key not in known]

    @property
    def _storage(self) -> Storage:
        (storage,) = self.collection.fixed_storages()
        return storage

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        given = f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}"
        if self.max_norm is not None:
            given += f", max_norm={self.max_norm}, norm_type={self.norm_type}"
        if self.scale_grad_by_freq:
            given += ", scale_grad_by_freq=True"
        return given if self.padding_idx is None else f"{given}, padding_idx={self.padding_idx}"


def _check_options(mode: Any, max_norm: Any, norm_type: Any, flags: Mapping[str, Any], weight: Any) -> None:
    if mode not in ("sum", "mean", "max"):
        raise ConfigError("no such mode", value=mode, allowed="'sum', 'mean', 'max'")
    if max_norm is not None and not (_is_number(max_norm) and max_norm >= 0):
        raise ConfigError("max_norm is no norm", value=max_norm, allowed="a number, at least 0, or None")
    if not (_is_number(norm_type) and norm_type > 0):
        raise ConfigError(
            "norm_type is no norm", value=norm_type, allowed="a number above 0; inf is the largest magnitude"
        )
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is no bool", value=value, allowed="True, False")
    if weight is not None and not isinstance(weight, Tensor):
        raise ConfigError("_weight is no tensor", value=type(weight).__name__, allowed="a tensor (V, D), or None")
    if flags["scale_grad_by_freq"] and mode == "max":
        raise ConfigError(
            "scale_grad_by_freq does not apply to maxima", value=mode, allowed="'sum', 'mean'",
            fix="leave out scale_grad_by_freq; torch.nn.EmbeddingBag refuses it, too",
        )  # fmt: skip


def _is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class _Table(EmbeddingCollection):
    """A collection whose content its EmbeddingBag saves."""

    def _save_to_state_dict(self, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass
