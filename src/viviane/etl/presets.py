"""The Criteo format: a label, N whole numbers, M hexadecimal categories, tab-separated, no header."""

from __future__ import annotations

from viviane.core.errors import ConfigError
from viviane.etl.columns import (
    CategoricalSpec,
    Categorify,
    DenseSpec,
    Encoding,
    HashTo,
    Input,
    InputColumn,
    LabelSpec,
    RawIds,
)
from viviane.etl.config import EtlConfig
from viviane.etl.operators import Fill, Log


def criteo(
    *,
    num_dense: int = 13,
    num_categorical: int = 26,
    min_count: int = 6,
    hash_ids: int | None = None,
    raw_ids: bool = False,
) -> EtlConfig:
    """Return the settings for files in the Criteo format.

    Columns are named label, I1..IN, C1..CM. Numbers become ln(1 + max(x, 0)), missing ones 0; categories seen at
    least `min_count` times get an id of their own.

    Args:
        num_dense, num_categorical: N and M.
        min_count: rarer categories become the unknown id.
        hash_ids: hash categories into this many ids instead of learning a vocabulary.
        raw_ids: keep categories as the numbers they are, a missing one as -1, for dynamic tables.

    Example:
        >>> [column.name for column in criteo(num_dense=2, num_categorical=1).input.columns]
        ['label', 'I1', 'I2', 'C1']
    """
    if num_dense < 0 or num_categorical < 0:
        raise ConfigError("numbers of columns cannot be negative", value=f"{num_dense}, {num_categorical}")
    numbers = [f"I{i + 1}" for i in range(num_dense)]
    categories = [f"C{i + 1}" for i in range(num_categorical)]
    if raw_ids and hash_ids is not None:
        raise ConfigError("ids are either hashed or raw", fix="leave out hash_ids or raw_ids")
    encoding: Encoding = Categorify(min_count=min_count)
    if raw_ids:
        encoding = RawIds(missing=-1)
    elif hash_ids is not None:
        encoding = HashTo(num_ids=hash_ids)
    columns = [InputColumn(name="label", type="float")]
    columns += [InputColumn(name=name, type="float") for name in numbers]
    columns += [InputColumn(name=name, type="hex") for name in categories]
    return EtlConfig(
        input=Input(columns=tuple(columns), delimiter="\t", header=False),
        labels=(LabelSpec(name="label"),),
        dense=tuple(DenseSpec(name=name, operators=(Fill(value=0.0), Log())) for name in numbers),
        categorical=tuple(CategoricalSpec(name=name, encoding=encoding) for name in categories),
    )
