"""HugeCTR's Model: graph, data and optimizer of a script, trained by Viviane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from viviane.compat.hugectr import files, json_graph
from viviane.compat.hugectr.arguments import print_notes, say
from viviane.compat.hugectr.columns import Columns
from viviane.compat.hugectr.fitting import FitSettings, fit_epochs, fit_iterations
from viviane.compat.hugectr.graph import Graph, build_model
from viviane.compat.hugectr.inputs import DataReaderParams, Input, SparseEmbedding
from viviane.compat.hugectr.layers import DenseLayer, GroupDenseLayer
from viviane.compat.hugectr.reading import DataReader
from viviane.compat.hugectr.scores import Scores
from viviane.compat.hugectr.solver import LearningRateScheduler, OptParams, Solver
from viviane.core.errors import ConfigError
from viviane.model import Model as VivianeModel
from viviane.training.evaluation import evaluating
from viviane.training.precision import Precision


class Model:
    """HugeCTR's Model.

    Args:
        solver: what CreateSolver returned.
        reader_params: DataReaderParams.
        opt_params: what CreateOptimizer returned.
    """

    def __init__(self, solver: Solver, reader_params: DataReaderParams, opt_params: OptParams, *more: Any) -> None:
        if more:
            raise ConfigError("an embedding training cache is not mapped", where="Model, etc_params",
                              fix="leave it out: tables here grow with their keys")  # fmt: skip
        self.solver, self.reader_params, self.opt_params = solver, reader_params, opt_params
        self.added: list[Any] = []
        self.lr = float(solver.lr)
        self._scheduler = solver.scheduler()
        self._loss: torch.Tensor | None = None
        self._model: VivianeModel | None = None
        self._settings = solver.to_viviane()
        self._sources: list[str] = reader_params.sources

    # Building ---------------------------------------------------------------------------------------------

    def add(self, layer: Any) -> None:
        """Append an Input, a SparseEmbedding, a DenseLayer or a GroupDenseLayer.

        Raises:
            ConfigError: something else, or the model is compiled.
        """
        if self._model is not None:
            raise ConfigError("the model is compiled; nothing can be added any more")
        layer = layer.to_layer() if isinstance(layer, GroupDenseLayer) else layer
        if not isinstance(layer, Input | SparseEmbedding | DenseLayer):
            raise ConfigError("this cannot be added to a model", value=type(layer).__name__,
                              allowed="Input, SparseEmbedding, DenseLayer, GroupDenseLayer")  # fmt: skip
        self.added.append(layer)

    def compile(self, loss_names: Sequence[str] | None = None, loss_weights: Sequence[float] | None = None) -> None:
        """Check the graph, make the weights, open the data.

        Args:
            loss_names: labels whose losses are weighed.
            loss_weights: one for each; they scale gradients too, which HugeCTR leaves unscaled.
        """
        if self._model is not None:
            raise ConfigError("the model is compiled already")
        weights = dict(zip(loss_names or (), loss_weights or (), strict=True)) or None
        if weights:
            say("Note: loss_weights scale the gradients as well as the reported loss")
        self._model, self.columns = build_model(
            Graph.of(self.added), self.solver, self.reader_params, self.opt_params, weights, self._settings
        )
        self._model.module.train()
        repeat, drop = self.solver.repeat_dataset, self.solver.drop_incomplete_batch
        reader = self.reader_params
        self._train = DataReader(reader, self.columns, self.solver.batchsize, repeat=repeat, training=True,
                                 drop_last=drop)  # fmt: skip
        self._eval = DataReader(reader, self.columns, self.solver.batchsize_eval, repeat=repeat, training=False,
                                drop_last=False)  # fmt: skip
        self._scores = Scores(list(self.solver.metrics_spec), _label_places(self.columns))
        print_notes()

    @property
    def viviane(self) -> VivianeModel:
        """The model of Viviane behind this one.

        Raises:
            ConfigError: before `compile`.
        """
        if self._model is None:
            raise ConfigError("the model is not compiled", fix="call model.compile() first")
        return self._model

    def summary(self) -> None:
        """Print layers, shapes and tables."""
        self.viviane.summary()

    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph as HugeCTR's JSON."""
        json_graph.write_graph(graph_config_file, Graph.of(self.added), self.solver, self.reader_params)

    def construct_from_json(self, graph_config_file: str, include_dense_network: bool) -> None:
        """Add what a JSON graph holds: its data and embeddings, and its dense layers if asked for."""
        for layer in json_graph.read_graph(graph_config_file, include_dense_network):
            self.add(layer)

    # Training ---------------------------------------------------------------------------------------------

    def fit(
        self,
        num_epochs: int = 0,
        max_iter: int = 2000,
        display: int = 200,
        eval_interval: int = 1000,
        snapshot: int = 10000,
        snapshot_prefix: str = "",
        **more: Any,
    ) -> None:
        """Train, with HugeCTR's lines on the console: by iterations, or by epochs where repeat_dataset is False."""
        if more:
            raise ConfigError("fit cannot honour this argument", value=", ".join(more), fix="leave it out")
        self.viviane  # noqa: B018 - says that compile is missing
        given = FitSettings(num_epochs, max_iter, display, eval_interval, snapshot, snapshot_prefix)
        if self.solver.repeat_dataset:
            fit_iterations(self, given)
        else:
            fit_epochs(self, given, self._sources)

    def train(self, is_first_batch: bool = True) -> bool:
        """Train on one batch with the learning rate that was set; False at the end of the data."""
        batch = self._train.next_batch()
        if batch is None:
            return False
        trainer = self.viviane.trainer
        with trainer.switches():
            self._loss = trainer.train_step(batch, self.lr)
        return True

    def eval(self, eval_batch: int = -1) -> bool:
        """Evaluate one batch; False at the end of the data."""
        batch = self._eval.next_batch()
        if batch is None:
            return False
        trainer = self.viviane.trainer
        there = batch.to(trainer.device)
        with evaluating(trainer.module), (trainer.precision or Precision("fp32")).context(trainer.device):
            output = trainer.module(there)
        loss = trainer.objective.loss(output, there, training=False)
        predicted = trainer.objective.predictions(output, there.size)
        found, labels = (part.double().cpu().numpy() for part in (predicted, there.labels))
        self._scores.add(found, labels, float(loss))
        return True

    def get_current_loss(self) -> float:
        """Return the loss of the last training batch."""
        return 0.0 if self._loss is None else float(self._loss)

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the metrics over the batches since the last call."""
        return self._scores.take()

    def start_data_reading(self) -> None:
        """Stand at the beginning of the data.

        Raises:
            ConfigError: sources are read once; there set_source begins.
        """
        if not self.solver.repeat_dataset:
            raise ConfigError("start_data_reading is for repeat_dataset=True", fix="call set_source on the readers")
        self.viviane  # noqa: B018
        self._train.set_source()
        self._eval.set_source()

    def set_source(self, source: str | list[str], eval_source: str, *more: str) -> None:
        """Choose what the next fit reads, where sources are read once.

        Raises:
            ConfigError: repeat_dataset is True, or keysets are given.
        """
        if more or self.solver.repeat_dataset:
            what = "keysets are not mapped" if more else "set_source is for repeat_dataset=False"
            raise ConfigError(what, where="set_source", fix="give source and eval_source alone, in epoch mode")
        self._sources = [source] if isinstance(source, str) else list(source)
        self.reader_params.eval_source = eval_source

    def get_data_reader_train(self) -> DataReader:
        """Return the reader of training data."""
        self.viviane  # noqa: B018
        return self._train

    def get_data_reader_eval(self) -> DataReader:
        """Return the reader of evaluation data."""
        self.viviane  # noqa: B018
        return self._eval

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """Return the schedule of the solver."""
        return self._scheduler

    def reset_learning_rate_scheduler(self, base_lr: float, *args: Any, **given: Any) -> None:
        """Begin another schedule."""
        self._scheduler = LearningRateScheduler(base_lr, *args, **given)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `train`."""
        self.lr = float(lr)

    # Weights ----------------------------------------------------------------------------------------------

    def freeze_embedding(self, name: str | None = None) -> None:
        """Keep one embedding as it is, or all."""
        self.viviane.freeze_embedding(name)

    def unfreeze_embedding(self, name: str | None = None) -> None:
        """Let embeddings move again."""
        self.viviane.unfreeze_embedding(name)

    def freeze_dense(self) -> None:
        """Keep all dense weights as they are."""
        self.viviane.freeze_dense()

    def unfreeze_dense(self) -> None:
        """Let dense weights move again."""
        self.viviane.unfreeze_dense()

    def save_params_to_files(self, prefix: str, iter: int = 0) -> None:  # noqa: A002 - HugeCTR's word
        """Write dense weights and tables in HugeCTR's layout."""
        files.save(self.viviane, self.columns, prefix, iter)

    def load_dense_weights(self, dense_model_file: str) -> None:
        """Read dense weights that save_params_to_files, or HugeCTR, wrote."""
        files.load_dense(self.viviane, dense_model_file)

    def load_sparse_weights(self, sparse_embedding_files: Sequence[str] | Mapping[str, str]) -> None:
        """Read tables: a folder for each embedding, in order or by name."""
        files.load_sparse(self.viviane, self.columns, sparse_embedding_files)

    def export_predictions(self, prediction_file: str, label_file: str) -> None:
        """Append predictions and labels of the last evaluation batch to text files, one number a line.

        Raises:
            ConfigError: nothing was evaluated yet.
        """
        if self._scores.last is None:
            raise ConfigError("nothing was evaluated yet", where="export_predictions", fix="call model.eval() first")
        for file, values in zip((prediction_file, label_file), self._scores.last, strict=True):
            with Path(file).open("a", encoding="utf-8") as out:
                np.savetxt(out, values.reshape(-1), fmt="%g")

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_MAPPED:
            raise ConfigError("a method of HugeCTR's Model is not mapped", value=name, fix=_NOT_MAPPED[name])
        raise AttributeError(f"HugeCTR's Model has no {name!r}")


_CACHE = "leave it out: tables here grow with their keys, no embedding training cache is needed"
_STATE = "weights travel in HugeCTR's files; to keep optimizer state too, use viviane.Model and its checkpoints"
_NOT_MAPPED = {
    "check_out_tensor": "read tensors with viviane.Model.module and a forward hook",
    "get_embedding_training_cache": _CACHE,
    "get_model_oversubscriber": _CACHE,
    "get_incremental_model": _CACHE,
    "dump_incremental_model_2kafka": _CACHE,
    "load_dense_optimizer_states": _STATE,
    "load_sparse_optimizer_states": _STATE,
    "embedding_load": "use load_sparse_weights",
    "embedding_dump": "use save_params_to_files",
}


def _label_places(columns: Columns) -> dict[str, range]:
    starts = accumulate((len(members) for members in columns.labels.values()), initial=0)
    return {name: range(a, b) for name, (a, b) in zip(columns.labels, pairwise(starts), strict=True)}
