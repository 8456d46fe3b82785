"""What the checks of keys, offsets and weights cost a lookup: the same lookups with and without them, in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch

from record import record
from viviane.batch import Bag
from viviane.config import SGD
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, lookup

ROWS, DIM, TABLES = 100_000, 16, 26
UNCHECKED = {
    "check_given": lambda bags, origin, violations: None,
    "checked_bag": lambda bag, feature, device: bag,
    "checked_ids": lambda ids, feature, device: ids,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="few repetitions: shows that it runs")
    repeat = 3 if parser.parse_args().small else 400
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    names = [f"t{i}" for i in range(TABLES)]
    tables = [TableConfig(name=name, num_rows=ROWS, dim=DIM) for name in names]
    for case, batch, hotness, weighted in (
        ("one key a feature", 4096, 1, False), ("bags of 10", 1024, 10, False), ("weighted bags of 10", 1024, 10, True),
    ):  # fmt: skip
        features = [FeatureConfig(name=name, table=name) for name in names]
        collection = EmbeddingCollection(tables, features, SGD())
        keys = {name: torch.from_numpy(rng.integers(0, ROWS, batch * hotness)) for name in names}
        given: dict[str, object] = dict(keys)
        if hotness > 1:
            offsets = torch.arange(0, batch * hotness + 1, hotness)
            weights = torch.rand(batch * hotness) if weighted else None
            given = {name: Bag(ids, offsets, weights) for name, ids in keys.items()}
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * repeat + 6):
            checked = number % 4 in (0, 3)  # each goes first as often as the other
            with nullcontext() if checked else mock.patch.multiple(lookup, **UNCHECKED), torch.no_grad():
                start = time.process_time()
                collection(given)
                taken = time.process_time() - start
            if number >= 6:
                times[checked].append(taken)
        with_checks, without = statistics.median(times[True]), statistics.median(times[False])
        record(
            bench="array_checks",
            case=f"lookup, {case}",
            metric="time with checks beside the time without",
            value=with_checks / without,
            unit="times",
            better="lower",
            goal=1.01,
            floor=1.0,
            spread=tuple(np.percentile(np.array(times[True]) / without, [20, 80]).tolist()),
            shape={"tables": TABLES, "dim": DIM, "batch": batch},
        )


if __name__ == "__main__":
    main()
