"""What all tests share: hypothesis without deadlines, since the machine may be busy with other test processes.

Where CI is set the examples are the same in every run, so that a change is judged by what it does and not by luck;
elsewhere each run draws new ones.
"""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from warm import Warm

settings.register_profile("viviane", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("viviane")


def pytest_sessionstart() -> None:
    """Collect no garbage while modules are imported: they stay, and each look at all of them takes a second."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[Any], list[Any]]:
    """Look for docstring examples in src/ alone: to find none in hundreds of test files takes seconds."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(tryfirst=True)  # before the tests that a mark deselects are taken out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow_tests.txt as slow; when all are collected, refuse a line that names none of them."""
    lines = (Path(__file__).parent / "slow_tests.txt").read_text().splitlines()
    slow = {line: False for line in lines if line and not line.startswith("#")}
    for item in items:
        for name in (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]):
            if name in slow:
                slow[name] = True
                item.add_marker(pytest.mark.slow)
    files = {item.nodeid.partition("::")[0] for item in items}  # others need a GPU, or a library that is not there
    unknown = [name for name, found in slow.items() if not found and name.partition("::")[0] in files]
    if config.args == ["src", "tests"] and unknown:
        raise pytest.UsageError(f"tests/slow_tests.txt names tests that are not there: {', '.join(unknown)}")


def pytest_collection_finish() -> None:
    """Keep what collecting imported out of garbage collections: one took a second, and tests ask for many."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Set the collector back, or Triton's bindings report what was kept as leaks, a page for each process."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Runs Python programs as subprocess.run does, without the seconds that imports take."""
    started = Warm(tmp_path_factory.mktemp("warm"))
    yield started
    started.close()
