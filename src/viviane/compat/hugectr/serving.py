"""HugeCTR's inference sessions: a trained model from its files, with raw keys."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import viviane.config as settings
from viviane.batch import Bag, Batch, Layout
from viviane.compat.hugectr import files
from viviane.compat.hugectr.argument_types import typed_methods
from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.columns import Columns, Slot, columns_of
from viviane.compat.hugectr.enums import Check_t, DataReaderType_t
from viviane.compat.hugectr.graph import Graph, assemble
from viviane.compat.hugectr.inputs import DataReaderParams, Input
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.json_graph import graph_layers
from viviane.compat.hugectr.names import graph_name
from viviane.compat.hugectr.parameter_server import HPS
from viviane.compat.hugectr.reading import DataReader
from viviane.compat.hugectr.scores import auc
from viviane.compat.hugectr.serving_params import InferenceParams, ParameterServerConfig
from viviane.compat.hugectr.solver import OptParams
from viviane.compat.hugectr.tables import collection_of
from viviane.compat.hugectr.tensors import tensor_of
from viviane.compat.hugectr.versions import older_names
from viviane.core.errors import ConfigError, DataError
from viviane.core.json_files import expected_form, json_object
from viviane.core.whole_numbers import whole_numbers
from viviane.embedding import ConstantInit, DynamicOptions
from viviane.model import Model, SparseEmbedding
from viviane.serving.parameter_server.lookups import StoreCollection
from viviane.training.evaluation import evaluating

_ENDS: Final = {"Sigmoid": "BinaryCrossEntropyLoss", "Softmax": "CrossEntropyLoss"}
"""Last layers of an inference JSON of 3.0, and the losses whose predictions they compute."""

_MOST_ROWS: Final = 1 << 31
"""Predictions of one call, which lie in memory."""


@typed_methods
class InferenceModel:
    """Predicts from the files of a trained model.

    Args:
        model_config_path: JSON of the graph, from graph_to_json, or a JSON with an inference clause of 3.0.
        inference_params: files of the weights.
    """

    def __init__(self, model_config_path: str, inference_params: InferenceParams) -> None:
        self.params = inference_params
        with expected_form(model_config_path):
            content = _with_loss(load_json(model_config_path))
        self._graph = Graph.of(graph_layers(content, include_dense_network=True, where=model_config_path))
        self._columns = _raw_columns(self._graph.given, inference_params.i64_input_key)
        self._model = self._assemble()
        if inference_params.dense_model_file:
            files.load_dense(self._model, inference_params.dense_model_file, inference_params.non_trainable_params_file)
        self._server: HPS | None = None
        if inference_params.sparse_model_files and _in_tiers(inference_params):
            self._server = HPS(ParameterServerConfig(inference_params_array=[inference_params]))
            weakref.finalize(self, self._server.close)
            self._use_tiers(self._server)
        elif inference_params.sparse_model_files:
            files.load_sparse(self._model, self._columns, inference_params.sparse_model_files)
        self._last: Batch | None = None
        print_notes()

    def _use_tiers(self, server: HPS) -> None:
        """Let embeddings look keys up in the parameter server's tiers; the model's own tables stay empty."""
        given = files.by_embedding(self._model, self._columns, self.params.sparse_model_files, "InferenceParams")
        for (node, folder), table in zip(given, server.tables(self.params.model_name), strict=True):
            width = table.layout["weight"].width
            if width != node.dim:
                raise ConfigError("vectors of another length", where=str(folder), value=width, allowed=str(node.dim))
            collection = collection_of(self._model, node)
            tables, features = list(collection.tables.values()), list(collection.features.values())
            lookups = StoreCollection(tables, features, {one.name: table for one in tables}, torch.device("cpu"))
            lookups.eval()
            collection.forward = lookups.forward  # type: ignore[method-assign, assignment]

    @property
    def server(self) -> HPS | None:
        """The parameter server of this model's tables; None: they are in memory."""
        return self._server

    @property
    def viviane(self) -> Model:
        """The Viviane model of this model."""
        return self._model

    @property
    def graph(self) -> Graph:
        """HugeCTR's graph."""
        return self._graph

    @property
    def columns(self) -> Columns:
        """The columns of the model: a bag of raw keys per slot."""
        return self._columns

    def save(self, folder: str | Path) -> None:
        """Save as a model folder of Viviane, for `viviane serve` and Triton.

        Raises:
            ConfigError: the tables are in a parameter server's tiers, not in memory.
        """
        if self._server is not None:
            raise ConfigError(
                "the tables are in databases, which a model folder does not hold", where="InferenceModel.save",
                fix="leave volatile_db, persistent_db and update_source out of InferenceParams",
            )  # fmt: skip
        self._model.save(folder)

    def _assemble(self) -> Model:
        trainer = settings.Solver(device="cpu", precision="fp32")
        raw = replace(self._graph, added=tuple(_unsized(one) for one in self._graph.added),
                      embeddings=tuple(_unsized(one) for one in self._graph.embeddings))  # fmt: skip
        defaults = [self.params.default_of(i) for i in range(len(raw.embeddings))]
        model = assemble(raw, self._columns, self.params.model_name, OptParams(), trainer,
                         change=lambda node: _with_default(node, raw, defaults))  # fmt: skip
        model.compile(OptParams().to_dense())
        return model

    def predict(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t = Check_t.Non,
        slot_size_array: Sequence[int] = (),
        data_source_params: Any = None,
    ) -> NDArray[np.float32]:
        """Return the predictions of the first batches of a source: (rows,), or (rows, labels) for several labels.

        A shorter source is repeated from its beginning until all batches are full.
        """
        parts = [found for found, _ in self._over(num_batches, source, data_reader_type, check_type, slot_size_array)]
        result = np.concatenate(parts)
        result = result[np.arange(num_batches * self.params.max_batchsize) % len(result)]
        tensor: NDArray[np.float32] = result[:, 0] if result.shape[1] == 1 else result
        return tensor

    def evaluate(
        self,
        num_batches: int,
        source: str,
        data_reader_type: DataReaderType_t,
        check_type: Check_t = Check_t.Non,
        slot_size_array: Sequence[int] = (),
        data_source_params: Any = None,
    ) -> float:
        """Return the AUC over the first batches of a source, the mean over labels."""
        parts = list(self._over(num_batches, source, data_reader_type, check_type, slot_size_array))
        found, labels = (np.concatenate([part[i] for part in parts]).astype(np.float64) for i in range(2))
        return float(np.mean([auc(found[:, i], labels[:, i]) for i in range(found.shape[1])]))

    def check_out_tensor(self, tensor_name: str) -> NDArray[np.float32]:
        """Return a tensor of the last batch; the output of the last layer is a probability."""
        if self._last is None:
            raise ConfigError("nothing has been predicted", where="check_out_tensor", fix="call predict first")
        return tensor_of(self._model, graph_name(tensor_name), self._last)

    def refresh_embedding_cache(self) -> None:
        """Do nothing: lookups read the tables, and caches of a parameter server take part in updates."""

    def predict_lists(self, dense: ArrayLike, keys: ArrayLike, row_ptrs: ArrayLike) -> NDArray[np.float32]:
        """Return predictions (rows, labels) of rows in memory; keys and offsets are concatenated by table."""
        given, groups = self._graph.given, self._columns.slots
        pointers = whole_numbers(row_ptrs, np.int64, "predict, row_ptrs")
        slots = [len([one for one in groups if one.group == node.bottom_name]) for node in self._graph.embeddings]
        rows, rest = divmod(len(pointers) - len(slots), sum(slots))
        if rest or rows < 1:
            raise DataError("row_ptrs needs rows x slots + 1 offsets per table", where="predict",
                            value=len(pointers), allowed=f"rows x {sum(slots)} + {len(slots)}")  # fmt: skip
        try:
            numbers = np.ascontiguousarray(dense, np.float32)
        except (TypeError, ValueError) as error:
            raise DataError("dense values must be numbers", where="predict, dense", value=str(error)) from error
        if numbers.size != rows * given.dense_dim:
            raise DataError("dense needs dense_dim values per row", where="predict", value=numbers.size,
                            allowed=f"{rows} x {given.dense_dim}")  # fmt: skip
        bags = self._bags(whole_numbers(keys, np.int64, "predict, keys"), pointers, rows, slots)
        batch = Batch(
            Layout.of(self._columns.model_schema()), torch.zeros(rows, 0), torch.from_numpy(numbers).view(rows, -1),
            torch.zeros(rows, 0, dtype=torch.int64), bags, origin="predict",
        )  # fmt: skip
        return self._run(batch)

    def _bags(self, keys: Any, pointers: Any, rows: int, slots: Sequence[int]) -> dict[str, Bag]:
        bags: dict[str, Bag] = {}
        first = begin = 0
        for node, count in zip(self._graph.embeddings, slots, strict=True):
            offsets = pointers[begin : begin + rows * count + 1]
            begin += rows * count + 1
            own = keys[first : first + int(offsets[-1])]
            if offsets[0] or len(own) != offsets[-1] or (offsets[1:] < offsets[:-1]).any():
                raise DataError("offsets must ascend from 0 to the number of keys", where="predict, row_ptrs",
                                value=f"{offsets[0]} to {offsets[-1]}, {len(own)} keys")  # fmt: skip
            first += len(own)
            lengths = np.diff(offsets).reshape(rows, count)
            owner = np.repeat(np.arange(rows * count) % count, lengths.reshape(-1))
            members = [one for one in self._columns.slots if one.group == node.bottom_name]
            for place, slot in enumerate(members):
                ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[:, place])]))
                bags[slot.column] = Bag(torch.from_numpy(own[owner == place]), ends)
        return bags

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        trainer = self._model.trainer
        self._last = batch
        with evaluating(trainer.module):
            output = trainer.module(batch)
        result: NDArray[np.float32] = trainer.objective.predictions(output, batch.size).numpy()
        return result

    def _over(
        self, num_batches: int, source: str, kind: DataReaderType_t, check: Check_t, sizes: Sequence[int]
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        most = _MOST_ROWS // self.params.max_batchsize
        if not 1 <= num_batches <= most:
            raise ConfigError("no number of batches", where="num_batches", value=str(num_batches)[:50],
                              allowed=f"1 to {most:,} of {self.params.max_batchsize} rows")  # fmt: skip
        params = DataReaderParams(kind, source, eval_source=source, check_type=check, slot_size_array=list(sizes))
        columns = columns_of(params, self._graph.given, self._graph.embeddings, i64_input_key=self.params.i64_input_key)
        raw = replace(columns, slots=tuple(replace(slot, size=None) for slot in columns.slots), _shifts={})
        reader = DataReader(params, raw, self.params.max_batchsize, repeat=False, training=False, drop_last=False)
        reader.set_source(source)
        for _ in range(num_batches):
            batch = reader.next_batch()
            if batch is None:
                break
            yield self._run(self._as_served(batch, raw)), batch.labels.numpy()
        reader.close()

    def _as_served(self, batch: Batch, columns: Columns) -> Batch:
        """Return a batch whose columns are bags with the model's names."""
        names = zip(self._columns.slots, columns.slots, strict=True)
        bags = {mine.column: batch.bag(theirs.column) for mine, theirs in names}
        layout = Layout.of(self._columns.model_schema())
        return replace(batch, layout=layout, one_hot=batch.one_hot[:, :0], bags=bags)


@typed_methods
class InferenceSession(InferenceModel):
    """Inference on one device, for rows in memory or from a source.

    Args:
        model_config_path: JSON of the graph.
        inference_params: files of the weights; in 3.0 the device index.
        embedding_cache: in 3.0 the result of CreateEmbeddingCache.
    """

    def __init__(self, model_config_path: str, inference_params: Any, embedding_cache: Any = None) -> None:
        if embedding_cache is not None:
            inference_params = _params_of_3_0(model_config_path, embedding_cache)
        super().__init__(model_config_path, inference_params)

    def predict(self, *args: Any, **given: Any) -> Any:
        """Predict: (dense, embeddingcolumns, row_ptrs) returns a list, (num_batches, source, ...) an array."""
        names = ("dense_feature", "embeddingcolumns", "row_ptrs", "i64_input_key")
        if isinstance(args[0] if args else given.get("num_batches"), int):
            return super().predict(*args, **given)
        older = older_names("InferenceSession.predict")
        lists = dict(zip(names, args, strict=False)) | {older.get(name, name): one for name, one in given.items()}
        missing = [name for name in names[:3] if name not in lists]
        if missing:
            raise ConfigError("an argument is missing", where="InferenceSession.predict", value=missing[0])
        return self.predict_lists(*(lists[name] for name in names[:3])).reshape(-1).tolist()


@typed_methods
class EmbeddingCache:
    """The result of 3.0's CreateEmbeddingCache: holds the type of keys."""

    def __init__(self, parameter_server: Any, *args: Any) -> None:
        self.arguments = args
        self.i64_input_key = bool(args[-1]) if args else False


@typed_methods
class ParameterServer:
    """The result of 3.0's CreateParameterServer: models read their own files."""

    def __init__(self, model_config_paths: Sequence[str], model_names: Sequence[str], i64_input_key: bool) -> None:
        if len(model_names) != len(model_config_paths):
            raise ConfigError("each model needs one name", where="CreateParameterServer", value=model_names)
        self.models = dict(zip(model_names, model_config_paths, strict=True))
        self.i64_input_key = i64_input_key


def _params_of_3_0(config: str, cache: EmbeddingCache) -> InferenceParams:
    clause = json_object(load_json(config), where=config).get("inference")
    if clause is None:
        raise ConfigError("a clause is missing", where=config, value="inference")
    sparse = clause["sparse_model_file"]
    return InferenceParams(
        model_name=Path(config).stem, max_batchsize=clause.get("max_batchsize", 64),
        dense_model_file=clause["dense_model_file"], sparse_model_files=[sparse] if isinstance(sparse, str) else sparse,
        i64_input_key=cache.i64_input_key,
    )  # fmt: skip


def _in_tiers(params: InferenceParams) -> bool:
    """Whether the arguments name a database or a source of updates; else all rows fit into memory."""
    return any(one is not None for one in (params.volatile_db, params.persistent_db, params.update_source))


def _with_loss(content: Any) -> Any:
    """Return a graph whose last layer is the loss instead of its prediction."""
    last = content["layers"][-1]
    if last["type"] not in _ENDS:
        return content
    label = content["layers"][0]["label"]
    data = {**content["layers"][0], "label": {"top": "label", **label}}
    bottom = last["bottom"] if isinstance(last["bottom"], str) else last["bottom"][0]
    loss = {"type": _ENDS[last["type"]], "bottom": [bottom, data["label"]["top"]], "top": last["top"]}
    return {**content, "layers": [data, *content["layers"][1:-1], loss]}


def _raw_columns(given: Input, wide: bool) -> Columns:
    """Return columns with HugeCTR's keys: bags of any key, one table per group."""
    labels = {name: tuple(f"{name}_{i}" if dim > 1 else name for i in range(dim)) for name, dim in given.labels.items()}
    slots = tuple(
        Slot(f"{group.top_name}_{i}", group.top_name, nnz, one_hot=False)
        for group in given.sparse
        for i, nnz in enumerate(group.nnz)
    )
    dense = ((given.dense_name, given.dense_dim),) if given.dense_dim else ()
    return Columns(labels, dense, slots, 8 if wide else 4)


def _unsized(one: Any) -> Any:
    if not hasattr(one, "slot_size_array"):
        return one
    copy = object.__new__(type(one))
    vars(copy).update({**vars(one), "slot_size_array": []})
    return copy


def _with_default(node: Any, graph: Graph, defaults: Sequence[float]) -> Any:
    """Return an embedding node that uses the table's default value for absent keys."""
    names = [one.sparse_embedding_name for one in graph.embeddings]
    if not isinstance(node, SparseEmbedding) or node.name not in names:
        return node
    value = defaults[names.index(node.name)]
    options = DynamicOptions(absent="initial") if value else DynamicOptions()
    return node.model_copy(update={"init": ConstantInit(value=value), "dynamic": options, "trainable": False})
