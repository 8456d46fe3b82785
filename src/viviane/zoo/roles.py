"""Which columns play which part in a model: given by name, or found in the schema where there is one choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator

from viviane.core.errors import SchemaError
from viviane.schema import CategoricalColumn, DenseColumn, Schema

Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(lambda one: (one,) if isinstance(one, str) else one)]
Pair: TypeAlias = tuple[CategoricalColumn, CategoricalColumn]


def history_pairs(schema: Schema, history: Sequence[str] | None, target: Sequence[str] | None) -> list[Pair]:
    """Return the histories, each with the target column that it is compared with.

    Left out, the histories are the sequence columns of the schema, and their targets the one-hot columns of the same
    vocabularies.

    Raises:
        SchemaError: no history, a pair that does not share its vocabulary, or histories of several lengths.

    Example:
        >>> schema = Schema(categorical=[
        ...     {"name": "seen", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> [(a.name, b.name) for a, b in history_pairs(schema, None, None)]
        [('seen', 'item')]
    """
    if history is None:
        history = [column.name for column in schema.categorical if column.kind == "sequence"]
    if not history:
        fix = "give the schema a column of kind 'sequence', or name one: history='clicked_items'"
        raise SchemaError("the model needs a history, and the schema has no sequence column", fix=fix)
    sequences = [schema.categorical_column(name) for name in history]
    for column in sequences:
        if column.kind == "one_hot" or column.max_length is None:
            fix = "give it kind 'sequence' and max_length in the schema"
            raise SchemaError("a history is a column of several ids", where="history", value=column.name, fix=fix)
    if target is None:
        targets = [_only_target(schema, column) for column in sequences]
    else:
        targets = [one_id(schema, name, "target") for name in target]
    if len(targets) != len(sequences):
        value = f"history {', '.join(history)}; target {', '.join(one.name for one in targets)}"
        raise SchemaError("each history is compared with a target of its own", value=value, fix="name as many targets")
    for sequence, one in zip(sequences, targets, strict=True):
        if sequence.table != one.table:
            fix = f"give both the same vocabulary in the schema: vocabulary={one.table!r}"
            what = "a history and its target must share a table, so that equal ids have equal vectors"
            raise SchemaError(what, where="history, target", value=f"{sequence.name}, {one.name}", fix=fix)
    if len({column.max_length for column in sequences}) > 1:
        value = ", ".join(f"{column.name} {column.max_length}" for column in sequences)
        raise SchemaError("histories side by side have one max_length", value=value, fix="set the same in the schema")
    return list(zip(sequences, targets, strict=True))


def _only_target(schema: Schema, history: CategoricalColumn) -> CategoricalColumn:
    known = [column for column in schema.one_hot if column.table == history.table]
    if len(known) != 1:
        names = ", ".join(column.name for column in known) or "no one-hot column shares its vocabulary"
        fix = "name it, target='item', and give both columns the same vocabulary in the schema"
        raise SchemaError("which column is the target of this history?", value=history.name, allowed=names, fix=fix)
    return known[0]


def one_id(schema: Schema, name: str, role: str) -> CategoricalColumn:
    """Return a column that has one id a row, or raise."""
    column = schema.categorical_column(name)
    if column.kind != "one_hot":
        allowed = ", ".join(one.name for one in schema.one_hot) or "the schema has no one-hot column"
        raise SchemaError(f"the role {role!r} takes a column of one id a row", value=name, allowed=allowed)
    return column


def user_and_item(schema: Schema, user: str | None, item: str | None) -> tuple[str, str]:
    """Return the columns of user and item; left out, they are the first and second one-hot column.

    Raises:
        SchemaError: there are other columns, so that they have to be named; or one is not there.
    """
    if user is None or item is None:
        names = [column.name for column in schema.categorical]
        if user is not None or item is not None or len(names) != 2:
            fix = "name both: user='user_id', item='movie_id'"
            raise SchemaError("which columns are user and item?", value=", ".join(names), fix=fix)
        user, item = names
    if user == item:
        raise SchemaError("user and item are two columns", value=user, fix="name another one")
    return one_id(schema, user, "user").name, one_id(schema, item, "item").name


def split_kinds(schema: Schema, names: Iterable[str], role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the categorical and the dense columns among names.

    Raises:
        SchemaError: a label, an unknown column, or no categorical column.
    """
    columns = [schema.column(name) for name in names]
    sparse = tuple(column.name for column in columns if isinstance(column, CategoricalColumn))
    dense = tuple(column.name for column in columns if isinstance(column, DenseColumn))
    if len(sparse) + len(dense) != len(columns) or not sparse:
        fix = f"name categorical and dense columns: {role}=['{role}_id', ...]"
        raise SchemaError(f"the role {role!r} takes features, one of them categorical", value=", ".join(names), fix=fix)
    return sparse, dense


def others(schema: Schema, taken: Iterable[str]) -> tuple[str, ...]:
    """Return the categorical columns that have no role yet."""
    used = set(taken)
    return tuple(column.name for column in schema.categorical if column.name not in used)
