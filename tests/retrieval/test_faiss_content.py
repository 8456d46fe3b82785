"""Serialized faiss indexes that were crafted: an error of ours, within the memory of the file, or the same index."""

import subprocess
import sys

import pytest

pytest.importorskip("faiss")

KINDS = ["flat", "ivf", "hnsw", "sq8"]
BEGIN = """
import resource, struct, sys
import numpy as np, torch
from viviane.core.errors import CheckpointError
from viviane.retrieval.faiss_index import FaissSearch, IndexSettings
kind = sys.argv[1]
random = np.random.default_rng(0)
vectors = random.normal(size=(90, 4)).astype("float32")
settings = IndexSettings(kind=kind) if kind in ("flat", "hnsw") else IndexSettings(kind=kind, num_lists=3)
cpu = torch.device("cpu")
built = FaissSearch(vectors, settings, cpu)
whole = built.to_bytes()
"""
CRAFTED = (
    BEGIN
    + """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
truth, refused = built(vectors, 5)[0], 0
places = list(range(0, min(len(whole) - 8, 400), 3)) + random.integers(0, len(whole) - 8, 100).tolist()
for place in places:
    for number in (1 << 40, (1 << 63) - 1, 0):
        content = whole[:place] + struct.pack("<q", number) + whole[place + 8 :]
        try:
            found = FaissSearch(vectors, settings, cpu, content)
        except CheckpointError:
            refused += 1
        else:
            assert found(vectors, 5)[0].shape == truth.shape
for length in range(0, len(whole), max(1, len(whole) // 100)):
    try:
        FaissSearch(vectors, settings, cpu, whole[:length])
    except CheckpointError:
        continue
    raise AssertionError(f"{length} of {len(whole)} bytes were accepted")
assert refused > 100, refused
"""
)


def run(program: str, kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_loaded_as_it_was_saved(kind: str) -> None:
    run(BEGIN + "again = FaissSearch(vectors, settings, cpu, whole)\n"
        "assert all(np.array_equal(a, b) for a, b in zip(built(vectors, 5), again(vectors, 5)))\n"
        "try:\n    FaissSearch(vectors + 1, settings, cpu, whole)\n"
        "except CheckpointError:\n    pass\n"
        "else:\n    assert kind == 'sq8'  # whose codes are rounded\n", kind)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in use from /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_crafted_numbers_take_no_memory_and_end_no_process(kind: str) -> None:
    run(CRAFTED, kind)
