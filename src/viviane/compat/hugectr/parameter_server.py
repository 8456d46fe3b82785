"""HugeCTR's parameter server in Python: vectors of keys, from the files of trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.serving_params import ParameterServerConfig, server_from_json
from viviane.core.errors import CheckpointError, ConfigError, suggest
from viviane.core.whole_numbers import whole_numbers


class _Table:
    """The rows of one table, by key: (K,) and (K, D)."""

    def __init__(self, folder: Path, dim: int | None, default: float) -> None:
        for name in ("key", "emb_vector"):
            if not (folder / name).is_file():
                raise CheckpointError("a file of the table is missing", where=str(folder / name))
        keys, vectors = np.fromfile(folder / "key", "<i8"), np.fromfile(folder / "emb_vector", "<f4")
        width = dim or (vectors.size // keys.size if keys.size else 1)
        if vectors.size != keys.size * width:
            raise CheckpointError(
                "keys and vectors do not fit together",
                where=str(folder),
                value=f"{keys.size} keys, {vectors.size} numbers",
                allowed=f"{width} a key",
            )
        order = np.argsort(keys, kind="stable")
        self.keys, self.vectors, self.default = keys[order], vectors.reshape(-1, width)[order], default

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a vector for each key, the default where it is not there."""
        result = np.full((len(keys), self.vectors.shape[1]), self.default, np.float32)
        if len(self.keys):
            places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            there = self.keys[places] == keys
            result[there] = self.vectors[places[there]]
        return result


class HPS:
    """Looks keys up in the tables of several models; every answer is exact.

    Args:
        config: a ParameterServerConfig, or the path of a parameter server's JSON.
    """

    def __init__(self, config: ParameterServerConfig | str) -> None:
        given = server_from_json(config) if isinstance(config, str | Path) else config
        self._tables: dict[str, list[_Table]] = {}
        for params in given.inference_params_array:
            widths = given.embedding_vec_size.get(params.model_name) or params.embedding_vecsize_per_table or []
            self._tables[params.model_name] = [
                _Table(Path(folder), widths[i] if i < len(widths) else None, params.default_of(i))
                for i, folder in enumerate(params.sparse_model_files)
            ]
        print_notes()

    def _table(self, model_name: str, table_id: int) -> _Table:
        if model_name not in self._tables:
            raise ConfigError("no such model", where="HPS", value=model_name, fix=suggest(model_name, self._tables))
        tables = self._tables[model_name]
        if not 0 <= table_id < len(tables):
            raise ConfigError("no such table", where=f"HPS, model {model_name!r}", value=table_id,
                              allowed=f"0 to {len(tables) - 1}")  # fmt: skip
        return tables[table_id]

    def lookup(self, keys: Any, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return (n, D), a vector for each key."""
        return self._table(model_name, table_id).find(whole_numbers(keys, np.int64, "HPS, keys").reshape(-1))

    def lookup_fromdlpack(self, keys: Any, output: Any, model_name: str, table_id: int, device_id: int = 0) -> None:
        """Look keys up, and write their vectors into a tensor; both are DLPack capsules."""
        given, out = from_dlpack(keys), from_dlpack(output)
        found = self._table(model_name, table_id).find(
            whole_numbers(given.cpu().numpy(), np.int64, "HPS, keys").reshape(-1)
        )
        out.view(-1).copy_(torch.from_numpy(found).view(-1))
