"""DLRM training against hand-written PyTorch with one `nn.EmbeddingBag(sparse=True)` per table, step by step.

Both train the same network on the same batches in memory with SGD: 26 tables of Criteo-Kaggle's sizes, dim 16,
power-law ids, 13 dense columns. Steps of the two alternate in short rounds, so that a noisy machine disturbs
both alike; the figure is the median round.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import viviane as vv
from record import record
from viviane.batch import Batch, Layout
from viviane.bench.workload import TABLE_SIZES
from viviane.zoo import DLRM

DIM, NUM_DENSE = 16, 13
BOTTOM, TOP = (512, 256, 64), (512, 256)
LR = 0.01


class PlainDLRM(nn.Module):
    """What a PyTorch user writes: a bag per table, a product of pairs, two chains of linear layers."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in sizes)
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -0.01, 0.01)
        self.bottom = chain([NUM_DENSE, *BOTTOM, DIM], last=nn.ReLU())
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = chain([DIM + pairs, *TOP, 1])
        self.register_buffer("lower", torch.tril_indices(len(sizes) + 1, len(sizes) + 1, -1))
        self.register_buffer("offsets", torch.empty(0, dtype=torch.int64))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        if self.offsets.numel() != ids.shape[1]:
            self.offsets = torch.arange(ids.shape[1])
        x = self.bottom(dense)
        vectors = [bag(ids[i], self.offsets) for i, bag in enumerate(self.bags)]
        z = torch.stack([x, *vectors], 1)
        products = torch.bmm(z, z.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def chain(widths: list[int], last: nn.Module | None = None) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        steps += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*steps[:-1], *([last] if last else []))


def schema_of(sizes: list[int]) -> vv.Schema:
    return vv.Schema(
        labels=[{"name": "click"}],
        dense=[{"name": f"i{n}"} for n in range(1, NUM_DENSE + 1)],
        categorical=[{"name": f"c{n}", "num_ids": size} for n, size in enumerate(sizes, 1)],
    )


def make_batches(schema: vv.Schema, sizes: list[int], size: int, count: int) -> list[Batch]:
    """Ids by the inverse distribution function of a power law with exponent 1.1, as HugeCTR's generator draws."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        columns = []
        for rows in sizes:
            u = torch.rand(size, generator=generator, dtype=torch.float64)
            top = (rows + 1.0) ** -0.1
            columns.append(((top - 1) * u + 1).pow(-10).long().sub_(1).clamp_(0, rows - 1))
        batches.append(
            Batch(
                Layout.of(schema),
                labels=(torch.rand(size, 1, generator=generator) < 0.25).float(),
                dense=torch.rand(size, NUM_DENSE, generator=generator),
                one_hot=torch.stack(columns, 1).to(torch.int32),
            )
        )
    return batches


def build_ours(schema: vv.Schema):
    model = vv.Model(vv.Solver(lr=LR, device="cpu"), schema)
    model.add(DLRM(dim=DIM, bottom_mlp=BOTTOM, top_mlp=TOP))
    model.compile(optimizer=vv.SGD())
    return model.trainer.train_step


def build_plain(sizes: list[int]):
    torch.manual_seed(0)
    model = PlainDLRM(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(model(dense, ids), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds_per_step(step, arguments, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        for given in arguments:
            step(*given)
    return (time.perf_counter() - start) / (repeat * len(arguments))


def compare(sizes: list[int], batch_size: int, rounds: int) -> None:
    schema = schema_of(sizes)
    batches = make_batches(schema, sizes, batch_size, 8)
    # The peer gets its ids as it wants them, one contiguous int64 row per table, prepared outside the clock.
    plain_input = [(b.dense, b.one_hot.t().long().contiguous(), b.labels[:, 0]) for b in batches]
    our_input = [(batch,) for batch in batches]
    ours, plain = build_ours(schema), build_plain(sizes)
    for step, given in ((ours, our_input), (plain, plain_input)):
        seconds_per_step(step, given, 1)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(rounds):
        times["ours"].append(seconds_per_step(ours, our_input, 1))
        times["plain"].append(seconds_per_step(plain, plain_input, 1))
    ours_median, plain_median = (batch_size / statistics.median(times[key]) for key in ("ours", "plain"))
    low, high = statistics.quantiles(times["ours"], n=5)[0], statistics.quantiles(times["ours"], n=5)[3]
    record(
        bench="train", case=f"DLRM, SGD, fp32, batch {batch_size}", metric="samples per second", value=ours_median,
        unit="samples/s", better="higher", goal=plain_median, peer="PyTorch, nn.EmbeddingBag(sparse=True)",
        peer_value=plain_median, spread=(batch_size / high, batch_size / low),
        shape={"tables": len(sizes), "rows": sum(sizes), "dim": DIM, "batch": batch_size, "bottom": BOTTOM, "top": TOP},
    )  # fmt: skip
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tables of at most 100,000 rows, few rounds")
    small = parser.parse_args().small
    sizes = [min(size, 100_000) if small else size for size in TABLE_SIZES["criteo-kaggle"]]
    for batch_size in (2048, 16384):
        compare(sizes, batch_size, rounds=3 if small else 15)


if __name__ == "__main__":
    main()
