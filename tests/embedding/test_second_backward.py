"""The sums of a norm are computed again when another backward pass follows before the step."""

import torch

from viviane.config import SGD
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig


def test_a_backward_after_the_norm_counts_too():
    table = TableConfig(name="x", num_rows=5, dim=2, init="zero")
    emb = EmbeddingCollection([table], [FeatureConfig(name="f", table="x")], SGD())
    emb({"f": torch.tensor([1, 2])}).flat.sum().backward()
    assert emb.grad_norm_squared().item() == 4.0
    emb({"f": torch.tensor([2, 3])}).flat.sum().backward()
    assert emb.grad_norm_squared().item() == 2 * (1 + 4 + 1)
    emb.step(1.0)
    assert emb.export_table("x").weight[:, 0].tolist() == [0.0, -1.0, -2.0, -1.0, 0.0]
