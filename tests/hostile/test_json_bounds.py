"""Bounds and strictness of JSON from untrusted sources, in every file that is loaded."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.core.json_files import MAX_JSON_DEPTH, expected_form, json_or_text, parse_json, read_json

BOMBS = {
    "deep list": "[" * 100_000,
    "deep closed list": "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1),
    "deep object": '{"a":' * 50_000,
    "huge integer": '{"rows": ' + "9" * 5000 + "}",
    "integer beyond 64 bits": '{"rows": 18446744073709551616}',
    "infinite": '{"rows": 1e999}',
    "constant": '{"rows": NaN}',
    "nul": '{"a\\u0000": 1}',
    "half of a pair": '{"a": "\\ud800"}',
    "twice": '{"a": 1, "a": 2}',
    "bytes": "\x80",
    "empty": "",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_with_the_file_s_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "info.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"info\.json"):
        read_json(file, error=DataError)


def test_the_size_is_bounded_before_anything_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "big.json"
    with file.open("wb") as stream:
        stream.truncate(3_000_000_000)
    with pytest.raises(ConfigError, match="too large"):
        read_json(file, max_bytes=1 << 20)


def test_limits_are_inside() -> None:
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert json.dumps(parse_json(deep)) == deep
    assert parse_json("[18446744073709551615, -9223372036854775808, 1.7e308]")[:2] == [2**64 - 1, -(2**63)]
    assert parse_json('"\\ud83d\\ude00 \\\\u0000"') == "\U0001f600 \\u0000"


def test_a_missing_file_is_also_python_s_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read_json(tmp_path / "absent.json")
    assert isinstance(caught.value, ConfigError)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
def test_what_json_writes_is_read_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_parsed_or_refused(data: str | bytes) -> None:
    try:
        parse_json(data, where="x.json")
    except ConfigError:
        return
    json.loads(data)


@given(st.text(max_size=40) | st.sampled_from(list(BOMBS.values())))
def test_a_value_of_the_command_line_is_json_text_or_refused(text: str) -> None:
    try:
        found = json_or_text(text, where="--set solver.lr")
    except ConfigError:
        return
    assert found == text or json.loads(text) == found


def test_python_s_complaints_about_content_are_of_the_file() -> None:
    for broken in (lambda: {}["a"], lambda: int([]), lambda: None.x, lambda: [1][int("1")], lambda: 1 // 0):
        with pytest.raises(DataError, match=r"info\.json"), expected_form("info.json", DataError):
            broken()
    with pytest.raises(ConfigError, match="own"), expected_form("info.json", DataError):
        raise ConfigError("own")


def crafted(file: Path, change) -> Path:
    """Rewrite the members of an etl.zip with matching check sums, after `change` of a dict of them."""
    import hashlib

    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    change(members)
    manifest["members"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {"manifest.json": json.dumps(manifest).encode(), **members}.items():
            archive.writestr(name, data)
    return file


@pytest.fixture
def etl(tmp_path: Path) -> Path:
    from viviane.etl import EtlConfig, fit

    raw = tmp_path / "raw.csv"
    raw.write_text("click,item,price\n1,pen,1.5\n0,ink,2\n1,pen,4\n")
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]},
        labels=[{"name": "click"}], categorical=[{"name": "item"}],
        dense=[{"name": "price", "operators": [{"type": "fill", "value": "mean"}, {"type": "standardize"}]}],
    )  # fmt: skip
    fit(config, raw).save(tmp_path / "etl.zip")
    return tmp_path / "etl.zip"


def replaced(name: str, old: bytes, new: bytes):
    def change(members: dict[str, bytes]) -> None:
        assert old in members[name]
        members[name] = members[name].replace(old, new, 1)

    return change


CRAFTED = {
    "no config": lambda members: members.pop("config.json"),
    "no schema": lambda members: members.pop("schema.json"),
    "no learned": lambda members: members.pop("learned.json"),
    "no vocabulary": lambda members: members.pop("vocabularies/00000.parquet"),
    "vocabulary is text": lambda members: members.update({"vocabularies/00000.parquet": b"pen"}),
    "list": lambda members: members.update({"learned.json": b"[]"}),
    "bomb": lambda members: members.update({"learned.json": b"[" * 99999}),
    "no states": lambda members: members.update({"learned.json": b'{"states": {}, "borders": {}, "vocabularies": []}'}),
    "state of another type": replaced("learned.json", b'"std":', b'"std": null, "x":'),
    "other schema": replaced("schema.json", b'"num_ids": 5', b'"num_ids": 9'),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_etl_is_a_data_error(change, etl: Path) -> None:
    from viviane.etl import FittedEtl

    FittedEtl.load(etl)
    with pytest.raises(DataError, match="etl"):
        FittedEtl.load(crafted(etl, change))


def test_compressed_and_overstated_members_are_refused_before_they_are_read(etl: Path) -> None:
    from viviane.etl import FittedEtl

    with zipfile.ZipFile(etl, "a") as archive, archive.open(zipfile.ZipInfo("zeros"), "w", force_zip64=True) as member:
        member.write(b"0")
    with zipfile.ZipFile(etl, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("bomb", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 20))
    assert etl.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="compressed"):
        FittedEtl.load(etl)


def test_a_vocabulary_of_values_that_repeat_themselves_is_read_again(tmp_path: Path) -> None:
    """Three million equal letters take few bytes when compressed."""
    from viviane.etl import EtlConfig, FittedEtl, run

    (tmp_path / "raw.csv").write_text("click,item\n" + "0,pen\n1,ink\n" * 9 + "1," + "x" * 3_000_000 + "\n")
    config = {
        "input": {"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        "labels": [{"name": "click"}], "categorical": [{"name": "item"}],
    }  # fmt: skip
    run(EtlConfig.from_dict(config), tmp_path / "raw.csv", tmp_path / "clean")
    fitted = FittedEtl.load(tmp_path / "clean/etl.zip")
    assert max(map(len, fitted.vocabularies["item"].values.to_pylist())) == 3_000_000


def test_a_dictionary_that_repeats_one_value_is_refused(etl: Path) -> None:
    """Few bytes that would become 200 GB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from viviane.etl import FittedEtl
    from viviane.etl.archive import _table

    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000_000, pa.int32()), ["x" * 100_000])
    sink = io.BytesIO()
    pq.write_table(pa.table({"value": repeated, "count": [1] * 2_000_000}), sink, store_schema=False)
    with pytest.raises(DataError, match="dictionary"):
        _table(sink.getvalue())
    FittedEtl.load(etl)


def test_every_use_of_json_goes_through_the_bounded_reader() -> None:
    """The reader itself, the server's strict one, and what processes of one job exchange are the exceptions."""
    allowed = {
        "core/json_files.py", "serving/server/json_wire.py", "parallel/watch.py", "parallel/group.py",
        "embedding/lookup_spec.py", "serving/triton/python_model.py",
            "training/trackers.py",  # what it wrote itself in the same line
    }  # fmt: skip
    import viviane

    root = Path(viviane.__file__).parent
    found = {
        str(file.relative_to(root)) for file in root.rglob("*.py")
        if "json.loads(" in (text := file.read_text()) or "json.load(" in text
    }  # fmt: skip
    assert found <= allowed


def test_all_errors_survive_a_process_border() -> None:
    import pickle

    from viviane.core import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VivianeError)]
    assert len(kinds) > 12
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("broken", where="x", value=3)))
        assert (type(back), str(back), back.where) == (kind, "broken\n  where:   x\n  value:   3", "x")
