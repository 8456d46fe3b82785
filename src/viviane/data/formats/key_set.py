"""HugeCTR's key sets: the sorted distinct keys of a data set, raw without a header, one file per data set.

A training pass keeps only the rows of its key set in memory. Keys are unique over all slots: an id plus the sizes of
the preceding slots.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.core.files import write_bytes_atomic
from viviane.data.dataset import Dataset
from viviane.data.formats.slots import check_slots, slots_of

_BATCH_ROWS = 65_536


def key_set(
    dataset: Dataset, *, slot_sizes: tuple[int, ...] | None = None, shifted_keys: bool = True
) -> NDArray[np.int64]:
    """Return the distinct keys of a data set, sorted.

    Args:
        dataset: in any format.
        slot_sizes: HugeCTR's slot_size_array; None: the columns' num_ids.
        shifted_keys: add the sizes of the preceding slots, so that keys are unique over all slots.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> from viviane.schema import Schema
        >>> schema = Schema(categorical=[{"name": "a", "num_ids": 5}, {"name": "b", "num_ids": 7}])
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", schema, [{"a": [4, 1, 4], "b": [0, 0, 6]}])
        >>> key_set(data).tolist()
        [1, 4, 5, 11]
    """
    slots = slots_of(dataset.schema, slot_sizes, shifted_keys)
    found: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in slots]
    with dataset.reader(_BATCH_ROWS) as reader:
        for batch in reader:
            for seen, slot in zip(found, slots, strict=True):
                seen.append(np.unique(batch.bag(slot.column.name).values.numpy()).astype(np.int64))
                if sum(map(len, seen[1:])) > max(len(seen[0]), _BATCH_ROWS):
                    seen[:] = [np.unique(np.concatenate(seen))]
    shifted = [np.concatenate(seen) + slot.shift for seen, slot in zip(found, slots, strict=True)]
    return np.unique(np.concatenate(shifted)) if shifted else np.zeros(0, np.int64)


def write_key_set(
    path: str | Path,
    dataset: Dataset,
    *,
    i64_input_key: bool = False,
    slot_sizes: tuple[int, ...] | None = None,
    shifted_keys: bool = True,
) -> int:
    """Write the key set of a data set, uint32 or int64, and return the number of keys.

    Args:
        path: path of the file; HugeCTR's tools use the name of the file list plus `.keyset`.
        dataset, slot_sizes, shifted_keys: see `key_set`.
        i64_input_key: write keys of 8 bytes instead of 4.

    Raises:
        SchemaError: the keys do not fit the type.
    """
    slots = slots_of(dataset.schema, slot_sizes, shifted_keys)
    bare = dataset.schema.model_copy(update={"sample_weight": None})  # a key set contains only keys
    check_slots(bare, slots, 8 if i64_input_key else 4, "a key set")
    keys = key_set(dataset, slot_sizes=slot_sizes, shifted_keys=shifted_keys)
    write_bytes_atomic(Path(path), keys.astype("<i8" if i64_input_key else "<u4").tobytes())
    return len(keys)


def read_key_set(path: str | Path, *, i64_input_key: bool = False) -> NDArray[np.int64]:
    """Return the distinct keys of a key set, sorted; the file need not be sorted.

    Raises:
        DataError: the file is missing, or ends inside a key.
    """
    file, size = Path(path), 8 if i64_input_key else 4
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError("cannot read the key set", where=str(path), value=error.strerror or str(error)) from error
    if len(content) % size:
        raise DataError(
            "the key set ends inside a key; it is truncated, or its keys have another width",
            where=f"{path}, byte {len(content) // size * size}",
            value=f"{len(content)} bytes",
            allowed=f"a multiple of {size}",
        )
    return np.unique(np.frombuffer(content, "<i8" if i64_input_key else "<u4").astype(np.int64))
