"""HugeCTR's embedding training cache: passes over sources with their keysets.

A pass brings the rows of its keyset into memory, with their optimizer state, and writes changed rows of the pass before
to a file (`viviane.training.passes`). Tables that fit into workspace_size_per_gpu_in_mb stay whole in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from viviane.compat.hugectr.argument_types import typed_methods
from viviane.compat.hugectr.arguments import Arguments, Signature, note
from viviane.compat.hugectr.columns import Columns
from viviane.compat.hugectr.files import load_sparse, sparse_embeddings, write_folder
from viviane.compat.hugectr.pass_memory import keys_of_slots
from viviane.compat.hugectr.processes import group
from viviane.compat.hugectr.tables import Keys, collection_of, read_rows, slots_of
from viviane.core.errors import ConfigError, DataError, DataNotFoundError
from viviane.model import Model as VivianeModel
from viviane.training.passes import begin_pass, tiered_storages

Updates: TypeAlias = list[tuple[Keys, NDArray[np.float32]]]


class HMemCacheConfig(Arguments):
    """HugeCTR's host memory over a Cached parameter server; here the operating system keeps what it has memory for."""

    signature: ClassVar[Signature] = Signature(
        "CreateHMemCache", {"num_blocks": 1, "target_hit_rate": 1.0, "max_num_evict": 0}
    )


class EtcParams(Arguments):
    """Folders from which the tables of passes are read and to which they are written."""

    signature: ClassVar[Signature] = Signature(
        "CreateETC",
        {"ps_types": [], "sparse_models": [], "local_paths": [], "hmem_cache_configs": []},
        speed=frozenset({"ps_types", "hmem_cache_configs"}),
    )

    @property
    def folder(self) -> str:
        """The folder of this process's rows that are not in memory; "": that of temporary files."""
        return _folder_of_process(self.local_paths)

    @property
    def folders(self) -> list[str]:
        """The folder of each embedding, or an empty list."""
        return list(self.sparse_models)


class MosParams(Arguments):
    """The arguments of the model oversubscriber, before 3.3."""

    signature: ClassVar[Signature] = Signature(
        "CreateMOS",
        {
            "train_from_scratch": True, "use_host_memory_ps": True, "trained_sparse_models": [],
            "dest_sparse_models": [], "ps_types": [], "sparse_models": [], "local_paths": [], "hmem_cache_configs": [],
        },
        speed=frozenset({"use_host_memory_ps", "ps_types", "hmem_cache_configs"}),
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        if args and isinstance(args[0], list | tuple):  # 3.2.1 had CreateETC's arguments
            names = ("ps_types", "sparse_models", "local_paths", "hmem_cache_configs")
            args, given = (), dict(zip(names, args, strict=False)) | given
        super().__init__(*args, **given)

    @property
    def folder(self) -> str:
        """The folder of this process's rows that are not in memory; "": that of temporary files."""
        return _folder_of_process(self.local_paths)

    @property
    def folders(self) -> list[str]:
        """The folder of each embedding, or an empty list."""
        return list(self.sparse_models or self.trained_sparse_models or self.dest_sparse_models)


def _folder_of_process(paths: Sequence[str]) -> str:
    """Return the path of this process: there is one for each, or one for all; with fewer processes some are unused."""
    if not paths:
        return ""
    rank = group().rank
    if 1 < len(paths) < group().size:
        raise ConfigError("there must be one local path per process", where="local_paths", value=len(paths),
                          allowed=f"1, or at least {group().size}")  # fmt: skip
    if len(paths) > group().size:
        note("local_paths", f"those beyond the number of processes, {group().size}")
    return str(paths[min(rank, len(paths) - 1)])


@typed_methods
class EmbeddingTrainingCache:
    """The result of get_embedding_training_cache and get_model_oversubscriber.

    Args:
        model: the compiled Viviane model.
        columns: columns of its data.
        params: result of CreateETC or CreateMOS.
    """

    def __init__(self, model: VivianeModel, columns: Columns, params: EtcParams | MosParams) -> None:
        self._model, self._columns, self.folders = model, columns, [Path(one) for one in params.folders]
        self._keys: list[Keys] = []
        self.orders: Mapping[str, Keys] = {}
        """The order of keys in each loaded file."""
        node_names = [node.name for node in sparse_embeddings(model, self._columns)]
        if self.folders and len(self.folders) != len(node_names):
            raise ConfigError("there must be one sparse model per embedding", where=params.signature.name,
                              value=params.folders, allowed=f"{len(node_names)}: {', '.join(node_names)}")  # fmt: skip
        trained = isinstance(params, MosParams) and not params.train_from_scratch
        there = {
            name: str(folder)
            for name, folder in zip(node_names, self.folders, strict=False)
            if trained or folder.is_file() or (folder / "key").is_file()
        }
        if there:
            self.orders = load_sparse(model, columns, there)

    def update(self, keyset_file: str | Sequence[str]) -> None:
        """Start a pass.

        Raises:
            DataError: a keyset is missing, its size is not a multiple of the key size, or a key is in no slot.
            CacheFullError: the rows of a table do not fit into its part of the workspace.
        """
        files = [keyset_file] if isinstance(keyset_file, str) else list(keyset_file)
        given = [self._read(Path(file)) for file in files]
        if tiered_storages(self._model.module):
            needed = np.unique(np.concatenate([*given, np.empty(0, np.int64)]))
            slots = [one for one in self._columns.slots if not one.table]
            begin_pass(self._model.module, keys_of_slots(needed, slots, ", ".join(files)))
        self._keys += given

    def _read(self, path: Path) -> Keys:
        width = self._columns.key_bytes
        if not path.is_file():
            raise DataNotFoundError("keyset not found", where=str(path))
        if path.stat().st_size % width:
            raise DataError("a keyset contains only keys", where=str(path), value=f"{path.stat().st_size} bytes",
                            allowed=f"{width} bytes per key")  # fmt: skip
        return np.fromfile(path, "<u4" if width == 4 else "<i8").astype(np.int64)

    def dump(self) -> None:
        """Write the tables to their folders."""
        self.write()

    def write(self) -> None:
        """Write each table to its folder, if CreateETC set folders."""
        model = self._model
        for node, folder in zip(sparse_embeddings(model, self._columns), self.folders, strict=False):
            rows = read_rows(collection_of(model, node), slots_of(node, self._columns))
            write_folder(folder, rows)

    def incremental(self) -> Updates:
        """Return, for each embedding, keys and vectors of all passes since the last call."""
        model, result = self._model, []
        wanted: Any = np.unique(np.concatenate([*self._keys, np.empty(0, np.int64)]))
        for node in sparse_embeddings(model, self._columns):
            rows = read_rows(collection_of(model, node), slots_of(node, self._columns))
            mine = np.isin(rows.keys, wanted)
            result.append((rows.keys[mine], rows.vectors[mine]))
        self._keys.clear()
        return result
