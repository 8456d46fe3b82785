"""Column types and a declarative file, inferred from rows: a first answer that a person then edits."""

from __future__ import annotations

import gzip
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from viviane.core.errors import DataError, SchemaError, suggest
from viviane.core.locations import AnyPath
from viviane.core.rows import plain_table
from viviane.etl.cells import convert
from viviane.etl.columns import InputColumn
from viviane.etl.config import EtlConfig
from viviane.etl.sources import find_sources

Kind = Literal["label", "number", "boolean", "category", "list", "time", "weight", "ignored"]

ROWS_PER_VALUE: Final = 100
"""A number of which each value comes up so often, on average, is a category by its exact value besides."""
_MOST_COUNTED: Final = 200_000  # rows inspected to distinguish numbers from ids
_BINS: Final = (10, 40)
_MOST_MIN_COUNT: Final = 100
_FEWEST_COMPARED: Final = 1_000  # rows that tell whether single values matter
_PRIOR_ROWS: Final = 20.0
_ID_NAME: Final = re.compile(r"(^|_)(id|uid|uuid|guid|hash|code|zip|zipcode|cookie)$|[a-z](Id|ID|Code)$")
_LABEL_NAMES: Final = frozenset(("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion"))
_DELIMITERS: Final = (",", "\t", ";", "|")
_LONGEST_LINE: Final = 1 << 20
_TIME_PARTS: Final = ("hour", "weekday")
_TIME: Final = r"^\s*[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9:.]+|\s*$)"
_TIMES_TRIED: Final = 100
_READ: Final = (
    pa.types.is_null, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_string,
    pa.types.is_binary, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_date,
)  # fmt: skip
_NEEDED: Final = "give a column with two values or more"
_EXACT: Final = 2**53  # whole numbers up to it are the same as floats


@dataclass(frozen=True)
class InferredColumn:
    """What became of one raw column, and why."""

    name: str
    kind: Kind
    note: str


@dataclass(frozen=True)
class Inferred:
    """A declarative file and how each raw column was understood.

    Args:
        config: what `viviane.etl.run` takes.
        columns: one entry for each raw column, in order.
    """

    config: EtlConfig
    columns: tuple[InferredColumn, ...]

    def describe(self) -> str:
        """Return one line for each column: its name, its kind and the reason.

        Example:
            >>> table = pa.table({"click": [0, 1, 0, 1], "site": ["a", "b", "a", "b"]})
            >>> print(infer_config(table, ["click"]).describe())
            click  label     0 and 1
            site   category  2 values
        """
        names = max(len(one.name) for one in self.columns)
        kinds = max(len(one.kind) for one in self.columns)
        return "\n".join(f"{one.name:{names}}  {one.kind:{kinds}}  {one.note}".rstrip() for one in self.columns)


