"""How kernels are run: the cache on disk, calls from several Python threads, Numba's threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from viviane.config.optimizers import AdaGrad
from viviane.ops.native import kernels, pages
from viviane.ops.row_update import Entries, sum_rows, update_rows

LOOKUP = """
import torch
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.embedding_bag.cpu import copy_kernel
from viviane.ops.native.kernels import sources
out = torch.zeros(1, 6)
gather_rows(torch.eye(3), torch.tensor([[2, 0]]), out, [3, 0])
print(out.tolist(), copy_kernel(12, sources()).compiled.cache_hits)
"""


def summed(seed, count=60_000):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(300, (count,), generator=generator)
    return sum_rows(Entries(rows, torch.randn(count * 7, generator=generator)), 7, num_rows=300)[1]


@pytest.mark.slow
def test_a_second_process_takes_machine_code_from_the_disk(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOOKUP], env=environment, capture_output=True, text=True, check=True
        )
        result, count = run.stdout.strip().rsplit(" ", 1)
        assert result == "[[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]]"
        hits.append(int(count))
    assert hits == [0, 1]


@pytest.mark.parametrize("own", [False, True], ids=["torch's threads", "Numba's threads"])
def test_several_python_threads_at_once(own, monkeypatch):
    expected = [summed(seed) for seed in range(4)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if own:
        monkeypatch.setattr(kernels, "_torch_threads", lambda: None)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(summed, [*range(4)] * 5))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, expected[i % 4]) for i, one in enumerate(found))


def test_small_work_takes_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert [kernels.num_threads(work) for work in (0, 10_000, 40_000, 10**9)] == [1, 1, 2, 3]
    finally:
        torch.set_num_threads(before)


def test_huge_pages_keep_what_tensors_hold():
    vector = pages.empty(3_000_000, torch.int32).fill_(7)
    pages.advise_huge_pages(vector[5:])
    assert bool((vector == 7).all())
    pages.advise_huge_pages(torch.empty(0))


def test_tables_beyond_one_block_of_pages_are_updated():
    weight, state = pages.empty(2_000_000 * 7, torch.float32).zero_().view(-1, 7), torch.zeros(2_000_000)
    rows = torch.arange(0, 2_000_000, 100_000)
    rule = AdaGrad(row_wise=True)
    update_rows(weight, {"accumulator": state}, Entries(rows, torch.ones(len(rows) * 7)), rule, lr=0.5, step=1)
    assert state.nonzero().flatten().tolist() == rows.tolist()
    assert weight[rows].unique().tolist() == pytest.approx([-0.5])
