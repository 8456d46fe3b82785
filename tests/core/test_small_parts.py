"""Registry, optional imports, devices, seeds, logging."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, MissingExtraError
from viviane.core.optional import require
from viviane.core.registry import Registry
from viviane.core.seeds import derive_seed, seed_everything


def test_registry_answers_unknown_names_with_the_nearest() -> None:
    layers: Registry[int] = Registry("layer")
    layers.register("Concat")(1)
    layers.register("Add")(2)
    assert list(layers) == ["Concat", "Add"]
    assert "Concat" in layers
    assert "concat" not in layers
    with pytest.raises(ConfigError, match=r"unknown layer\n  value:   'Conct'\n  do:      did you mean 'Concat'\?"):
        layers["Conct"]
    with pytest.raises(ConfigError, match="layer 'Add' is registered twice"):
        layers.register("Add")(3)


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_library.part", extra="etl", purpose="cleaning raw logs")
    assert "cleaning raw logs needs the library 'no_such_library'" in str(caught.value)
    assert "pip install 'viviane[etl]'" in str(caught.value)


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, cpu, cuda, cuda:0"):
        resolve_device(name)


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"the GPU does not exist on this machine(.|\n)*0 GPU\(s\)"):
        resolve_device("cuda")


def test_derived_seeds_are_kept_over_versions() -> None:
    # Written down once: a change would silently change every initial value and every shuffle.
    assert derive_seed(0, "reader", 1) == KNOWN_SEED
    assert len({derive_seed(seed, name) for seed in range(50) for name in "abcdefgh"}) == 400
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in range(100))
    assert derive_seed(1, 23) != derive_seed(12, 3)


KNOWN_SEED = 5638439543641133468


def test_seeding_reaches_every_generator() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(7)
    first = draw()
    assert draw() != first
    seed_everything(7)
    assert draw() == first


@pytest.mark.parametrize(("setup", "wanted"), [
    ("", "hello\n"), ("logging.basicConfig(format='%(name)s: %(message)s')", "viviane.etl: hello\n"),
    ("logging.getLogger('viviane').addHandler(logging.NullHandler())", ""),
])  # fmt: skip
def test_warnings_are_seen_unless_the_program_says_otherwise(setup: str, wanted: str) -> None:
    program = f"""
import logging
from viviane.core.logging import get_logger
{setup}
get_logger("etl").warning("hello")
get_logger("etl").info("what happens")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == wanted


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_a_gpu_has_the_number_that_tensors_on_it_have(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device(name) == torch.device("cuda", 1)
