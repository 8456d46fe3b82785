"""Key sets: the distinct ids of each categorical column of a data set, which say what rows a pass over it needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, DataNotFoundError
from viviane.core.file_names import refuse_link_outside
from viviane.core.files import write_bytes_atomic
from viviane.data.dataset import Dataset

KEY_SETS_FILE: Final = "key_sets.safetensors"
FORMAT: Final = "viviane-key-sets"
_BATCH_ROWS: Final = 65_536
KeySets: TypeAlias = dict[str, NDArray[np.int64]]
"""By column: its distinct ids, rising."""


def collect_key_sets(dataset: Dataset) -> KeySets:
    """Return the distinct ids of each categorical column; reads the data set once.

    Memory: twice the distinct ids, and a batch.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> from viviane.schema import Schema
        >>> schema = Schema(categorical=[{"name": "a", "num_ids": 9}])
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", schema, [{"a": [4, 3, 4]}])
        >>> {name: keys.tolist() for name, keys in collect_key_sets(data).items()}
        {'a': [3, 4]}
    """
    found = {column.name: _Distinct() for column in dataset.schema.categorical}
    with dataset.reader(_BATCH_ROWS) as reader:
        for batch in reader:
            for name, seen in found.items():
                seen.add(ids_of(batch, name))
    return {name: seen.joined() for name, seen in found.items()}


def write_key_sets(dataset: Dataset, path: str | Path | None = None) -> dict[str, int]:
    """Write the key sets of a data set, by default into its folder, and return the number of keys by column.

    The file names the data set by its fingerprint, so that it is not taken for that of other rows.

    Raises:
        ConfigError: the data set is not a folder of this machine, and no path is given.
    """
    if path is None and not (isinstance(dataset.path, Path) and dataset.path.is_dir()):
        raise ConfigError("key sets are written into a local folder", where=str(dataset.path), fix="give a path")
    found = collect_key_sets(dataset)
    _write(Path(path or Path(str(dataset.path)) / KEY_SETS_FILE), found, dataset.fingerprint)
    return {name: len(keys) for name, keys in found.items()}


def read_key_sets(path: str | Path, dataset: Dataset) -> KeySets:
    """Read what `write_key_sets` wrote.

    Raises:
        DataError: the file is missing, damaged, or of another data set.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise DataNotFoundError("key sets not found", where=str(file), fix=f"viviane keyset {dataset.path}")
    if file.is_symlink():
        refuse_link_outside(file, file.parent)
    try:
        with safe_open(file, framework="np") as handle:
            about: Mapping[str, str] = handle.metadata() or {}
            found = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no iterator there
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError("not a file of key sets", where=str(file), value=str(error)[:200]) from error
    fix = f"write it again: viviane keyset {dataset.path}"
    if about.get("format") != FORMAT:
        raise DataError("not a file of key sets", where=str(file), value=about.get("format"), allowed=FORMAT)
    if about.get("sha256") != _sum_of(found):
        raise DataError("the key sets were altered: their check sum differs", where=str(file), fix=fix)
    if about.get("data_set") != dataset.fingerprint:
        raise DataError("the key sets are those of other rows", where=str(file), value=about.get("data_set"),
                        allowed=dataset.fingerprint, fix=fix)  # fmt: skip
    return check_key_sets(found, dataset, str(file))


def check_key_sets(given: Mapping[str, Any], dataset: Dataset, where: str) -> KeySets:
    """Return key sets as rising int64 arrays, one for each categorical column.

    Raises:
        ConfigError: a column is missing or unknown, or keys are not whole numbers of one dimension.
    """
    names = [column.name for column in dataset.schema.categorical]
    if not isinstance(given, Mapping):
        raise ConfigError("key sets are keys by column", where=where, value=type(given).__name__,
                          allowed="{column: keys}")  # fmt: skip
    if missing := [name for name in names if name not in given]:
        raise ConfigError("key sets lack a column", where=where, value=", ".join(missing), allowed=", ".join(names))
    if unknown := [name for name in given if name not in names]:
        raise ConfigError("key sets of no column", where=where, value=", ".join(unknown), allowed=", ".join(names))
    found = {}
    for name in names:
        keys = np.asarray(given[name])
        if keys.ndim != 1 or (keys.dtype.kind not in "iu" and len(keys)):
            raise ConfigError("keys are whole numbers, (n,)", where=f"{where}, column {name!r}",
                              value=f"{keys.dtype} {keys.shape}")  # fmt: skip
        if keys.dtype == np.uint64 and (keys >> np.uint64(63)).any():
            raise ConfigError("a key is beyond 63 bits", where=f"{where}, column {name!r}", value=int(keys.max()),
                              allowed="below 2^63")  # fmt: skip
        found[name] = np.unique(keys.astype(np.int64))
    return found


class _Distinct:
    """Distinct numbers of many arrays; joined when they have doubled."""

    def __init__(self) -> None:
        self._parts = [np.zeros(0, np.int64)]

    def add(self, ids: NDArray[np.int64]) -> None:
        self._parts.append(np.unique(ids))
        if sum(map(len, self._parts[1:])) > max(len(self._parts[0]), _BATCH_ROWS):
            self._parts = [self.joined()]

    def joined(self) -> NDArray[np.int64]:
        return np.unique(np.concatenate(self._parts))


def ids_of(batch: Batch, name: str) -> NDArray[np.int64]:
    """Return the ids of a column in a batch, those of bags behind one another."""
    values: torch.Tensor
    values = batch.bags[name].values if name in batch.bags else batch.one_hot[:, batch.layout.one_hot_index[name]]
    return values.numpy().astype(np.int64)


def _sum_of(found: Mapping[str, NDArray[Any]]) -> str:
    seal = hashlib.sha256()
    for name in sorted(found):
        seal.update(f"{name}\0{found[name].dtype}\0{found[name].shape}\0".encode())
        seal.update(np.ascontiguousarray(found[name]).data)
    return seal.hexdigest()


def _write(path: Path, found: KeySets, fingerprint: str) -> None:
    from safetensors.numpy import save

    about = {"format": FORMAT, "data_set": fingerprint, "sha256": _sum_of(found)}
    write_bytes_atomic(path, save(found, metadata=about))
