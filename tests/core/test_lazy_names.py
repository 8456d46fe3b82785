"""Names of packages that are imported on first use: all are there, and nothing else is loaded for them."""

import json
import subprocess
import sys

import pytest

import viviane.config
import viviane.etl

LATER = ("viviane.etl.infer", "viviane.etl.describe", "viviane.etl.drawing", "viviane.etl.sequence_job")
LATER += ("viviane.etl.spark", "viviane.config.optimizers", "viviane.config.solver", "duckdb", "ibis", "pandas")


@pytest.mark.parametrize("package", [viviane.etl, viviane.config])
def test_every_public_name_is_there_and_listed(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009 - mypy knows that there is none


def test_what_runs_an_etl_loads_no_more_than_it_needs() -> None:
    program = "import sys, json; from viviane.etl import run; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert not set(LATER) & set(json.loads(done.stdout))


IMPORT = """
import gc, json, sys, weakref
class Node: pass
def cycle():
    one = Node(); one.self = one
    return weakref.ref(one)
gc.collect()
settings = sys.argv[1]
if settings == "off": gc.disable()
if settings == "frozen": gc.freeze()
before, passes = cycle(), []
gc.callbacks.append(lambda phase, info: passes.append(phase))
from viviane.etl import run
gc.callbacks.clear()
state = gc.isenabled(), gc.get_freeze_count() > 2000
gc.collect()
print(json.dumps([len(passes), *state, before() is None]))
"""


@pytest.mark.parametrize("settings", ["default", "off", "frozen"])
def test_imports_look_for_garbage_hardly_and_leave_the_collector_as_it_was(settings: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", IMPORT, settings], capture_output=True, text=True, check=True)
    passes, enabled, frozen, collected = json.loads(done.stdout)
    assert enabled == (settings != "off")
    assert frozen == (settings == "frozen")
    assert collected, "what was garbage is found by the next full collection"
    assert (passes < 40) == (settings != "frozen")
