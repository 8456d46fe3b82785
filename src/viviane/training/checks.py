"""Checks of a trainer before it computes anything: binary labels, and columns that match the model."""

from __future__ import annotations

from pathlib import PurePath

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data import DataPasses, Dataset
from viviane.data.streaming import KafkaStream
from viviane.parallel import Group
from viviane.schema import Schema


def check_binary_labels(batch: Batch, schema: Schema, group: Group | None = None) -> None:
    """Refuse binary labels outside [0, 1], except -1 for optional labels; the guard detects NaN.

    A value between 0 and 1 counts as that fraction of a positive row. The project's own formats contain only 0 and 1,
    and their reader checks it; HugeCTR's files may contain fractions.

    Args:
        batch: on the CPU.
        schema: its labels; their task defines which are binary.
        group: processes to which the error is sent, so that none waits for this one.

    Raises:
        DataError: a label is out of range; names the first row and its label.
    """
    for i, label in enumerate(schema.labels if batch.labels.shape[1] else ()):
        if label.task != "binary":
            continue
        values = batch.labels[:, i]
        bad = (values < 0) | (values > 1)
        if label.optional:
            bad &= values != -1
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            error = DataError(
                "a binary label is not between 0 and 1",
                where=f"label {label.name!r}, row {row} of the batch" + (f", {batch.origin}" if batch.origin else ""),
                value=values[row].item(), allowed="0 to 1, or -1 for none" if label.optional else "0 to 1",
                fix='declare the label with task "regression" if it is a real number',
            )  # fmt: skip
            if group is not None:
                group.report(error)
            raise error


def check_columns(schema: Schema, dataset: Dataset | DataPasses | KafkaStream, *, with_labels: bool) -> None:
    """Refuse a data set whose columns differ from the model's schema; with_labels=False allows missing labels.

    Raises:
        SchemaError: columns differ; names them.
        ConfigError: the argument is not a data set.
    """
    if not isinstance(dataset, Dataset | DataPasses | KafkaStream):
        raise ConfigError(
            "not a data set",
            value=str(dataset) if isinstance(dataset, str | PurePath) else type(dataset).__name__,
            allowed="viviane.Dataset(folder), or to train on a viviane.KafkaStream",
            fix=f"pass viviane.Dataset({str(dataset)!r})"
            if isinstance(dataset, str | PurePath)
            else "write the rows with viviane.write_dataset, which returns a Dataset",
        )
    lines = schema.difference(dataset.schema)
    if not with_labels:
        labels = {label.name for label in schema.labels}
        lines = [line for line in lines if not any(line.startswith(f"column {name!r}") for name in labels)]
    if lines:
        raise SchemaError(
            "the data set's columns differ from the model's: " + "; ".join(lines[:5]), where=str(dataset.path)
        )
