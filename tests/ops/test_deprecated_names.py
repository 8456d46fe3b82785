"""Names that were changed still work, and say which name replaces them."""

import importlib
import sys

import pytest

from viviane.ops import dense_update, host_control_block

RENAMED = {"Room": "Workspace", "judge": "update_status", "judge_scaled": "update_scaled_status"}


@pytest.mark.parametrize("old", RENAMED)
def test_old_names_of_the_dense_update(old):
    with pytest.warns(DeprecationWarning, match=RENAMED[old]):
        assert getattr(dense_update, old) is getattr(dense_update, RENAMED[old])


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        dense_update.no_such_name  # noqa: B018


def test_the_old_module_of_the_host_control_block():
    sys.modules.pop("viviane.ops.mailbox", None)
    with pytest.warns(DeprecationWarning, match="host_control_block"):
        old = importlib.import_module("viviane.ops.mailbox")
    assert old.answer is host_control_block.write_back
    assert old.read_row is host_control_block.read_row
