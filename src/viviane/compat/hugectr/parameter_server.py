"""HugeCTR's parameter server in Python: vectors of keys, from tiers over the files of trained models."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.key_files import KeyFilesTier
from viviane.compat.hugectr.messages import MessageSource, topic_of
from viviane.compat.hugectr.serving_databases import UpdateSource
from viviane.compat.hugectr.serving_params import InferenceParams, ParameterServerConfig, server_from_json
from viviane.compat.hugectr.serving_tiers import Databases, ServedModel, TierMaker
from viviane.core.errors import ConfigError, suggest
from viviane.core.whole_numbers import whole_numbers
from viviane.store.hierarchy import TableHierarchy
from viviane.store.mover import Mover
from viviane.store.row_layout import Keys, Rows


class HPS:
    """Looks keys up in the tables of several models: cache, volatile database, persistent database, the files below.

    With `hit_rate_threshold` below 1 keys that the cache has not may read the default value and are fetched beside
    the call, as in HugeCTR; from 1 on every answer is exact.

    Args:
        config: a ParameterServerConfig, or the path of a parameter server's JSON.
    """

    def __init__(self, config: ParameterServerConfig | str) -> None:
        given = server_from_json(config) if isinstance(config, str | Path) else config
        self._tables: dict[str, list[TableHierarchy]] = {}
        self._opened = ExitStack()
        self._mover = Mover()
        self._opened.callback(self._mover.close)
        self._maker = TierMaker(self._opened)
        self._followed: dict[UpdateSource, dict[str, tuple[TableHierarchy, int]]] = {}
        self.updates: list[MessageSource] = []
        """Readers of messages, one for each source."""
        try:
            for params in given.inference_params_array:
                self._open(given, params)
            self._follow()
        except BaseException:
            self._opened.close()
            raise
        print_notes()

    def _open(self, given: ParameterServerConfig, params: InferenceParams) -> None:
        model = ServedModel.of(given, params)
        if model.model_name in self._tables:
            raise ConfigError("two models have the same name", where="HPS", value=model.model_name)
        databases = Databases.of(given, params)
        tables = self._tables[model.model_name] = []
        for i, folder in enumerate(model.sparse_model_files):
            base = KeyFilesTier(Path(folder), model.widths[i] if model.widths else None)
            name = f"{model.model_name}.{model.names[i]}"
            default = np.full(base.layout["weight"].width, params.default_of(i), np.float32).view(np.uint8)
            # Without a cache of its own HugeCTR reads the databases directly, whatever the hit rate is.
            threshold = min(model.hit_rate_threshold, 1.0) if model.use_gpu_embedding_cache else 1.0
            table = TableHierarchy(
                name, base.layout, self._maker.levels(name, base, model, databases), default=_constant(default),
                mover=self._mover, hit_rate_threshold=threshold,
            )  # fmt: skip
            self._opened.callback(table.close)
            tables.append(table)
            _fill(table, databases)
        if databases.source is not None:
            self._find_updated(model, databases, databases.source)

    def _find_updated(self, model: ServedModel, databases: Databases, source: UpdateSource) -> None:
        followed = self._followed.setdefault(source, {})
        for name, table in zip(model.names, self._tables[model.model_name], strict=True):
            topic = topic_of(model.model_name, name)
            if all(level.role != "store" for level in table.levels):
                raise ConfigError(
                    "updates need a place that keeps them", where=f"HPS, table {table.name!r}",
                    fix="a persistent_db without read_only, or a volatile_db in memory without overflow_margin",
                )  # fmt: skip
            if databases.follows(model.model_name, topic):
                followed[topic] = (table, table.layout["weight"].width)

    def _follow(self) -> None:
        for source, tables in self._followed.items():
            settings = {"topic.metadata.refresh.interval.ms": source.metadata_refresh_interval_ms}
            poll_s, backoff_s = source.poll_timeout_ms / 1000, source.failure_backoff_ms / 1000
            reader = MessageSource(source.addresses, tables, settings=settings, poll_s=poll_s, backoff_s=backoff_s)
            self._opened.callback(reader.close)
            self.updates.append(reader)

    # Lookup -----------------------------------------------------------------------------------------------------

    def _table(self, model_name: str, table_id: int) -> TableHierarchy:
        if model_name not in self._tables:
            raise ConfigError("no such model", where="HPS", value=model_name, fix=suggest(model_name, self._tables))
        tables = self._tables[model_name]
        if not 0 <= table_id < len(tables):
            raise ConfigError("no such table", where=f"HPS, model {model_name!r}", value=table_id,
                              allowed=f"0 to {len(tables) - 1}")  # fmt: skip
        return tables[table_id]

    def tables(self, model_name: str) -> list[TableHierarchy]:
        """Return the tiers of a model's tables, in the order of its sparse files."""
        self._table(model_name, 0)
        return list(self._tables[model_name])

    def lookup(self, keys: Any, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return (n, D), a vector for each key."""
        table = self._table(model_name, table_id)
        wanted = np.ascontiguousarray(whole_numbers(keys, np.int64, "HPS, keys").reshape(-1))
        rows = table.layout.empty(len(wanted))
        table.lookup(wanted, rows)
        found: NDArray[np.float32] = np.ascontiguousarray(table.layout.column(rows, "weight")).view(np.float32)
        return found

    def lookup_fromdlpack(self, keys: Any, output: Any, model_name: str, table_id: int, device_id: int = 0) -> None:
        """Look keys up, and write their vectors into a tensor; both are DLPack capsules, which stay unused.

        Raises:
            ConfigError: an argument is no capsule of a tensor, or the tensor has another size or type.
        """
        with _borrowed(keys, "keys") as given, _borrowed(output, "output") as out:
            found = torch.from_numpy(self.lookup(given.cpu().numpy(), model_name, table_id))
            if out.dtype is not torch.float32 or out.numel() != found.numel() or not out.is_contiguous():
                raise ConfigError("the output does not fit the vectors", where="lookup_fromdlpack, output",
                                  value=f"{tuple(out.shape)} of {out.dtype}",
                                  allowed=f"{found.numel()} contiguous numbers of torch.float32")  # fmt: skip
            out.view(-1).copy_(found.view(-1))

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """Return by model what its tables and their tiers have done."""
        return {name: [table.status() for table in tables] for name, tables in self._tables.items()}

    def close(self) -> None:
        """Close all tiers."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_MANAGED_BYTES: Final = 64
_DELETER_BYTES: Final = 8
"""Sizes of DLPack's struct DLManagedTensor, and of its last field, the function that frees the tensor."""
_lent: dict[int, Any] = {}
"""By address, the structs that tensors hold: torch reads the deleter there when the last view of a tensor is freed."""


def _release(address: int) -> None:
    """Free a struct of ours; the memory of its tensor belongs to the capsule that it was copied from."""
    _lent.pop(address, None)


_DELETER: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)


