"""`import viviane`, and every name in it, is quick and loads none of the libraries that only some commands need."""

import json
import subprocess
import sys

# Seconds of processor time above torch's own import; pyarrow and pydantic take most of it. Three times what was
# measured when it was set, so that it fails for a new heavy import and not for a slow machine.
BUDGET_SECONDS = 0.9
NEVER = {
    *("duckdb", "ibis", "pandas", "rich", "typer", "tensorboard", "safetensors", "fsspec", "numba", "triton"),
    *("sklearn", "scipy", "matplotlib", "pyspark", "tensorflow", "redis", "rocksdict", "onnx", "onnxruntime", "polars"),
}

PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import viviane
for name in viviane.__all__:  # names are imported when they are first used
    getattr(viviane, name)
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "loaded": sorted(set(sys.modules) - before)}))
"""


def measure() -> dict:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_is_light() -> None:
    loaded = {name.split(".")[0] for name in measure()["loaded"]}
    assert "viviane" in loaded
    assert not loaded & NEVER, f"import viviane loads {sorted(loaded & NEVER)}; import them where they are used"


def test_import_is_quick() -> None:
    best = min(measure()["seconds"] for _ in range(3))
    assert best < BUDGET_SECONDS, f"viviane and its names take {best:.2f} s above torch: see python -X importtime"
