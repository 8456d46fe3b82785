"""The index of dynamic tables: find and find-or-insert of 1 M keys in a table of 10 M, and distinct keys of a batch.

Against a Python dict, torch.unique, std::unordered_map, and the plain algorithm in C++ (open addressing in one array
with its capacity reserved, with prefetch), compiled here where g++ is there. All on one thread, and ours besides on
all; the tries of all take turns, so that a noisy machine disturbs them alike, and the best of each counts.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from record import record
from viviane.ops.hash_table import distinct, make_index, stamp_of

SOURCE = r"""
#include <cstdint>
#include <cstdlib>
#include <unordered_map>

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

struct Slot { int64_t key, row; };
struct Table { Slot* slots; uint64_t mask; int64_t count; };

extern "C" void* open_make(int64_t size) {
    return new Table{static_cast<Slot*>(calloc(size, sizeof(Slot))), static_cast<uint64_t>(size - 1), 0};
}
extern "C" void open_free(void* p) { free(static_cast<Table*>(p)->slots); delete static_cast<Table*>(p); }

static inline Slot* seek(Table* t, int64_t key) {
    uint64_t at = mix(key) & t->mask;
    while (t->slots[at].row && t->slots[at].key != key) at = (at + 1) & t->mask;
    return &t->slots[at];
}
extern "C" void open_find(void* p, const int64_t* keys, int64_t* rows, int64_t n) {
    Table* t = static_cast<Table*>(p);
    for (int64_t i = 0; i < n; i++) {
        if (i + 24 < n) __builtin_prefetch(&t->slots[mix(keys[i + 24]) & t->mask]);
        rows[i] = seek(t, keys[i])->row - 1;
    }
}
extern "C" void open_insert(void* p, const int64_t* keys, int64_t* rows, int64_t n) {
    Table* t = static_cast<Table*>(p);
    for (int64_t i = 0; i < n; i++) {
        if (i + 24 < n) __builtin_prefetch(&t->slots[mix(keys[i + 24]) & t->mask]);
        Slot* slot = seek(t, keys[i]);
        if (!slot->row) *slot = {keys[i], ++t->count};
        rows[i] = slot->row - 1;
    }
}

using Map = std::unordered_map<int64_t, int64_t>;
extern "C" void* map_make(int64_t size) { Map* m = new Map; m->reserve(size); return m; }
extern "C" void map_free(void* p) { delete static_cast<Map*>(p); }
extern "C" void map_find(void* p, const int64_t* keys, int64_t* rows, int64_t n) {
    Map* m = static_cast<Map*>(p);
    for (int64_t i = 0; i < n; i++) { auto at = m->find(keys[i]); rows[i] = at == m->end() ? -1 : at->second; }
}
extern "C" void map_insert(void* p, const int64_t* keys, int64_t* rows, int64_t n) {
    Map* m = static_cast<Map*>(p);
    for (int64_t i = 0; i < n; i++) rows[i] = m->try_emplace(keys[i], static_cast<int64_t>(m->size())).first->second;
}
"""


class Ours:
    """An index on a number of threads; it grows from nothing, or has slots for all keys from the start."""

    def __init__(self, count: int, threads: int, initial: int = 1) -> None:
        self.index = make_index(4 * count, initial_rows=initial)
        self.threads = threads
        self.clock = 0

    def find(self, keys: Tensor) -> Tensor:
        torch.set_num_threads(self.threads)
        return self.index.find(keys)

    def insert(self, keys: Tensor) -> Tensor:
        torch.set_num_threads(self.threads)
        self.clock += 1
        stamp = stamp_of(0, self.clock)
        rows = self.index.touch(keys, stamp)
        missing = (rows < 0).nonzero().squeeze(1)
        if len(missing):
            self.index.insert(keys, rows, missing, stamp)
        return rows


class Dict:
    """A Python dict, with keys and rows as tensors at its doors."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def find(self, keys: Tensor) -> Tensor:
        rows = self.rows
        return torch.tensor([rows.get(key, -1) for key in keys.tolist()])

    def insert(self, keys: Tensor) -> Tensor:
        rows = self.rows
        return torch.tensor([rows.setdefault(key, len(rows)) for key in keys.tolist()])


