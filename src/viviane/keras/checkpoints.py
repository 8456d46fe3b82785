"""Tables of a Keras model as Viviane's checkpoints: any number of processes, `viviane checkpoint`, serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from viviane.core.errors import ConfigError
from viviane.keras.layer import table_layers
from viviane.training.checkpoint.load import load_checkpoint
from viviane.training.checkpoint.write import write_checkpoint


def _module(model: Any) -> nn.ModuleDict:
    layers = table_layers(model)
    if not layers:
        raise ConfigError("the model has no table layers")
    found: dict[str, nn.Module] = {}
    for layer in layers:
        name = layer.name.replace(".", "_")
        if name in found:
            raise ConfigError("two table layers of one name", value=name, fix="name the layers")
        found[name] = layer.collection
    return nn.ModuleDict(found)


def save_tables(model: Any, folder: str | Path, *, optimizer_state: bool = True) -> None:
    """Write the tables of all layers as a checkpoint of Viviane's, in which table t of layer l is "l.t".

    Processes that train together call it together; it may be loaded by another number of them. `viviane checkpoint
    inspect`, `diff`, `reshard` and `export` work on it, and so does `load_checkpoint` of a `torch.nn.Module` whose
    collections have the layers' names.

    Args:
        model: Keras'.
        folder: the checkpoint; replaced when the new one is whole.
        optimizer_state: False writes rows only, for serving.

    Example:
        >>> import tempfile
        >>> import keras, viviane.keras as vk
        >>> model = keras.Sequential([keras.Input((2,), dtype="int32"), vk.Embedding(9, 4, optimizer="sgd")])
        >>> folder = tempfile.mkdtemp() + "/tables"
        >>> save_tables(model, folder); load_tables(model, folder)
    """
    for layer in table_layers(model):
        layer.lookups.check()
    write_checkpoint(folder, _module(model), optimizer_state=optimizer_state)


def load_tables(model: Any, folder: str | Path, *, rows_only: bool = False) -> None:
    """Read what `save_tables` wrote, in this or another number of processes.

    Args:
        model: whose layers and tables have the same names and shapes.
        folder: the checkpoint.
        rows_only: reset the optimizer state of the tables.

    Raises:
        CheckpointError: a file is damaged, or tables differ; nothing is changed then.
    """
    load_checkpoint(folder, _module(model), weights_only=rows_only)
