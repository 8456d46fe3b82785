import pickle

import pytest

from viviane.core.errors import ConfigError, DataError, KeyRangeError, VivianeError, suggest


def test_every_part_has_its_line() -> None:
    error = VivianeError("key out of range", where="feature 'c'", value="x", allowed="0 <= key < 5", fix="hash it")
    assert str(error) == (
        "key out of range\n  where:   feature 'c'\n  value:   'x'\n  allowed: 0 <= key < 5\n  do:      hash it"
    )


def test_absent_parts_have_none_and_none_is_a_value() -> None:
    assert str(VivianeError("bad")) == "bad"
    assert str(VivianeError("bad", value=None)) == "bad\n  value:   None"


@pytest.mark.parametrize("kind", [VivianeError, ConfigError, KeyRangeError])
def test_errors_cross_process_borders_whole(kind: type[VivianeError]) -> None:
    error = pickle.loads(pickle.dumps(kind("bad", where="here", value=3, fix="do")))
    assert type(error) is kind
    assert str(error) == "bad\n  where:   here\n  value:   3\n  do:      do"
    assert (error.what, error.where, error.value, error.fix) == ("bad", "here", 3, "do")


def test_they_are_also_what_python_programs_expect() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(KeyRangeError, IndexError)


def test_suggestions() -> None:
    assert suggest("Concta", ["Concat", "Add"]) == "did you mean 'Concat'?"
    assert suggest("zzz", ["b", "a"]) == "choose one of: a, b"


def test_messages_leave_out_the_middle_of_long_texts() -> None:
    path = "a" * 2500 + "b" * 2500
    error = DataError("no file", where=path, value=path, allowed=path, fix=path)
    assert len(str(error)) < 6000
    assert str(error).splitlines()[1].endswith("b")
    assert "(5,000 characters)" in str(error)
    assert (error.where, error.value) == (path, path)
    assert "too long to show" in str(DataError("a number", value=10**5000))