class Compiled:
    """A table of the C++ above: "open" or "map"."""

    def __init__(self, library: ctypes.CDLL, kind: str, size: int) -> None:
        self.library, self.kind = library, kind
        make = getattr(library, f"{kind}_make")
        make.restype = ctypes.c_void_p
        self.table = ctypes.c_void_p(make(ctypes.c_int64(size)))

    def call(self, name: str, keys: Tensor) -> Tensor:
        rows = torch.empty_like(keys)
        places = (ctypes.c_void_p(keys.data_ptr()), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(keys)))
        getattr(self.library, f"{self.kind}_{name}")(self.table, *places)
        return rows

    def find(self, keys: Tensor) -> Tensor:
        return self.call("find", keys)

    def insert(self, keys: Tensor) -> Tensor:
        return self.call("insert", keys)

    def __del__(self) -> None:
        getattr(self.library, f"{self.kind}_free")(self.table)


def compiled(folder: Path) -> ctypes.CDLL | None:
    """Compile the C++, or return None where there is no g++."""
    if shutil.which("g++") is None:
        print("g++ is not there: no figures of C++")
        return None
    (folder / "tables.cpp").write_text(SOURCE)
    library = folder / "tables.so"
    command = ["g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-o", library, folder / "tables.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_of(tries: dict[str, Callable[[int], Callable[[], object]]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the best and the median time of each, with new calls in each round."""
    times: dict[str, list[float]] = {name: [] for name in tries}
    for n in range(rounds):
        for name, prepare in tries.items():
            times[name].append(seconds(prepare(n)))
    return {name: (min(own), sorted(own)[len(own) // 2]) for name, own in times.items()}


def report(case: str, found: dict[str, tuple[float, float]], count: int, shape: dict[str, int]) -> None:
    """Record ours against the peers: millions of keys a second."""
    rates = {name: count / own[0] / 1e6 for name, own in found.items()}
    for name in [name for name in rates if name.startswith("ours")]:
        for peer in [peer for peer in rates if not peer.startswith("ours")]:
            record(
                bench="hash", case=f"{case}, {name}", metric=f"rate beside {peer}", value=rates[name],
                unit="M keys/s", better="higher", peer=peer, peer_value=rates[peer],
                spread=(count / found[name][1] / 1e6, rates[name]), shape=shape,
            )  # fmt: skip


def tables(size: int, count: int, rounds: int, threads: int) -> None:
    random = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (size,), generator=random)
    with TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        # Both C++ tables get all their memory at once; the open one ends at most 0.6 full.
        total = size + rounds * count
        slots = 1 << (int(total / 0.6) - 1).bit_length()
        objects = {
            "ours, 1 thread": Ours(size, 1),
            f"ours, {threads} threads": Ours(size, threads),
            "ours, 1 thread, made large": Ours(size, 1, total),
            "dict": Dict(),
        }
        if library is not None:
            objects["C++ open addressing"] = Compiled(library, "open", slots)
            objects["std::unordered_map"] = Compiled(library, "map", total)
        for name, table in objects.items():
            time_taken = seconds(lambda table=table: [table.insert(part) for part in keys.split(count)])
            print(f"{name}: {size:,} keys in {time_taken:.1f} s", flush=True)
        shape = {"keys": count, "table": size}
        old = [keys[torch.randint(0, size, (count,), generator=random)] for _ in range(rounds)]
        new = [torch.randint(-(2**63), 2**63 - 1, (count,), generator=random) for _ in range(rounds)]
        for case, operation, batches in (
            ("find, all there", "find", old),
            ("find, none there", "find", new),
            ("find or insert, all there", "insert", old),
            ("find or insert, all new", "insert", new),
        ):
            tries = {
                name: lambda n, table=table: lambda: getattr(table, operation)(batches[n])  # noqa: B023
                for name, table in objects.items()
            }
            report(case, best_of(tries, rounds), count, shape)


def batches(count: int, rounds: int) -> None:
    """Distinct keys of a power-law batch."""
    random = torch.Generator().manual_seed(1)
    keys = (torch.rand(count, generator=random, dtype=torch.float64) ** -2).clamp_max(2.0**60).long() * 7919
    tries = {
        "ours": lambda n: lambda: distinct(keys),
        "torch.unique": lambda n: lambda: torch.unique(keys, return_inverse=True),
    }
    report("distinct keys and inverse, power law", best_of(tries, rounds), count, {"keys": count})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a table of 100,000 keys")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    size, count, rounds = (100_000, 10_000, 3) if options.small else (10_000_000, 1_000_000, 7)
    distinct(torch.zeros(10, dtype=torch.int64))
    Ours(10, 1).insert(torch.arange(10))  # kernels are compiled by their first call
    tables(size, count, rounds, threads)
    torch.set_num_threads(threads)
    batches(count, rounds)


if __name__ == "__main__":
    main()
