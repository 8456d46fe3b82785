"""Exact AUC against scikit-learn and torchmetrics: time, and that all three agree."""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.functional.classification import binary_auroc

from record import record
from viviane.metrics import roc_auc


def timed(function, repeat):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        value = function()
        times.append(time.perf_counter() - start)
    return statistics.median(times), float(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="200,000 rows only")
    small = parser.parse_args().small
    for rows in [200_000] if small else [1_000_000, 10_000_000]:
        generator = np.random.default_rng(0)
        scores = generator.beta(1, 20, rows).astype(np.float32)
        labels = (generator.random(rows) < scores).astype(np.float32)
        repeat = 3 if rows > 5_000_000 else 7
        ours, value = timed(partial(roc_auc, scores, labels), repeat)
        predictions, targets = torch.from_numpy(scores), torch.from_numpy(labels).int()
        peers = {
            "scikit-learn": timed(partial(roc_auc_score, labels, scores), repeat),
            "torchmetrics": timed(partial(binary_auroc, predictions, targets), repeat),
        }
        for name, (seconds, other) in peers.items():
            # torchmetrics integrates in float32; scikit-learn in float64
            assert abs(value - other) < (1e-5 if name == "torchmetrics" else 1e-10), (name, value, other)
            record(
                bench="metrics",
                case=f"exact AUC of {rows:,} scores",
                metric="time",
                value=ours * 1e3,
                unit="ms",
                better="lower",
                peer=name,
                peer_value=seconds * 1e3,
                shape={"rows": rows},
            )


if __name__ == "__main__":
    main()
