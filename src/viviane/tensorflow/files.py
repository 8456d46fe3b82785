"""`dump` and `load`: tables as SOK's files, one for keys, one for rows, one for each part of the optimizer's state.

A file is a header of 296 bytes and the numbers, little-endian. The header: the table's name, 256 bytes,
right-justified; the kind (0 keys, 1 rows, 2 state), int32, big-endian; the name of the state, 32 bytes; the type,
int32, big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import CheckpointError, ConfigError, DataError
from viviane.core.files import write_bytes_atomic
from viviane.core.whole_numbers import whole_numbers
from viviane.embedding import DynamicTableConfig, TableState
from viviane.embedding.dynamic_content import DynamicContent
from viviane.tensorflow.arguments import folder_of, optional
from viviane.tensorflow.optimizer import OptimizerWrapper
from viviane.tensorflow.processes import group
from viviane.tensorflow.table_variable import table_of
from viviane.tensorflow.tables import Table
from viviane.tensorflow.variables import file_name, rows_of

_HEADER: Final = struct.Struct(">256si32si")
_TYPES: Final = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")
_KEYS, _ROWS, _STATE = 0, 1, 2
_STEP: Final = "step"


def dump(path: str | Path, variables: Any, optimizer: OptimizerWrapper | None = None) -> None:
    """Write tables into a folder: `<name>-key`, `<name>-weight`, and with `optimizer` `<name>-<Optimizer>-<state>`.

    Args:
        path: the folder; made where it is not there.
        variables: one, or a list.
        optimizer: the wrapper whose state is written, too.
    """
    folder = folder_of("path", path)
    optional("optimizer", optimizer, OptimizerWrapper)
    folder.mkdir(parents=True, exist_ok=True)
    for variable in _listed(variables):
        table, name = table_of(variable), file_name(variable)
        keys, rows = rows_of(variable)
        state, step = ({}, 0) if optimizer is None else (table.state(), table.num_steps)
        if not table.is_writer:
            continue
        _write(folder / f"{name}-key", name, _KEYS, "", keys.numpy().astype("<i8"))
        _write(folder / f"{name}-weight", name, _ROWS, "", rows.numpy().astype("<f4"))
        if optimizer is None:
            continue
        for slot, part in state.items():
            file = folder / _state_file(name, optimizer, slot)
            _write(file, name, _STATE, optimizer.slot_name(slot), part.numpy().astype("<f4"))
        # Adam's arithmetic needs the number of the step; SOK has no such file.
        _write(folder / _state_file(name, optimizer, _STEP), name, _STATE, _STEP, np.array([step], "<i8"))
    group().gather_numbers([0])  # files are whole when the call returns, whichever process reads them


def load(path: str | Path, variables: Any, optimizer: OptimizerWrapper | None = None) -> None:
    """Read what `dump` wrote; keys of a dynamic variable that the files do not name stay.

    Raises:
        CheckpointError: a file is missing, damaged, or of another shape; nothing of that table is changed then.
    """
    folder = folder_of("path", path)
    optional("optimizer", optimizer, OptimizerWrapper)
    for variable in _listed(variables):
        table, name = table_of(variable), file_name(variable)
        keys = torch.from_numpy(_read_keys(folder / f"{name}-key", name))
        width = table.config.dim
        rows = torch.from_numpy(_read(folder / f"{name}-weight", name, _ROWS, width).astype(np.float32))
        if len(rows) != len(keys):
            raise CheckpointError("keys and rows differ in number", where=str(folder / name), value=len(rows),
                                  allowed=str(len(keys)))  # fmt: skip
        state, step = {}, 0
        if optimizer is not None:
            table.set_rule(optimizer.settings)
            for slot, own in _slots(table).items():
                part = _read(folder / _state_file(name, optimizer, slot), name, _STATE, own)
                state[slot] = torch.from_numpy(part.astype(np.float32))
                if len(part) != len(keys):
                    raise CheckpointError("keys and state differ in number", where=f"{folder / name}, {slot}",
                                          value=len(part), allowed=str(len(keys)))  # fmt: skip
            step = _read_step(folder / _state_file(name, optimizer, _STEP), name, optimizer)
        _put(table, keys, rows, state, step)


def _read_step(file: Path, name: str, optimizer: OptimizerWrapper) -> int:
    """Return how many steps a table has had; files of SOK's do not say it, but the optimizer may."""
    if not file.is_file():
        return optimizer.num_steps
    numbers = _read(file, name, _STATE, None)
    if len(numbers) != 1 or numbers[0] < 0:
        raise CheckpointError("not a number of steps", where=str(file), value=numbers[:3].tolist())
    optimizer.num_steps = max(optimizer.num_steps, int(numbers[0]))
    return int(numbers[0])


