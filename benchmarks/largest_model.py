"""The largest model that trains on this machine: DLRM whose tables fill the memory of GPU and host, or its disk, too.

    python benchmarks/largest_model.py [--gib GIB] [--cache-gib GIB] [--host-gib GIB --folder DISK] [--small]

Tables of 26 one-hot columns have equally many rows of 128 float32 numbers. Without --host-gib all rows lie in host
memory, and the GPU holds some of them. With it, host memory holds as many as fit, and files in --folder the others, of
which those are written that a step has changed. The figures are the size of the tables, and the speed of training after
the first steps, by the clock.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from announcing import AHEAD, Announcements
from record import record
from train_gpu import DIM, dlrm, draw, schema_of
from viviane.core.machine import free_memory
from viviane.training.look_ahead import LookAhead
from viviane.training.tier_counts import tier_counts

COLUMNS, ROWS, LAW, ROUND = 26, 65_536, 1.05, 10
GIB = 2**30


def train(given: argparse.Namespace) -> tuple[int, list[float]]:
    """Train on batches that are announced ahead; return the bytes of the tables, and the seconds of each round."""
    size = 512 if given.small else ROWS
    num_ids = int(given.gib * GIB / (4 * DIM * COLUMNS))
    settings: dict[str, Any] = {"embedding_memory": int(given.cache_gib * GIB)}
    settings["embedding_host_memory"] = int((given.host_gib or 1.05 * given.gib) * GIB)
    if given.host_gib is not None:
        settings |= {"embedding_folder": given.folder, "shuffle_on": "host"}
    schema = schema_of([num_ids] * COLUMNS, [1] * COLUMNS)
    start = time.perf_counter()
    trainer = dlrm(schema, given.host_gib is None, **settings).trainer
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    ahead, seconds = LookAhead(trainer.module), []
    there = [draw(schema, [1] * COLUMNS, size, LAW, i) for i in range(given.steps)]
    host = [one.to("cpu") if ahead.needs_host else None for one in there]
    queue = Announcements(lambda i: ahead.announce(there[i], host[i]))
    for i, batch in enumerate(there):
        if i % ROUND == 0:
            trainer.settle()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter())
            print(i, round(seconds[-1] - start, 1), flush=True)
        queue.up_to(min(i + 1 + AHEAD, len(there)))
        trainer.train_step(batch)
        ahead.forget(batch)
        queue.trained(i)
    trainer.settle()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter())
    print(trainer.cuda_graph, tier_counts(trainer.module)["tiers"])
    return num_ids * COLUMNS * 4 * DIM, list(np.diff(seconds))


def main() -> None:
    """Train and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help="of the tables' rows; by default 3/4 of the free host memory")
    parser.add_argument("--cache-gib", type=float, help="of the GPU's memory, for rows; by default a third of it")
    parser.add_argument("--host-gib", type=float, default=None, help="of host memory, where rows lie in files, too")
    parser.add_argument("--folder", default=None, help="of these files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--small", action="store_true", help="small sizes: shows that it runs, keeps no figures")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    if given.gib is None:
        given.gib = 1.0 if given.small else 0.75 * (free_memory() or 0) / GIB
    if given.cache_gib is None:
        given.cache_gib = 0.1 if given.small else torch.cuda.get_device_properties(0).total_memory / GIB / 3
    num_bytes, rounds = train(given)
    late = rounds[len(rounds) // 2 :]
    size = 512 if given.small else ROWS
    case = "one-hot DLRM, SGD, bf16, rows in host memory" + (" and on disk" if given.host_gib is not None else "")
    shape = {"batch": size, "dim": DIM, "law": LAW, "cache_gib": given.cache_gib, "host_gib": given.host_gib}
    common: dict[str, Any] = {"bench": "largest_model", "case": case, "better": "higher", "shape": shape}
    record(**common, metric="tables", value=num_bytes / GIB, unit="GiB")
    record(**common, metric="training", value=size * ROUND / float(np.median(late)), unit="samples/s",
           spread=(size * ROUND / max(late), size * ROUND / min(late)))  # fmt: skip


if __name__ == "__main__":
    main()
