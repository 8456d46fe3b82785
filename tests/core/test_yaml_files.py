import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.config import Solver
from viviane.core.errors import ConfigError, ConfigNotFoundError
from viviane.core.yaml_files import parse_yaml, read_yaml, yaml_text


def read(text):
    return parse_yaml(text, where="run.yaml")


def test_scalars_are_those_of_json():
    text = "{a: 1e-3, b: no, c: 12:30, d: 2024-06-01, e: 010, f: -.5, g: null, h: true, i: '1', j: 1_000, k: , l: 0x10}"
    assert read(text) == {
        "a": 0.001, "b": "no", "c": "12:30", "d": "2024-06-01", "e": 10, "f": -0.5, "g": None, "h": True, "i": "1",
        "j": "1_000", "k": None, "l": "0x10",
    }  # fmt: skip


def test_a_file_of_settings_equals_its_json(tmp_path):
    settings = {"batch_size": 512, "lr": 1e-3, "target": {"auc": 0.8}}
    (tmp_path / "solver.json").write_text(json.dumps({"$schema": "solver.schema.json", **settings}))
    (tmp_path / "solver.yaml").write_text("# comment\nbatch_size: 512\nlr: 1e-3\ntarget:\n  auc: 0.8\n")
    assert Solver.from_json_file(tmp_path / "solver.yaml") == Solver.from_json_file(tmp_path / "solver.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", r"the key 'a' is repeated"),
        ("1: 2\n", r"the key 1 is not a text"),
        ("a: &x [1]\nb: *x\n", r"anchors and aliases"),
        ("a: !!python/object/apply:os.system ['true']\n", r"the tag .* is not read"),
        ("a: 1\n---\nb: 2\n", r"another document"),
        ("a: [1, 2\nb: 3\n", r"line 2"),
        ("a: 99999999999999999999999\n", r"out of range"),
        ("a: \x07\n", r"special characters|not plain"),
        ("[" * 200 + "]" * 200, r"deep|nest"),
        ("[" * 100_000, r"not plain YAML"),
    ],
)
def test_what_json_cannot_hold_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ConfigError, match=r"not plain YAML[\s\S]*run\.yaml"):
        read(b"a: \xff\xfe\n")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigNotFoundError, match=r"none\.yaml"):
        read_yaml(tmp_path / "none.yaml")


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS | st.sampled_from(["no", "on", "1e-3", "12:30", "0x1f", "~", "null", "2024-01-01", "=", ""])
)  # fmt: skip


@given(st.recursive(SCALARS, lambda one: st.lists(one, max_size=4) | st.dictionaries(TEXTS, one, max_size=4)))
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(data: object) -> None:
    assert parse_yaml(yaml_text(data), where="x.yaml") == data


def test_lists_that_are_one_object_are_written_twice() -> None:
    same = ["a"]
    assert yaml_text({"x": same, "y": same}) == "x:\n- a\ny:\n- a\n"