def _put(table: Table, keys: Tensor, rows: Tensor, state: dict[str, Tensor], step: int) -> None:
    if isinstance(table.config, DynamicTableConfig):
        zeros, own = torch.zeros_like(keys), table.dynamic
        if own is not None:
            own.import_(DynamicContent(keys, rows, zeros, zeros, state))
            own.num_steps = step if state else own.num_steps
        return
    count = table.config.num_rows
    if len(keys) != count or not torch.equal(keys.sort().values, torch.arange(count)):
        raise CheckpointError(
            "the file's keys are not the variable's rows", where=table.config.name, value=len(keys),
            allowed=f"each of 0 to {count - 1} once",
        )  # fmt: skip
    order = torch.argsort(keys)
    table.collection.import_table(
        table.config.name, TableState(rows[order], {name: part[order] for name, part in state.items()}, step)
    )


def _slots(table: Table) -> dict[str, int | None]:
    """Return the width of each part of a table's state; None: one number a row."""
    name = table.config.name
    if isinstance(table.config, DynamicTableConfig):
        state = {} if table.dynamic is None else dict(table.dynamic.state)
    else:
        state = dict(table.collection.export_table(name, copy=False).state)
    return {slot: part.shape[1] if part.dim() == 2 else None for slot, part in state.items()}


def _listed(variables: Any) -> Sequence[Any]:
    return list(variables) if isinstance(variables, list | tuple) else [variables]


def _state_file(name: str, optimizer: OptimizerWrapper, state: str) -> str:
    kind = type(getattr(optimizer.optimizer, "inner_optimizer", optimizer.optimizer)).__name__
    return f"{name}-{kind}-{optimizer.slot_name(state)}"


def _write(file: Path, name: str, kind: int, slot: str, numbers: np.ndarray[Any, Any]) -> None:
    encoded = name.encode()
    if len(encoded) > 256:
        raise ConfigError("the name is too long for the file", value=name, allowed="256 bytes")
    code = _TYPES.index(numbers.dtype.str)
    header = _HEADER.pack(encoded.rjust(256), kind, slot.encode().rjust(32), code)
    write_bytes_atomic(file, header + np.ascontiguousarray(numbers).tobytes())


def _read_keys(file: Path, name: str) -> np.ndarray[Any, Any]:
    try:
        return np.array(whole_numbers(_read(file, name, _KEYS, None), np.int64, str(file)))
    except DataError as error:
        raise CheckpointError(error.what, where=str(file), value=error.value, allowed=error.allowed) from None


def _read(file: Path, name: str, kind: int, width: int | None) -> np.ndarray[Any, Any]:
    """Return a file's numbers: (N,), or (N, width)."""
    if not file.is_file():
        raise CheckpointError("no such file", where=str(file), fix="dump with the same names, and the same optimizer")
    data = file.read_bytes()
    if len(data) < _HEADER.size:
        raise CheckpointError("the file is shorter than its header", where=str(file), value=len(data))
    given, own_kind, _, code = _HEADER.unpack_from(data)
    table = given.decode(errors="replace").strip(" \x00")
    if table != name or own_kind != kind or not 0 <= code < len(_TYPES):
        value = f"table {table!r}, kind {own_kind}, type {code}"
        raise CheckpointError(
            "the header is of another file", where=str(file), value=value, allowed=f"table {name!r}, kind {kind}"
        )
    dtype = np.dtype(_TYPES[code])
    row_bytes = dtype.itemsize * (width or 1)
    if (len(data) - _HEADER.size) % row_bytes:
        raise CheckpointError("the file ends in the middle of a row", where=str(file), value=len(data),
                              allowed=f"{_HEADER.size} bytes and rows of {row_bytes}")  # fmt: skip
    numbers = np.frombuffer(data, dtype, offset=_HEADER.size)
    return numbers if width is None else numbers.reshape(-1, width)
