"""Output memory is used again only when nothing can see it any more."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from viviane.config import SGD
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.buffers import Buffers

CPU = torch.device("cpu")
ROWS, WIDTH = 1024, 512  # 2 MiB of float32


def collection(**options) -> EmbeddingCollection:
    table = TableConfig(name="t", num_rows=10, dim=WIDTH)
    return EmbeddingCollection([table], [FeatureConfig(name="f", table="t")], SGD(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_memory_comes_back_after_the_last_view(dtype) -> None:
    buffers = Buffers(dtype)
    first = buffers.take(ROWS, 2 * WIDTH, CPU)
    place, part = first.data_ptr(), first[3:4, 7:]
    del first
    gc.collect()
    second = buffers.take(ROWS, 2 * WIDTH, CPU)
    assert second.data_ptr() != place
    del part
    assert buffers.take(ROWS, 2 * WIDTH, CPU).data_ptr() == place
    assert second.dtype == dtype
    assert second.shape == (ROWS, 2 * WIDTH)


def test_a_larger_output_gets_memory_of_its_own_and_a_little_smaller_one_does_not() -> None:
    buffers = Buffers(torch.float32)
    place = buffers.take(ROWS, WIDTH, CPU).data_ptr()
    assert buffers.take(ROWS - 100, WIDTH, CPU).data_ptr() == place
    assert buffers.take(ROWS + 1, WIDTH, CPU).data_ptr() != place


def test_what_autograd_keeps_is_not_overwritten() -> None:
    embedding = collection()
    ids = torch.arange(ROWS) % 10
    squares = embedding({"f": ids}).flat ** 2  # keeps its input for backward
    before = embedding.export_table("t").weight
    del ids
    for _ in range(3):
        embedding.eval()({"f": torch.zeros(ROWS, dtype=torch.int64)})
    squares.sum().backward()
    embedding.step(lr=0.01)
    counts = (torch.bincount(torch.arange(ROWS) % 10)).unsqueeze(1)
    # w - lr * count * 2 w; sums of about a hundred equal float32 numbers
    torch.testing.assert_close(embedding.export_table("t").weight, before * (1 - 0.02 * counts), rtol=1e-5, atol=1e-7)


def test_threads_never_share_an_output() -> None:
    embedding = collection().eval()

    def look_up(key: int) -> bool:
        ids = torch.full((ROWS,), key)
        out = embedding({"f": ids}).flat
        expected = embedding.export_table("t", copy=False).weight[key]
        return bool((out == expected).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look_up, [i % 10 for i in range(100)]))


def test_a_copy_of_a_collection_has_memory_of_its_own() -> None:
    embedding = collection().eval()
    out = embedding({"f": torch.zeros(ROWS, dtype=torch.int64)}).flat
    other = copy.deepcopy(embedding)({"f": torch.ones(ROWS, dtype=torch.int64)}).flat
    assert out.data_ptr() != other.data_ptr()
