"""The layers on a GPU: what `scenarios.py` finds on torch, and on JAX where it sees the GPU."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCENARIOS = Path(__file__).parent / "scenarios.py"
STEPS = {"sgd": 50, "adagrad": 50, "adam": 50, "schedule": 10, "momentum": 10, "sgd_twice": 10}
OTHERS = ("dynamic", "bags", "saving", "evaluation", "frozen", "mixed", "keras_rs_configs", "subclassed",
          "ways_through_graphs", "partly_lost", "refused_in_training")  # fmt: skip


@cache
def results(backend: str) -> dict[str, Any]:
    # The scenarios hide GPUs where nothing is set. JAX would take three quarters of the memory, which torch needs too.
    environment = {**os.environ, "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "0",
                   "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), *STEPS, *OTHERS], capture_output=True, text=True, env=environment,
        timeout=280, check=False,
    )  # fmt: skip
    found = dict(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert found, done.stderr[-3000:]
    return found


def has_backend(backend: str) -> bool:
    if find_spec("keras") is None or find_spec(backend) is None:
        return False
    return backend != "jax" or any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@pytest.fixture(params=["torch", "jax"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not has_backend(name):
        pytest.skip(f"Keras on {name} has no GPU here")
    return name


def result(backend: str, name: str) -> Any:
    found = results(backend)
    assert name in found, f"the process ended before {name}"
    assert "error" not in found[name], found[name]["error"]
    return found[name]


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_those_of_the_stock_layer(backend: str, name: str) -> None:
    for form, found in result(backend, name).items():
        assert found["updates"] == STEPS[name], form
        # float32 values near 1. Keras on torch adds the gradients of a key that comes twice in no fixed order.
        assert found["loss"] <= 2e-6, form
        assert found["rows"] <= 2e-6, form


def test_bags_dynamic_tables_and_files(backend: str) -> None:
    assert all(apart < 1e-6 for apart in result(backend, "bags").values())
    dynamic = result(backend, "dynamic")
    assert dynamic["same_keys"]
    assert dynamic["updates"] == 5
    saved = result(backend, "saving")
    assert saved["rows"]
    assert saved["predictions"] == 0.0
    assert result(backend, "evaluation") == {"same": True, "updates": 0}
    assert result(backend, "frozen") == {"same": True, "updates": 0}


def test_other_models(backend: str) -> None:
    for form, found in result(backend, "mixed").items():
        assert found["updates"] == 20, form
        assert found["rows"] < 2e-3, form  # gradients pass through float16
    assert result(backend, "keras_rs_configs")["loaded"] == 0.0
    assert result(backend, "subclassed")["apart"] <= 1e-6
    assert all(apart <= 1e-6 for apart in result(backend, "ways_through_graphs")["apart"].values())


def test_errors_reach_the_user(backend: str) -> None:
    assert "got no gradient" in result(backend, "partly_lost")["raised"]
    assert "not a whole number" in result(backend, "refused_in_training")["fast"]["raised"]