@dataclass
class _Found:
    """Entries of the file that is being written."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)
    dense: list[dict[str, Any]] = field(default_factory=list)
    categorical: list[dict[str, Any]] = field(default_factory=list)


def infer_config(
    table: pa.Table,
    labels: Sequence[str],
    *,
    sample_weight: str | None = None,
    categories: Iterable[str] = (),
    numbers: Iterable[str] = (),
    min_count: int | None = None,
    bins: Sequence[int] = _BINS,
) -> Inferred:
    """Infer what each column is from its type and values, and write the declarative file for it.

    Text and booleans become categories. Real numbers become dense numbers and, cut at quantiles, categories. Whole
    numbers of few values become categories by their exact value as well, and so do those of which single values tell
    more about the label than quantiles do; those that look like ids become categories only. Lists become bags, times,
    also those written as text, the hour and the day of the week. A column without two different values is ignored.

    Args:
        table: rows, or a sample of them.
        labels: columns to predict; the first one decides, with `min_count`, which values are rare.
        sample_weight: column with a weight for each row.
        categories, numbers: columns whose kind is known.
        min_count: values of fewer rows share the unknown id. None takes the number of rows in which one positive is
            expected, 1 / p for a share p of the rarer class, between 2 and 100.
        bins: how many quantiles numbers are cut at; one category for each entry.

    Raises:
        SchemaError: a named column does not exist or is no number, or no column is left to learn from.

    Example:
        >>> table = pa.table({"click": [0, 1, 0, 1], "price": [0.5, 2.0, 1.5, 9.0], "site": ["a", "b", "a", "b"]})
        >>> [(one.name, one.kind) for one in infer_config(table, ["click"]).columns]
        [('click', 'label'), ('price', 'number'), ('site', 'category')]
    """
    known = {**dict.fromkeys(categories, "category"), **dict.fromkeys(numbers, "number")}
    for name in [*labels, *known, *([sample_weight] if sample_weight else [])]:
        if name not in table.column_names:
            raise SchemaError("no such column", value=name, fix=suggest(name, table.column_names))
    if min_count is None:
        min_count = _rare(table.column(labels[0])) if labels else 2
    found, columns, label_specs = _Found(), [], []
    target = _numbers_of(table.column(labels[0])) if labels else None
    for name in table.column_names:
        values = table.column(name)
        if name in labels:
            label_specs.append(_label(name, values, found))
            columns.append(InferredColumn(name, "label", _label_note(label_specs[-1])))
        elif name == sample_weight:
            found.inputs.append({"name": name, "type": "float"})
            columns.append(InferredColumn(name, "weight", "weight of the row"))
        else:
            columns.append(_feature(name, values, known.get(name), min_count, bins, found, target))
    if not found.dense and not found.categorical:
        value = [f"{one.name}: {one.note}" for one in columns if one.kind == "ignored"]
        raise SchemaError("no column to learn from", value=value or "there are labels alone", fix=_NEEDED)
    config = EtlConfig.from_dict(
        {
            "input": {"columns": found.inputs, "quote": '"'},
            "derived": found.derived,
            "labels": label_specs,
            "dense": found.dense,
            "categorical": found.categorical,
            **({"sample_weight": {"name": sample_weight}} if sample_weight else {}),
        }
    )
    return Inferred(config, tuple(columns))


def infer_file(
    file: str | AnyPath, labels: Sequence[str] = (), *, delimiter: str | None = None, **options: Any
) -> Inferred:
    """Infer the declarative file of Parquet or delimited text files, from the first 200,000 rows of the first one.

    Args:
        file: with a header, where it is text; .gz is unpacked. Of a folder or pattern, the first file by name.
        labels: columns to predict; where none is named, the one called label, click, clicked, target, y or the like.
        delimiter: of text; None takes the one of comma, tab, semicolon and bar that the first line has most of.
        options: see `infer_config`.

    Raises:
        DataNotFoundError: no such file. DataError: it cannot be read, or has no rows.
        SchemaError: no label is named, and no column is called like one.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> file = Path(tempfile.mkdtemp()) / "clicks.csv"
        >>> _ = file.write_text("click,site\\n1,a\\n0,b\\n")
        >>> [(one.name, one.kind) for one in infer_file(file).columns]
        [('click', 'label'), ('site', 'category')]
    """
    place = find_sources(file)[0].path
    table, found = _head_of(place, delimiter)
    if not table.num_rows:
        raise DataError("the file has no rows", where=str(place), value=f"columns {', '.join(table.column_names[:20])}")
    names = list(labels) or [name for name in table.column_names if name.lower() in _LABEL_NAMES][:1]
    if not names:
        value = ", ".join(table.column_names[:20])
        raise SchemaError("which column is the label?", where=str(file), value=value, fix="name it: --label COLUMN")
    inferred = infer_config(plain_table(table), names, **options)
    booleans = {field.name for field in table.schema if pa.types.is_boolean(field.type)}
    if found is None and not booleans:
        return inferred
    data = inferred.config.to_dict()
    for column in data["input"]["columns"]:
        column["type"] = "bool" if column["name"] in booleans else column["type"]
    if found is not None:
        data["input"]["delimiter"] = found
    return Inferred(EtlConfig.from_dict(data), inferred.columns)


def _head_of(file: AnyPath, delimiter: str | None) -> tuple[pa.Table, str | None]:
    """Return the first rows of a file with inferred types, and the delimiter of a text file."""
    with file.open("rb") as handle:
        start = handle.read(4)
    try:
        if start == b"PAR1":
            with file.open("rb") as handle:
                batches: list[Any] = []
                for batch in pq.ParquetFile(handle).iter_batches(65_536):
                    batches.append(batch)
                    if sum(map(len, batches)) >= _MOST_COUNTED:
                        break
                return pa.Table.from_batches(batches).slice(0, _MOST_COUNTED), None
        with file.open("rb") as plain:
            lines: Any = gzip.GzipFile(fileobj=plain) if start[:2] == b"\x1f\x8b" else plain
            text: bytes = b"".join(lines.readline(_LONGEST_LINE) for _ in range(_MOST_COUNTED + 1))
        first = text.split(b"\n", maxsplit=1)[0].decode("utf-8")
        found = delimiter or max(_DELIMITERS, key=first.count)
        return csv.read_csv(io.BytesIO(text), parse_options=csv.ParseOptions(delimiter=found)), found
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError("the file cannot be read", where=str(file), value=str(error).splitlines()[0]) from error


def _rare(label: Any) -> int:
    """Return in how many rows one positive is expected."""
    values = pc.drop_null(label)
    if not (pa.types.is_boolean(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return 2
    numbers = values.cast(pa.float64()).to_numpy()
    if not len(numbers) or not np.isin(numbers, (0, 1)).all():
        return 2
    share = float(min(numbers.mean(), 1 - numbers.mean()))
    return min(max(math.ceil(1 / max(share, 1e-6)), 2), _MOST_MIN_COUNT)


def _label_note(label: dict[str, Any]) -> str:
    if "positive" in label:
        return f"1 where {label['positive'][0]!r}, 0 where {label['negative'][0]!r}"
    return "a number" if "task" in label else "0 and 1"


def _label(name: str, values: Any, found: _Found) -> dict[str, Any]:
    kind = values.type
    if pa.types.is_string(kind):  # the greater of two texts is 1, as in scikit-learn
        texts = sorted(set(pc.unique(pc.drop_null(values)).slice(0, 4).to_pylist()) - {""})
        if len(texts) != 2:
            raise SchemaError(
                "a label of text has two values", where=f"column {name!r}", value=texts,
                fix="make it 0 and 1, or a number",
            )  # fmt: skip
        found.inputs.append({"name": name, "type": "string"})
        return {"name": name, "positive": texts[1:], "negative": texts[:1]}
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    found.inputs.append({"name": name, "type": "int" if whole else "float"})
    distinct = set(pc.unique(pc.drop_null(values)).slice(0, 3).to_pylist())
    return {"name": name} if distinct <= {0, 1} else {"name": name, "task": "regression"}


def _feature(
    name: str,
    values: Any,
    known: str | None,
    min_count: int,
    bins: Sequence[int],
    found: _Found,
    target: NDArray[np.float64] | None,
) -> InferredColumn:
    kind = values.type
    if pa.types.is_nested(kind):
        return _list(name, kind, min_count, found)
    distinct = 0
    if readable := any(is_kind(kind) for is_kind in _READ):
        distinct = 0 if pa.types.is_null(kind) else pc.count_distinct(values, mode="only_valid").as_py()
    if distinct < 2 and not (distinct == 1 and values.null_count):
        note = f"values of type {kind}" if not readable else "no value" if distinct == 0 else "one value"
        return InferredColumn(name, "ignored", note)
    if parts := _parts_of_times(name, values, text=known is None):
        return _time(name, parts, found)
    is_number = (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    ) and known != "category"
    if known == "number" and not is_number:
        raise SchemaError(
            "a column that is named as a number has no numbers", where=f"column {name!r}", value=str(kind)
        )
    if not is_number:
        return _category(name, values, distinct, min_count, found)
    if known != "number" and (reason := _id_reason(name, values, distinct)):
        return _category(name, values, distinct, min_count, found, reason)
    return _number(name, values, distinct, min_count, bins, found, target)


def _list(name: str, kind: Any, min_count: int, found: _Found) -> InferredColumn:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return InferredColumn(name, "ignored", f"values of type {kind}")
    inner = kind.value_type
    if pa.types.is_floating(inner) or pa.types.is_nested(inner):
        return InferredColumn(name, "ignored", f"lists of {inner}")
    found.inputs.append({"name": name, "type": "int" if pa.types.is_integer(inner) else "string", "list": True})
    encoding = {"type": "categorify", "min_count": min_count}
    found.categorical.append({"name": name, "kind": "multi_hot", "encoding": encoding})
    return InferredColumn(name, "list", "a bag of categories")


def _parts_of_times(name: str, values: Any, *, text: bool) -> Sequence[str]:
    """Return what to take of times, or of text, if wanted, that is all times such as 2014-05-31 23:59:59."""
    kind = values.type
    if pa.types.is_temporal(kind):
        return _TIME_PARTS if pa.types.is_timestamp(kind) else _TIME_PARTS[1:]
    if not text or not pa.types.is_string(kind):
        return ()
    texts = pc.drop_null(values)
    column = InputColumn(name=name, type="timestamp")
    for sample in (texts.slice(0, _TIMES_TRIED), texts):  # most texts show at once that they are none
        if not pc.all(pc.match_substring_regex(sample, _TIME)).as_py() or convert(sample, column, ())[1]:
            return ()
    return _TIME_PARTS if pc.any(pc.match_substring(texts, ":")).as_py() else _TIME_PARTS[1:]


def _time(name: str, parts: Sequence[str], found: _Found) -> InferredColumn:
    found.inputs.append({"name": name, "type": "timestamp"})
    for part in parts:
        found.derived.append({"type": "date_part", "name": f"{name}_{part}", "source": name, "part": part})
        found.categorical.append({"name": f"{name}_{part}", "encoding": {"type": "categorify"}})
    return InferredColumn(name, "time", " and ".join(parts))


def _category(name: str, values: Any, distinct: int, min_count: int, found: _Found, reason: str = "") -> InferredColumn:
    rows = len(values) - values.null_count
    if distinct > 0.95 * rows and rows > 100:
        return InferredColumn(name, "ignored", "nearly every row has a value of its own")
    kind = "hex" if _beyond_63_bits(values) else "int" if pa.types.is_integer(values.type) else "string"
    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        kind = "float"
    found.inputs.append({"name": name, "type": kind})
    found.categorical.append({"name": name, "encoding": {"type": "categorify", "min_count": min_count}})
    return InferredColumn(name, "category", f"{distinct:,} values" + (f"; {reason}" if reason else ""))


def _beyond_63_bits(values: Any) -> bool:
    """Whether whole numbers, such as hashes, have 64 bits without a sign."""
    return pa.types.is_uint64(values.type) and int(pc.max(values).as_py() or 0) >= 2**63


def _id_reason(name: str, values: Any, distinct: int) -> str:
    """Return the reason why whole numbers are taken for ids; nothing where they are numbers."""
    if _beyond_63_bits(values):
        return "whole numbers of 64 bits"
    if not pa.types.is_integer(values.type) or distinct < 3:
        return ""
    if _ID_NAME.search(name):
        return "an id by its name"
    sample = pc.drop_null(values.slice(0, _MOST_COUNTED)).to_numpy().astype(np.float64)
    low, high = sample.min(), sample.max()
    median = float(np.median(sample))
    # Hashes spread evenly over a wide range; counts and amounts crowd at its lower end.
    if high - low > 2**24 and 0.1 < (median - low) / (high - low) < 0.9 and high > 2**31:
        return "whole numbers without an order"
    return ""


def _number(
    name: str,
    values: Any,
    distinct: int,
    min_count: int,
    bins: Sequence[int],
    found: _Found,
    target: NDArray[np.float64] | None,
) -> InferredColumn:
    whole = pa.types.is_integer(values.type)
    sample = pc.drop_null(values.slice(0, _MOST_COUNTED)).cast(pa.float64(), safe=False).to_numpy()
    sample = sample[np.isfinite(sample)]
    skewed = len(sample) > 0 and sample.min() >= -2 and sample.max() > 10 * max(float(np.median(sample)), 1.0)
    found.dense.append({"name": name, "operators": _operators(skewed)})
    exact = distinct * ROWS_PER_VALUE <= len(values) or distinct <= min(bins, default=0)
    notes = ["logarithm" if skewed else "value"]
    if not exact and whole and target is not None:  # an id in disguise, such as a number of a banner
        exact = identity_matters(_numbers_of(values), target, max(bins, default=1))
    if exact:
        encoding = {"type": "categorify", "min_count": max(min_count, 3)}
        found.categorical.append({"name": f"{name}_value", "source": name, "encoding": encoding})
        notes.append(f"{distinct:,} exact values")
    for num_bins in [num for num in bins if distinct > num and not (exact and num < max(bins))]:
        encoding = {"type": "bucketize", "quantiles": num_bins}
        found.categorical.append({"name": f"{name}_bin{num_bins}", "source": name, "encoding": encoding})
        notes.append(f"{num_bins} quantiles")
    is_boolean = whole and distinct == 2 and len(sample) > 0 and sample.min() == 0 and sample.max() == 1
    # A number may have a fraction later, or a mean in its place; beyond 2^53 floats would merge whole numbers.
    stays_whole = is_boolean or (whole and len(sample) > 0 and np.abs(sample).max() >= _EXACT)
    found.inputs.append({"name": name, "type": "int" if stays_whole else "float"})
    return InferredColumn(name, "boolean" if is_boolean else "number", "0 and 1" if is_boolean else ", ".join(notes))


def _numbers_of(values: Any) -> NDArray[np.float64] | None:
    """Return the first values as numbers, missing ones as NaN; None where they are no numbers."""
    kind = values.type
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    found: NDArray[np.float64] = values.slice(0, _MOST_COUNTED).cast(pa.float64(), safe=False).to_numpy()
    return found


def identity_matters(values: NDArray[np.float64] | None, target: NDArray[np.float64], num_bins: int) -> bool:
    """Return whether single values of a number tell more about the target than its quantiles do.

    Half of the rows learn the mean of the target of each value, and of each quantile; the other half tells which of the
    two predicts better. It has to be better by three standard errors of the squared error.

    Example:
        >>> rows = np.random.default_rng(0).integers(0, 500, 20_000)
        >>> by_value, by_size = (rows * 7919 % 2).astype(float), (rows > 250).astype(float)
        >>> identity_matters(rows.astype(float), by_value, 40), identity_matters(rows.astype(float), by_size, 40)
        (True, False)
    """
    if values is None:
        return False
    known = np.isfinite(values) & np.isfinite(target)
    x, y = values[known], target[known]
    if len(x) < _FEWEST_COMPARED:
        return False
    _, codes = np.unique(x, return_inverse=True)
    edges = np.unique(np.quantile(x, np.linspace(0, 1, num_bins + 1)[1:-1]))
    errors = [(y - _means_of_other_half(groups, y)) ** 2 for groups in (np.searchsorted(edges, x), codes)]
    gain = errors[0] - errors[1]
    return bool(gain.mean() > 3 * gain.std() / math.sqrt(len(gain)))


def _means_of_other_half(groups: NDArray[np.int64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each row the mean of the target in the other half's rows of its group, drawn to the mean of all."""
    found = np.empty(len(y))
    for half in (0, 1):
        own, other = np.arange(len(y)) % 2 == half, np.arange(len(y)) % 2 != half
        counts = np.bincount(groups[other], minlength=groups.max() + 1)
        sums = np.bincount(groups[other], y[other], minlength=groups.max() + 1)
        mean = float(y[other].mean())
        found[own] = ((sums + _PRIOR_ROWS * mean) / (counts + _PRIOR_ROWS))[groups[own]]
    return found


def _operators(skewed: bool) -> list[dict[str, Any]]:
    scale: list[dict[str, Any]] = [
        {"type": "standardize"},
        {"type": "clip", "min": -4.0, "max": 4.0},
        {"type": "fill", "value": 0.0},
    ]
    return [{"type": "log"}, *scale] if skewed else scale
