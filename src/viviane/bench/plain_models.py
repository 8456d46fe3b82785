"""The zoo's models in plain PyTorch: an EmbeddingBag with sparse gradients per table, linear layers.

Shapes: B rows, F tables of width D, N dense values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

from viviane.zoo import DCN, DLRM, DCNv2, DeepFM, ZooModel


class Bags(nn.Module):
    """F tables of width D: (F, B) ids -> (B, F, D)."""

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for size in rows]
        for bag in bags:
            nn.init.uniform_(bag.weight, -0.01, 0.01)
        self.bags = nn.ModuleList(bags)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of ids."""
        offsets = torch.arange(ids.shape[1], device=ids.device)
        return torch.stack([bag(ids[i], offsets) for i, bag in enumerate(self.bags)], 1)


def chain(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLU after each."""
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


class PlainDLRM(nn.Module):
    """DLRM: (B, N), (F, B) -> logits (B,)."""

    def __init__(self, rows: Sequence[int], num_dense: int, zoo: DLRM) -> None:
        super().__init__()
        self.bags = Bags(rows, zoo.dim)
        self.bottom = chain([num_dense, *zoo.bottom_mlp, zoo.dim])
        vectors = len(rows) + 1
        self.top = chain([zoo.dim + vectors * (vectors - 1) // 2, *zoo.top_mlp])
        self.logit = nn.Linear(zoo.top_mlp[-1], 1)
        self.lower: Tensor
        self.register_buffer("lower", torch.tril_indices(vectors, vectors, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.bottom(dense)
        z = torch.cat([x.unsqueeze(1), self.bags(ids).to(x.dtype)], 1)
        products = torch.bmm(z, z.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        logits: Tensor = self.logit(self.top(torch.cat([x, products], 1))).squeeze(1)
        return logits


class PlainDCN(nn.Module):
    """DCN, version 1 with vectors or version 2 with matrices: (B, N), (F, B) -> logits (B,)."""

    def __init__(self, rows: Sequence[int], num_dense: int, zoo: DCN | DCNv2) -> None:
        super().__init__()
        self.bags = Bags(rows, zoo.dim)
        width = len(rows) * zoo.dim + num_dense
        out = width if isinstance(zoo, DCNv2) else 1
        self.cross = nn.ModuleList(nn.Linear(width, out, bias=False) for _ in range(zoo.num_cross_layers))
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(zoo.num_cross_layers))
        self.deep = chain([width, *zoo.deep_mlp])
        self.logit = nn.Linear(width + zoo.deep_mlp[-1], 1)
        self.matrices = isinstance(zoo, DCNv2)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return logits."""
        x0 = torch.cat([self.bags(ids).flatten(1), dense], 1)
        x = x0
        for layer, bias in zip(self.cross, self.biases, strict=True):
            x = x0 * (layer(x) + bias) + x if self.matrices else x0 * layer(x) + bias + x
        logits: Tensor = self.logit(torch.cat([x, self.deep(x0)], 1)).squeeze(1)
        return logits


class PlainDeepFM(nn.Module):
    """DeepFM: (B, N), (F, B) -> logits (B,)."""

    def __init__(self, rows: Sequence[int], num_dense: int, zoo: DeepFM) -> None:
        super().__init__()
        self.first, self.bags = Bags(rows, 1), Bags(rows, zoo.dim)
        self.first_dense = nn.Linear(num_dense, 1)
        self.dense_vectors = nn.Parameter(torch.rand(num_dense, zoo.dim) * 0.01)
        self.deep = chain([(len(rows) + num_dense) * zoo.dim, *zoo.deep_mlp])
        self.logit = nn.Linear(zoo.deep_mlp[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return logits."""
        v = torch.cat([self.bags(ids), dense.unsqueeze(2) * self.dense_vectors], 1)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        deep = self.logit(self.deep(v.flatten(1))).squeeze(1)
        logits: Tensor = self.first(ids).sum((1, 2)) + self.first_dense(dense).squeeze(1) + pairs + deep
        return logits


PLAIN: Final[dict[str, Callable[..., nn.Module]]] = {
    "dlrm": PlainDLRM, "dcn": PlainDCN, "dcn_v2": PlainDCN, "deepfm": PlainDeepFM,
}  # fmt: skip
"""Constructors by the name in the zoo, called with (rows of the tables, N, the zoo's settings)."""


def build_plain(name: str, rows: Sequence[int], num_dense: int, zoo: ZooModel) -> nn.Module:
    """Return the model of a name in `PLAIN`, with the zoo's sizes."""
    return PLAIN[name](rows, num_dense, zoo)
