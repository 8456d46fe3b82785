"""Small requests of raw rows, encoded in Python: the batch that the ETL makes, or left to it."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.etl import EtlConfig, FittedEtl, fit
from viviane.serving.encoding import RowEncoder
from viviane.serving.plain_rows import MOST_ROWS, plain_rows
from viviane.serving.vocabularies import vocabulary_index

COLUMNS = [
    {"name": "click", "type": "int"},
    {"name": "price", "type": "float"},
    {"name": "age", "type": "int"},
    {"name": "user", "type": "string"},
    {"name": "item", "type": "int"},
    {"name": "hist", "type": "int", "separator": "|"},
    {"name": "tags", "type": "string", "separator": ";"},
    {"name": "code", "type": "hex"},
]
CONFIG = {
    "input": {"columns": COLUMNS, "missing": ["", "NA"]},
    "labels": [{"name": "click"}],
    "dense": [
        {"name": "price", "operators": [{"type": "fill", "value": "mean"}, {"type": "log"}, {"type": "standardize"}]},
        {"name": "age", "operators": [{"type": "fill", "value": 0}, {"type": "clip", "min": 1, "max": 80},
                                      {"type": "min_max"}]},
        {"name": "old", "source": "age", "operators": [{"type": "fill", "value": -1}, {"type": "threshold", "at": 40}]},
    ],
    "categorical": [
        {"name": "user", "encoding": {"type": "categorify", "min_count": 2}},
        {"name": "item"},
        {"name": "squares", "source": "price", "operators": [{"type": "log_square"}]},
        {"name": "levels", "source": "price", "encoding": {"type": "bucketize", "borders": [-1.0, 0.0, 2.5]}},
        {"name": "decade", "source": "age", "operators": [{"type": "log"}], "encoding": {"type": "bucketize",
                                                                                          "quantiles": 4}},
        {"name": "hashed", "source": "user", "encoding": {"type": "hash", "num_ids": 50}},
        {"name": "code", "encoding": {"type": "hash", "num_ids": 40}},
        {"name": "number", "source": "item", "encoding": {"type": "hash", "num_ids": 30}},
        {"name": "hist", "kind": "sequence", "max_length": 3, "vocabulary": "item"},
        {"name": "first", "source": "tags", "kind": "multi_hot", "max_length": 2, "keep": "first"},
        {"name": "tags", "kind": "multi_hot"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def etl(tmp_path_factory) -> FittedEtl:
    rng = np.random.default_rng(0)
    lines = [",".join(column["name"] for column in COLUMNS)]
    for i in range(300):
        hist, tags = "|".join(map(str, rng.integers(0, 9, 1 + i % 4))), ";".join(f"t{n}" for n in rng.integers(0, 9, 2))
        lines.append(f"{i % 2},{rng.normal() * 5:.3f},{i % 90},u{i % 40},{i % 12 - 2},{hist},{tags},{i:x}")
    path = tmp_path_factory.mktemp("plain") / "raw.csv"
    path.write_text("\n".join(lines) + "\n")
    return fit(EtlConfig.from_dict(CONFIG), path)


@pytest.fixture(scope="module")
def encoders(etl) -> tuple[RowEncoder, RowEncoder]:
    """The encoder of a session, and one that gives everything to the ETL."""
    schema = etl.for_prediction().schema
    whole, slow = (RowEncoder(schema, etl, frozenset()) for _ in range(2))
    slow._plain = None
    return whole, slow


def same(found, wanted) -> None:
    for name in ("dense", "one_hot"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), name
    assert found.bags.keys() == wanted.bags.keys()
    for name, bag in found.bags.items():
        assert bag.values.dtype == wanted.bags[name].values.dtype
        assert torch.equal(bag.values, wanted.bags[name].values), name
        assert torch.equal(bag.offsets, wanted.bags[name].offsets), name


NUMBERS = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, math.nan, 2.0, 2.5, 7, -3, 1e-300, 5e-324])
TEXTS = st.none() | st.integers(-5, 45).map("u{}".format) | st.sampled_from(["", "NA", " ", "é", "u1 ", "\x00", "None"])
SHOWN = st.lists(st.integers(-3, 14).map(str), max_size=5).map("|".join)
ROWS = st.fixed_dictionaries({
    "price": NUMBERS,
    "age": st.none() | st.integers(-100, 200),
    "user": TEXTS,
    "item": st.none() | st.integers(-5, 15) | st.sampled_from([2**62, -(2**63)]),
    "hist": st.none() | SHOWN | st.lists(st.integers(-3, 14), max_size=5),
    "tags": st.none() | st.lists(st.integers(0, 12).map("t{}".format), max_size=4).map(";".join),
    "code": st.none() | st.integers(0, 2**64 - 1).map("{:x}".format) | st.sampled_from(["", "00FF", "NA"]),
})  # fmt: skip
ODD = st.sampled_from(["3", True, math.inf, 1e300, 2**70, b"u1", "\ud800", [1], ["u1", None], {}, "0x1", "1|b", object])


@settings(max_examples=25)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_the_bits_of_the_etl(encoders, rows) -> None:
    encoder, slow = encoders
    plain = encoder._plain.encode(rows)
    wanted, problems = slow.encode(rows, raw=True)
    if plain is not None:
        assert not problems
        same(plain, wanted)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    again = encoder._plain.encode(columns)
    assert (again is None) == (plain is None)
    if again is not None:
        same(again, wanted)


@pytest.mark.parametrize("size", [7, 200, MOST_ROWS])
@pytest.mark.parametrize("absent", [0, 0.2, 1])
def test_the_bits_of_the_etl_for_many_rows(encoders, size, absent) -> None:
    encoder, slow = encoders
    rng = np.random.default_rng(size)
    made = {
        "price": lambda: float(rng.choice([rng.normal() * 9, 0.0, -0.0, 2.0, 1e9, -1e-9])),
        "age": lambda: int(rng.integers(-50, 150)),
        "user": lambda: str(rng.choice(["u1", "u39", "u99", "NA", "", "é"])),
        "item": lambda: int(rng.choice([-2, 3, 9, 99, -(2**63)])),
        "hist": lambda: "|".join(map(str, rng.integers(-2, 12, rng.integers(0, 6)))),
        "tags": lambda: ";".join(f"t{n}" for n in rng.integers(0, 12, rng.integers(1, 4))),
        "code": lambda: f"{rng.integers(0, 2**40):x}",
    }
    rows = [{name: None if rng.random() < absent else make() for name, make in made.items()} for _ in range(size)]
    plain = encoder._plain.encode(rows)
    wanted, problems = slow.encode(rows, raw=True)
    assert plain is not None
    assert not problems
    same(plain, wanted)
    if absent == 0:
        same(encoder._plain.encode(pa.Table.from_pylist(rows)), wanted)
        same(encoder._plain.encode({name: np.array([row[name] for row in rows]) for name in made}), wanted)


@settings(max_examples=12)
@given(ROWS, st.sampled_from([column["name"] for column in COLUMNS[1:]]), ODD)
def test_whatever_a_value_is(encoders, row, name, value) -> None:
    encoder, slow = encoders
    rows = [{**row, name: value}, {**row, "hist": "1|2"}]
    found, wrong = encoder.encode(rows, raw=True)
    wanted, problems = slow.encode(rows, raw=True)
    assert [replace(one) for one in wrong] == [replace(one) for one in problems]
    same(found, wanted)


def test_what_is_made_here_and_what_is_left_to_the_etl(etl, encoders) -> None:
    encoder, _ = encoders
    row = {"price": 1.5, "age": 3, "user": "u1", "item": 4, "hist": "1|2", "tags": "t1", "code": "ff", "more": 1}
    assert encoder._plain.encode([row]) is not None
    assert encoder._plain.encode({name: np.array([value, value]) for name, value in row.items()}) is not None
    left = [
        [], [row] * (MOST_ROWS + 1), [{**row, "age": 2.0}], [row] * 9 + [{**row, "age": 2.0}],
        [{"price": 1.0}], [[1]], pa.table({"price": [1.0]}),
        {name: [value] * (1 + (name == "age")) for name, value in row.items()},
        row,
    ]  # fmt: skip
    for rows in left:
        assert encoder._plain.encode(rows) is None, rows
    schema = etl.schema
    for changes in (
        {"derived": [{"type": "missing_indicator", "name": "no_age", "source": "age"}]},
        {"categorical": [*CONFIG["categorical"][:-1], {"name": "tags", "source": ["user", "item"]}]},
        {"categorical": [{"name": "cost", "source": "price", "encoding": {"type": "hash", "num_ids": 9}}]},
    ):
        other = FittedEtl(EtlConfig.from_dict({**CONFIG, **changes}), etl.states, etl.borders, etl.vocabularies)
        own = schema if "derived" in changes else other.for_prediction().schema
        assert plain_rows(other.for_prediction(), own, "") is None


@pytest.mark.parametrize("values", [["b", "a", "é", ""], [5, -1, 2**63 - 1, 0, -2], [1.5, -2.0, 0.0]])
def test_an_index_of_either_form(values) -> None:
    small, large = vocabulary_index(pa.array(values)), vocabulary_index(pa.array(values), most_in_a_dict=0)
    for find in (small, large):
        assert [find(value) for value in values] == list(range(len(values)))
        assert find("none") is None
        assert find(77) is None
