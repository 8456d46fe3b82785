"""A saved model in memory, for prediction alone: weights without optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from viviane.config import SGD, AnyOptimizer, Solver
from viviane.core.errors import CheckpointError, ConfigError
from viviane.core.json_files import read_json
from viviane.core.locations import AnyPath
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.config import ZeroInit
from viviane.embedding.int8_tables import quantize_tables
from viviane.embedding.module_parts import collections_of
from viviane.model import Model
from viviane.model.losses import terms
from viviane.model.module import GraphModule
from viviane.model.saving import PUBLISHED_FILE, WEIGHTS, find_model, load_weights
from viviane.schema import Schema
from viviane.serving.parameter_server.settings import TableSettings
from viviane.serving.parameter_server.tables import Place, ServedTables
from viviane.store.applier import Published
from viviane.training.checkpoint.dense_state import dense_tensors
from viviane.training.checkpoint.load import load_dense_weights
from viviane.training.checkpoint.manifest import read_manifest
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision


@dataclass(frozen=True)
class LoadedModel:
    """What a session computes with.

    Args:
        module: in eval mode, on its device.
        objective: turns the module's output into predictions.
        trained_in: the precision that `Model.predict` takes.
        etl: the file of the fitted ETL, or None.
        strict_ids: categorical columns whose ids have to be in range.
        tables: tiers that hold the tables; None: they are in the module.
    """

    name: str
    schema: Schema
    module: nn.Module
    objective: Objective
    trained_in: Precision
    device: torch.device
    etl: AnyPath | None
    strict_ids: frozenset[str]
    tables: ServedTables | None = None

    def has_dynamic_tables(self) -> bool:
        """Whether a table is dynamic, whose lookups may write beside its rows."""
        collections = collections_of(self.module).values()
        return any(isinstance(table, DynamicTableConfig) for one in collections for table in one.tables.values())

    def replica(self) -> nn.Module:
        """Return a copy of the module that shares its weights and tables, for another thread."""
        shared: dict[int, Any] = {}
        for part in (*self.module.parameters(), *self.module.buffers()):
            shared[id(part)] = part
        for collection in collections_of(self.module).values():
            for storage in collection.all_storages():
                shared[id(storage)] = storage
        return copy.deepcopy(self.module, shared)


def load_model(
    folder: AnyPath,
    device: torch.device,
    module: nn.Module | None = None,
    *,
    tables: TableSettings | None = None,
    version: int = 1,
    table_dtype: Literal["model", "int8"] = "model",
) -> LoadedModel:
    """Read a saved model, verified.

    Args:
        folder: a model folder, or a run folder with `model/` inside.
        module: for a model made from a torch module, a module of the same shapes.
        tables: the tiers that hold the tables, which are not read then: their files are mapped, and compared with the
            manifest by shape; `viviane store verify` compares check sums.
        version: names the rows in stores.
        table_dtype: "int8" turns tables into 8-bit rows when they are read.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
        ConfigError: tiers for a model whose tables are parts of a torch module; 8-bit rows of a table that has none.
    """
    if table_dtype == "int8":
        _check_int8(folder, module, tables)
    blueprint = Model.blueprint(folder, device=str(device), module=module)
    solver, schema = blueprint.solver, blueprint.schema
    loss_terms, strict, served = None, set(), None
    if tables is not None:
        served = _served(find_model(folder), blueprint, tables, version, is_graph=module is None)
    if module is None:
        plan = blueprint.plan()
        loss_terms = terms(plan.losses, schema)
        strict = {name for one in plan.tables.values() for name in _strict(one.tables, one.features)}
        make: Any = _tables if served is None else served.make
        module = GraphModule(plan, SGD(), device=device, seed=solver.seed, make=make)
    else:
        for one in collections_of(module).values():
            strict |= _strict(list(one.tables.values()), list(one.features.values()))
    module = module.to(device)
    if served is None:
        load_weights(find_model(folder), module)
    else:
        load_dense_weights(served.place.weights, module, served.place.manifest)
        served.set_base(dense_tensors(module))
    if table_dtype == "int8":
        quantize_tables(collections_of(module).values())
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    objective = Objective(schema, Solver(), terms=loss_terms)
    objective.to(device)
    trained_in = Precision("fp32" if solver.precision == "auto" else solver.precision)
    return LoadedModel(
        name=blueprint.name, schema=schema, module=module, objective=objective, trained_in=trained_in, device=device,
        etl=blueprint.etl, strict_ids=frozenset(strict), tables=served,
    )  # fmt: skip


def _check_int8(folder: AnyPath, module: nn.Module | None, tables: TableSettings | None) -> None:
    fix = 'set table_dtype="model"'
    if module is not None:
        what = "tables of a torch module cannot be turned into 8-bit rows: its code may read them in other ways"
        raise ConfigError(what, where=str(folder), value="int8", fix=f"build the model from layers, or {fix}")
    if tables is not None:
        what = "tables in tiers cannot be turned into 8-bit rows"
        raise ConfigError(what, where=str(folder), value="int8", fix=f"leave `tables` out, or {fix}")


def _served(folder: Path, model: Model, tables: TableSettings, version: int, *, is_graph: bool) -> ServedTables:
    if not is_graph:
        raise ConfigError("tables of a torch module cannot be moved to tiers", where=str(folder),
                          fix="build the model from layers, or serve it without `tables`")  # fmt: skip
    weights = folder / WEIGHTS
    file = folder / PUBLISHED_FILE
    published = Published.from_json(read_json(file, error=CheckpointError), str(file)) if file.exists() else Published()
    return ServedTables(Place(model.name, version, weights, read_manifest(weights), published), tables)


def _strict(tables: Sequence[TableConfig | DynamicTableConfig], features: Sequence[FeatureConfig]) -> set[str]:
    """Return the features whose table refuses ids out of range."""
    raising = {one.name for one in tables if isinstance(one, TableConfig) and one.out_of_range == "raise"}
    return {feature.name for feature in features if feature.table in raising}


def _tables(
    tables: Sequence[TableConfig | DynamicTableConfig],
    features: Sequence[FeatureConfig],
    optimizer: AnyOptimizer,
    *,
    device: torch.device | str,
    seed: int,
    name: str,
) -> EmbeddingCollection:
    """Make tables without optimizer state; rows that the checkpoint fills anyway start at zero."""
    bare: list[TableConfig | DynamicTableConfig] = []
    for table in tables:
        changes: dict[str, Any] = {"optimizer": None}
        if isinstance(table, TableConfig):
            changes["init"] = ZeroInit()
        bare.append(table.model_copy(update=changes))
    return EmbeddingCollection(bare, features, optimizer, device=device, seed=seed)


def table_bytes(module: nn.Module) -> int:
    """Return the memory of a module's rows."""
    storages = {id(one): one for collection in collections_of(module).values() for one in collection.all_storages()}
    return sum(one.weight.numel() * one.weight.element_size() for one in storages.values())
