"""`import viviane`, and every name in it, is quick and loads none of the libraries that only some commands need."""

import json
import subprocess
import sys

# Processor time above torch's own import, as a share of that import, which a slow or busy machine stretches alike;
# pyarrow and pydantic take most of it. Twice what was measured when it was set, so that a new heavy import fails.
BUDGET_SHARE = 1.2
NEVER = {
    *("duckdb", "ibis", "pandas", "rich", "typer", "tensorboard", "safetensors", "fsspec", "numba", "triton"),
    *("sklearn", "scipy", "matplotlib", "pyspark", "tensorflow", "redis", "rocksdict", "onnx", "onnxruntime", "polars"),
}

PROGRAM = """
import json, sys, time
begin = time.process_time()
import torch
before = set(sys.modules)
start = time.process_time()
import viviane
for name in viviane.__all__:  # names are imported when they are first used
    getattr(viviane, name)
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "torch": start - begin, "loaded": sorted(set(sys.modules) - before)}))
"""


def measure() -> dict:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_is_light() -> None:
    loaded = {name.split(".")[0] for name in measure()["loaded"]}
    assert "viviane" in loaded
    assert not loaded & NEVER, f"import viviane loads {sorted(loaded & NEVER)}; import them where they are used"


def test_import_is_quick() -> None:
    best = min(one["seconds"] / one["torch"] for one in (measure() for _ in range(3)))
    assert best < BUDGET_SHARE, f"viviane and its names take {best:.2f} of torch's own import: see python -X importtime"