@contextmanager
def _borrowed(capsule: Any, argument: str) -> Iterator[torch.Tensor]:
    """Return the tensor of a DLPack capsule for a block, and leave the capsule to its owner.

    torch's from_dlpack takes the tensor out of the capsule, while HugeCTR's scripts read it from there afterwards.
    """
    lent, place = _lend(capsule)
    try:
        tensor = from_dlpack(lent)
    except Exception as error:
        _lent.pop(place, None)
        raise ConfigError("not a DLPack capsule of a tensor, or one that is used", value=type(capsule).__name__,
                          where=f"lookup_fromdlpack, {argument}", fix="torch.utils.dlpack.to_dlpack(tensor)"
                          ) from error  # fmt: skip
    yield tensor


def _lend(capsule: Any) -> tuple[Any, int]:
    """Return another capsule of the same tensor, and where its struct is; what is no capsule is returned as it is."""
    name, get, new = b"dltensor", ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    is_capsule = type(capsule).__name__ == "PyCapsule"
    if not is_capsule or not ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(capsule), name):
        return capsule, 0
    get.restype, new.restype = ctypes.c_void_p, ctypes.py_object
    known = ctypes.string_at(get(ctypes.py_object(capsule), name), _MANAGED_BYTES - _DELETER_BYTES)
    copied = ctypes.create_string_buffer(known + bytes(_DELETER), _MANAGED_BYTES)
    place = ctypes.addressof(copied)
    _lent[place] = copied
    return new(ctypes.c_void_p(place), name, None), place


def _fill(table: TableHierarchy, databases: Databases) -> None:
    """Fill the copies from the files, as the databases' settings say."""
    volatile = databases.volatile
    base = table.levels[-1].tier
    left = base.num_rows()
    wanted = any(level.role == "volatile" for level in table.levels)
    if volatile is not None:
        wanted = volatile.initialize_after_startup
        left = round(left * volatile.initial_cache_rate)
    for keys, _ in base.scan():
        if not wanted or left <= 0:
            break
        table.warm(keys[:left])
        left -= len(keys)


def _constant(value: NDArray[np.uint8]) -> Any:
    def write(keys: Keys, rows: Rows) -> None:
        del keys
        rows[:] = 0
        rows[:, : len(value)] = value

    return write
