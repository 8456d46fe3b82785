"""The comparison: libraries learn the same, absent ones are said, clocks and ratios are right."""

import time

import pytest
import torch

from viviane.bench import embedding
from viviane.bench.embedding import Comparison, LeftOut, Measurement, choose_libraries, compare, measure_library
from viviane.bench.libraries import LIBRARIES, OURS, Library
from viviane.bench.timing import measure
from viviane.bench.workload import Draw, Load, Tables
from viviane.core.errors import ConfigError

CPU = torch.device("cpu")


def figure(library: str, operation: str, ms: float) -> Measurement:
    return Measurement(operation, library, 8, 16, 5.0, ms, ms, ms, ms, 16 / ms * 1e3, 1.0)


def test_the_clock_counts_what_a_step_takes() -> None:
    seen: list[int] = []

    def step(i: int) -> None:
        seen.append(i)
        time.sleep(0.02 if len(seen) == 1 else 0.002)

    times = measure(step, 3, CPU, 0.05)
    assert seen[:7] == [0, 0, 1, 2, 0, 1, 2]
    assert times.first_ms >= 20
    assert 2 <= times.best_ms <= times.median_ms <= times.high_ms


def test_each_batch_counts_by_its_own_fastest_time() -> None:
    times = measure(lambda i: time.sleep(0.001 if i == 0 else 0.005), 2, CPU, 0.05)
    # Half of 1 ms and half of 5 ms; sleep is never shorter than asked.
    assert 3 <= times.best_ms < 5


def test_processor_time_leaves_waiting_out() -> None:
    times = measure(lambda _: time.sleep(0.01), 2, CPU, 0.05, time.process_time)
    assert times.best_ms < 5
    with pytest.raises(ConfigError, match="does not measure a GPU"):
        compare([Tables((3,), 2, "sgd", torch.device("cuda"))], [Draw(4)], ["viviane"], processor_time=True)


def test_ours_and_torch_learn_the_same() -> None:
    tables = Tables((40, 3), 5, "sgd", CPU, lr=0.5)
    ids = [torch.tensor([[0, 1], [39, 1], [0, 2]], dtype=torch.int32)]
    load = Load(ids, torch.arange(30.0).view(3, 10))
    moved = []
    for name in (OURS, "torch"):
        steps = LIBRARIES[name].build(tables)(load)
        before = steps.forward(0).clone()
        steps.train(0)
        moved.append(steps.forward(0) - before)
    # Both move a row by -0.5 times the sum of its gradients, up to 49; rows near 1 are rounded to 2^-24 of it.
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-5)
    assert moved[0].abs().max() > 1


def test_a_library_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(tables: Tables) -> None:
        raise AssertionError("built although it is not installed")

    absent = Library(
        "nothing", ("no_such_library",), "no-such", {"cpu": "pip install no-such"}, {"cpu": ("sgd",)}, never
    )
    monkeypatch.setitem(LIBRARIES, "absent", absent)
    found = measure_library("absent", Tables((3,), 2, "sgd", CPU), [Draw(4)], 0.0, True)
    assert found == [LeftOut("absent", None, "not installed", "pip install no-such")]


def test_a_library_that_is_broken_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("undefined symbol: x\nmore")

    monkeypatch.setattr(embedding.importlib, "import_module", fail)
    found = embedding.why_absent("fbgemm", LIBRARIES["fbgemm"], CPU)
    assert found == LeftOut("fbgemm", None, "cannot be imported: undefined symbol: x", None)


def test_a_rule_that_a_library_lacks_is_said() -> None:
    found = measure_library("torch", Tables((3,), 2, "ftrl", CPU), [Draw(4)], 0.0, True)
    assert found == [LeftOut("torch", "ftrl", "has no ftrl on cpu", None)]


def test_peers_are_chosen() -> None:
    assert choose_libraries("auto", CPU) == ["viviane", "torch", "fbgemm", "torchrec", "keras"]
    assert choose_libraries("none", CPU) == ["viviane"]
    assert choose_libraries("keras, torch", CPU) == ["viviane", "keras", "torch"]
    assert "keras" not in choose_libraries("auto", torch.device("cuda"))
    with pytest.raises(ConfigError, match="did you mean 'torchrec'"):
        choose_libraries("torchrek", CPU)
    with pytest.raises(ConfigError, match="not supported on cuda"):
        choose_libraries("keras", torch.device("cuda"))


def test_tables_beyond_the_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        compare([Tables((2**40,), 128, "adam", CPU)], [Draw(4)], ["viviane"])


def test_ratios_are_of_the_same_operation() -> None:
    figures = (figure(OURS, "lookup", 2.0), figure("torch", "lookup", 5.0), figure("torch", "adam", 4.0))
    found = Comparison(Tables((3,), 2, "sgd", CPU), "cpu", 10.0, figures, ())
    assert [found.times_faster(one) for one in figures] == [1.0, 2.5, None]
    lines = found.to_dict()["measurements"]
    assert [line["ours_is_faster_by"] for line in lines] == [1.0, 2.5, None]
    assert [line["share_of_copy"] for line in lines] == [0.1, 0.1, 0.1]
