"""Values, encodings, splits and filters as ibis expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from viviane.etl.columns import CategoricalSpec, DenseSpec, LabelSpec
from viviane.etl.conditions import Filter
from viviane.etl.operators import State, chain

HASH_BITS: Final = 60
_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def hashed(value: Any) -> Any:
    """The first 60 bits of the MD5 of a value's text, as int64: the same on every machine, in every version.

    Digits are looked up in a string, since no cast from hexadecimal text is common to all engines.
    """
    import ibis

    digest = value.cast("string").hexdigest("md5")
    total = ibis.literal(0, "int64")
    for place in range(HASH_BITS // 4):
        total = total * 16 + ibis.literal("0123456789abcdef").find(digest.substr(place, 1)).cast("int64")
    return total


def crossed(values: Sequence[Any]) -> Any:
    """One text for a tuple of values: each with its length in front, so that no two tuples share a text."""
    total: Any = None
    for value in values:
        text = value.cast("string")
        part = text.length().cast("string").concat(":", text)
        total = part if total is None else total.concat(part)
    return total


def exploded(rows: Any, names: Sequence[str]) -> Any:
    """The named columns of an ibis table, with a row for each value of the lists among them, single values next to it.

    Several lists of a row are taken together, value by value.
    """
    kinds = rows.schema()
    lists = [name for name in names if kinds[name].is_array()]
    if len(lists) < 2:
        return rows.select(**{name: rows[name].unnest() if name in lists else rows[name] for name in names})
    singles = {name: rows[name] for name in names if name not in lists}
    zipped = rows.select(together=rows[lists[0]].zip(*(rows[name] for name in lists[1:])).unnest(), **singles)
    fields = {name: zipped.together[f"f{place}"] for place, name in enumerate(lists, start=1)}
    return zipped.select(**{name: fields[name] if name in fields else zipped[name] for name in names})


def value_of(spec: CategoricalSpec, columns: Sequence[Any], states: dict[int, State]) -> Any:
    """What a categorical column numbers: the raw value, a cross of several, or a computed number."""
    if len(columns) > 1:
        return crossed(columns)
    return chain(columns[0], spec.operators, states) if spec.operators else columns[0]


def number_of(spec: LabelSpec | DenseSpec, x: Any, states: dict[int, State]) -> Any:
    """The number of a label or dense column: after its operators, or of a text whether it is a positive one."""
    import ibis

    if isinstance(spec, LabelSpec) and spec.positive:
        return ibis.ifelse(x.isnull(), ibis.null("float64"), x.isin(list(spec.positive)).cast("float64"))
    return chain(x, spec.operators, states)


def bucket(x: Any, borders: Sequence[float]) -> Any:
    """The number of borders <= x, missing where x is missing."""
    total: Any = 0
    for border in borders:
        total = total + (x >= border).cast("int64")
    return total


def kept(filters: Sequence[Filter], table: Any) -> Any:
    """Whether a row satisfies every filter; never missing."""
    import ibis

    total: Any = ibis.literal(True)
    for one in filters:
        column = table[one.column]
        if one.keep == "present":
            term = column.notnull()
        elif one.keep == "missing":
            term = column.isnull()
        elif isinstance(one.value, tuple):
            term = column.isin(list(one.value)) if one.keep == "in" else column.notin(list(one.value))
        else:
            term = _COMPARE[one.keep](column, one.value)
        total = total & term.fill_null(False)
    return total
