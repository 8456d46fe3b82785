"""Programs are run by the tests, not collected as tests: without the installed module there is no `hugectr`."""

import threading
from collections.abc import Iterator

import pytest

from viviane.compat.hugectr.reading import close_readers

collect_ignore_glob = ["programs/*"]


def reader_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("viviane-reader")]


@pytest.fixture(autouse=True)
def no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A script ends without a thread of ours; a model that a test made by itself is closed here."""
    yield
    if "hugectr_numbers" in request.node.nodeid:
        close_readers()
    assert not reader_threads()
