from pathlib import Path
from typing import Any

import pytest

from viviane.core.errors import ConfigError, SchemaError
from viviane.data.columns import arrow_types
from viviane.schema import CategoricalColumn, Schema

ITEM = {"name": "item", "num_ids": 10}


def make(**changes: Any) -> Schema:
    parts: dict[str, Any] = {
        "labels": [{"name": "click"}],
        "dense": [{"name": "price"}, {"name": "image", "dim": 3}],
        "categorical": [
            ITEM,
            {"name": "tags", "num_ids": 7, "kind": "multi_hot", "weights": "tag_weights"},
            {"name": "seen", "num_ids": 10, "kind": "sequence", "max_length": 5, "vocabulary": "item"},
        ],
        "sample_weight": "importance",
        "ignored": ["time"],
    }
    return Schema(**{**parts, **changes})


def test_columns_stand_in_order() -> None:
    schema = make()
    names = ["click", "price", "image", "item", "tags", "seen", "tag_weights", "importance"]
    assert schema.column_names == names
    assert schema.num_dense == 4
    assert [column.name for column in schema.one_hot] == ["item"]
    assert [column.name for column in schema.bags] == ["tags", "seen"]


def test_a_shared_vocabulary_is_one_table() -> None:
    assert make().categorical_column("seen").table == "item"
    with pytest.raises(ConfigError, match="columns of vocabulary 'item' differ in num_ids"):
        make(categorical=[ITEM, {"name": "seen", "num_ids": 11, "vocabulary": "item"}])


def test_reserved_ids_are_fixed() -> None:
    assert make().reserved.to_dict() == {"padding": 0, "missing": 1, "unknown": 2, "first": 3}
    with pytest.raises(ConfigError, match="reserved"):
        make(reserved={"padding": 1})


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ({"hotness": 3}, "hotness is for bags and sequences"),
        ({"kind": "sequence", "max_length": 3, "hotness": 4}, "at most max_length"),
        ({"kind": "sequence"}, "the sequence column 'c' needs max_length"),
        ({"kind": "one_hot", "max_length": 3}, "takes neither max_length nor weights"),
        ({"kind": "sequence", "max_length": 3, "weights": "w"}, "takes no weights; make it multi_hot"),
        ({"num_ids": 2**31 + 1}, "2147483649 ids do not fit int32; set dtype to int64"),
        ({"num_ids": 0}, "num_ids"),
        ({"num_ids": 2**63, "dtype": "int64"}, "num_ids"),
        ({"kind": "sequence", "max_length": 2**31}, "max_length"),
        ({"kind": "multi_hot", "hotness": 2**31}, "hotness"),
    ],
)
def test_contradictions_in_a_column(column: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CategoricalColumn(**{"name": "c", "num_ids": 4, **column})


def test_a_vector_is_no_longer_than_a_list_of_arrow() -> None:
    assert str(arrow_types(make(dense=[{"name": "v", "dim": 2**31 - 1}]))["v"]).endswith("[2147483647]")
    with pytest.raises(ConfigError, match="dim"):
        make(dense=[{"name": "v", "dim": 2**31}])


def test_int32_holds_exactly_two_to_the_31_ids() -> None:
    assert CategoricalColumn(name="c", num_ids=2**31).dtype == "int32"


def test_names_are_used_once_over_all_kinds() -> None:
    with pytest.raises(ConfigError, match=r"used twice: item, time"):
        make(dense=[{"name": "item"}, {"name": "time"}])
    with pytest.raises(ConfigError, match="used twice: importance"):
        make(sample_weight="importance", ignored=["importance"])


def test_a_schema_needs_a_feature() -> None:
    with pytest.raises(ConfigError, match="at least one dense or categorical column"):
        Schema(labels=[{"name": "click"}])


def test_unknown_columns_are_answered_with_the_nearest() -> None:
    with pytest.raises(SchemaError, match=r"'itme'(.|\n)*did you mean 'item'\?"):
        make().column("itme")
    with pytest.raises(SchemaError, match=r"not categorical(.|\n)*allowed: item, tags, seen"):
        make().categorical_column("price")


def test_select_drops_the_rest_with_their_weights() -> None:
    schema = make().select(["click", "item"])
    assert schema.column_names == ["click", "item", "importance"]
    assert set(schema.ignored) == {"time", "price", "image", "tags", "seen", "tag_weights"}
    with pytest.raises(SchemaError, match="no such column"):
        make().select(["nothing"])


def test_a_schema_comes_back_from_its_file(tmp_path: Path) -> None:
    schema = make()
    assert schema.save(tmp_path) == tmp_path / "schema.json"
    assert Schema.load(tmp_path) == Schema.load(tmp_path / "schema.json") == schema
    with pytest.raises(SchemaError, match="no schema here"):
        Schema.load(tmp_path / "elsewhere.json")


def test_difference_says_what_a_model_depends_on() -> None:
    other = make(
        dense=[{"name": "price"}], categorical=[{"name": "item", "num_ids": 11}, {"name": "new", "num_ids": 4}]
    )
    assert make().difference(other) == [
        "column 'image' is missing",
        "column 'item': num_ids is 11, was 10",
        "column 'new' is new",
        "column 'seen' is missing",
        "column 'tags' is missing",
    ]
    assert make().difference(make(ignored=[])) == []
