"""HugeCTR's Model: the graph, data and optimizer of a script, trained by Viviane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.compat.hugectr import json_graph
from viviane.compat.hugectr.argument_types import typed, typed_methods
from viviane.compat.hugectr.arguments import print_notes, say
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Columns
from viviane.compat.hugectr.enums import Tensor_t
from viviane.compat.hugectr.fitting import FIT_DEFAULTS, FitSettings, fit_epochs, fit_iterations
from viviane.compat.hugectr.graph import Graph, build_model, describe_graph
from viviane.compat.hugectr.inputs import DataReaderParams, Input, SparseEmbedding
from viviane.compat.hugectr.layers import DenseLayer, GroupDenseLayer
from viviane.compat.hugectr.model_files import ModelFiles
from viviane.compat.hugectr.names import graph_name, graph_names
from viviane.compat.hugectr.pass_memory import pass_memory
from viviane.compat.hugectr.passes import EmbeddingTrainingCache, EtcParams, MosParams
from viviane.compat.hugectr.processes import rows_of_all
from viviane.compat.hugectr.reading import DataReader, EarlyReader
from viviane.compat.hugectr.scores import Scores
from viviane.compat.hugectr.solver import LearningRateScheduler, OptParams, Solver
from viviane.compat.hugectr.sources import note_remote
from viviane.compat.hugectr.tables import Keys
from viviane.compat.hugectr.tensors import Gradients, are_gradients_wanted, tensor_of
from viviane.compat.hugectr.versions import older_names
from viviane.core.errors import ConfigError, suggest
from viviane.model import Model as VivianeModel
from viviane.training.evaluation import evaluating
from viviane.training.step.precision import Precision


@typed_methods
class Model(ModelFiles):
    """HugeCTR's Model.

    Args:
        solver: result of CreateSolver.
        reader_params: DataReaderParams; in the form of 3.0 the optimizer, and Input has the reader.
        opt_params: result of CreateOptimizer.
        etc_params: result of CreateETC or CreateMOS, see `passes`.
        etc, mos, optimizer: names of the last two arguments in some versions.
    """

    def __init__(
        self,
        solver: Solver,
        reader_params: DataReaderParams | OptParams | None = None,
        opt_params: OptParams | None = None,
        etc_params: EtcParams | MosParams | None = None,
        *,
        etc: EtcParams | None = None,
        mos: MosParams | None = None,
        optimizer: OptParams | None = None,
    ) -> None:
        opt_params = optimizer if opt_params is None else opt_params
        etc_params = next((one for one in (etc_params, etc, mos) if one is not None), None)
        if isinstance(reader_params, OptParams):
            reader_params, opt_params = None, reader_params
        for name, value, kind in (
            ("solver", solver, Solver), ("reader_params", reader_params, DataReaderParams),
            ("opt_params", opt_params, OptParams), ("etc_params", etc_params, EtcParams | MosParams),
        ):  # fmt: skip
            if not isinstance(value, kind) and (value is not None or name == "solver"):
                allowed = _MADE_BY[name]
                raise ConfigError("an argument has the wrong type", where=f"Model, {name}", value=type(value).__name__,
                                  allowed=allowed, fix="hugectr.Model(solver, reader, optimizer)")  # fmt: skip
        for name, value in getattr(opt_params, "schedule", dict)().items():
            setattr(solver, name, value)
        self.solver, self._reader_params, self.opt_params = solver, reader_params, opt_params or OptParams()
        note_remote(solver.data_source_params, "CreateSolver")
        self.added: list[Any] = []
        self.lr = float(solver.lr)
        self._scheduler = solver.scheduler()
        self._loss: torch.Tensor | None = None
        self._model: VivianeModel | None = None
        self._settings = solver.to_viviane()
        self._sources: list[str] = []
        self._keysets: list[str] = []
        self._etc_params = etc_params
        self._gradients: Gradients | None = None
        self._cache: EmbeddingTrainingCache | None = None
        self._orders: dict[str, Keys] = {}
        self._last_eval: Batch | None = None
        self._early = {training: EarlyReader() for training in (True, False)}
        if reader_params is not None:
            self._take_reader(reader_params)

    def _take_reader(self, params: DataReaderParams) -> None:
        note_remote(params.data_source_params, "DataReaderParams")
        self._reader_params, self._sources, self._keysets = params, params.sources, params.keysets

    @property
    def reader_params(self) -> DataReaderParams:
        """The parameters of the reader.

        Raises:
            ConfigError: there are none.
        """
        if self._reader_params is None:
            raise ConfigError("the model has no data", fix="pass DataReaderParams to hugectr.Model")
        return self._reader_params

    @property
    def sources(self) -> list[str]:
        """The training sources: the reader's, or those of the last `set_source`."""
        return list(self._sources)

    # Building ---------------------------------------------------------------------------------------------

    @typed
    def add(self, layer: Any) -> None:
        """Append an Input, an embedding, a collection of them, or a layer.

        Raises:
            ConfigError: the object has another type, or the model is already compiled.
        """
        if self._model is not None:
            raise ConfigError("the model is already compiled, so nothing can be added")
        layer = layer.to_layer() if isinstance(layer, GroupDenseLayer) else layer
        if isinstance(layer, Input) and self._reader_params is None and (reader := layer.reader()) is not None:
            self._take_reader(reader)
        if not isinstance(layer, Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer):
            raise ConfigError(
                "this object cannot be added to a model",
                value=type(layer).__name__,
                allowed="Input, SparseEmbedding, EmbeddingCollectionConfig, DenseLayer, GroupDenseLayer",
            )
        self.added.append(layer)

    @typed
    def compile(self, loss_names: Sequence[str] | None = None, loss_weights: Sequence[float] | None = None) -> None:
        """Check the graph, create the weights, open the data.

        Args:
            loss_names: labels whose losses are weighted.
            loss_weights: one weight each; they also scale gradients, unlike in HugeCTR.
        """
        if self._model is not None:
            raise ConfigError("the model is already compiled")
        graph = Graph.of(self.added)
        if len(loss_names or ()) != len(loss_weights or ()):
            raise ConfigError("one weight per loss name is needed", where="Model.compile, loss_weights",
                              value=loss_weights, allowed=f"{len(loss_names or ())} numbers")  # fmt: skip
        weights = dict(zip(graph_names(loss_names or ()), loss_weights or (), strict=True))
        if not weights and graph.given.label_weights and graph.given.label_names:
            weights = dict(zip(graph.given.label_names, graph.given.label_weights, strict=True))
        if weights:
            say("Note: loss_weights scale the gradients as well as the reported loss")
        self._model, self.columns = build_model(
            graph, self.solver, self.reader_params, self.opt_params, weights or None, *self._of_passes(graph)
        )
        self._model.module.train()
        self._gradients = Gradients(self._model) if are_gradients_wanted() else None
        repeat, drop = self.solver.repeat_dataset, self.solver.drop_incomplete_batch
        reader = self.reader_params
        self._train = DataReader(reader, self.columns, self.solver.batchsize, repeat=repeat, training=True,
                                 drop_last=drop)  # fmt: skip
        self._eval = DataReader(reader, self.columns, self.solver.batchsize_eval, repeat=repeat, training=False,
                                drop_last=False)  # fmt: skip
        for early, made in ((self._early[True], self._train), (self._early[False], self._eval)):
            early.become(made)
        self._scores = Scores(list(self.solver.metrics_spec), _label_places(self.columns))
        if self._etc_params is not None:
            self._cache = EmbeddingTrainingCache(self._model, self.columns, self._etc_params)
            self.remember_orders(self._cache.orders)
        print_notes()

    def _of_passes(self, graph: Graph) -> tuple[Any, Any]:
        """Return the settings of Viviane's trainer, and what says the memory of tables that are trained in passes."""
        params = self._etc_params
        if params is None:
            return self._settings, None
        given = self._settings if not params.folder else self._settings.model_copy(
            update={"embedding_folder": params.folder}
        )  # fmt: skip
        num_gpus = sum(map(len, self.solver.vvgpu))
        return given, lambda columns: pass_memory(columns, graph.embeddings, self.opt_params, self._keysets, num_gpus)

    @property
    def viviane(self) -> VivianeModel:
        """The Viviane model of this model.

        Raises:
            ConfigError: the model is not compiled.
        """
        if self._model is None:
            raise ConfigError("the model is not compiled", fix="call model.compile() first")
        return self._model

    def summary(self) -> None:
        """Print layers, shapes and tables; before `compile`, those added so far."""
        if self._model is not None:
            self._model.summary()
            return
        graph = Graph.of(self.added)
        described = describe_graph(graph, self.solver, self.reader_params, self.opt_params, self._settings)
        described.describe().print()

    @typed
    def graph_to_json(self, graph_config_file: str) -> None:
        """Write the graph as HugeCTR's JSON."""
        json_graph.write_graph(graph_config_file, Graph.of(self.added), self.solver, self.reader_params)

    @typed
    def construct_from_json(self, graph_config_file: str, include_dense_network: bool = True) -> None:
        """Add the content of a JSON graph: its data and embeddings, and its dense layers if requested."""
        for layer in json_graph.read_graph(graph_config_file, include_dense_network):
            self.add(layer)

    # Training ---------------------------------------------------------------------------------------------

    @typed
    def fit(
        self,
        num_epochs: int | None = None,
        max_iter: int | None = None,
        display: int | None = None,
        eval_interval: int | None = None,
        snapshot: int | None = None,
        snapshot_prefix: str | None = None,
        data_source_params: Any = None,
    ) -> None:
        """Train, with HugeCTR's console output: by iterations, or by epochs if repeat_dataset is False.

        Defaults are those of HugeCTR: 0 epochs, 2000 iterations, 200, 1000, 10000, ""; in the form of 3.0 they come
            from
        the solver.
        """
        note_remote(data_source_params, "fit")
        self.viviane  # noqa: B018 - says that compile is missing
        asked = (num_epochs, max_iter, display, eval_interval, snapshot, snapshot_prefix)
        values: list[Any] = [
            getattr(self.solver, name, default) if value is None else value
            for (name, default), value in zip(FIT_DEFAULTS.items(), asked, strict=True)
        ]
        given = FitSettings(*values)
        if self.solver.repeat_dataset:
            fit_iterations(self, given)
        else:
            fit_epochs(self, given, self._sources, self._keysets)

    @typed
    def train(self, is_first_batch: bool = True) -> bool:
        """Train on one batch with the current learning rate; return False at the end of the data."""
        batch = self._train.next_batch()
        if batch is None:
            return False
        trainer = self.viviane.trainer
        with trainer.switches():
            self._loss = trainer.train_step(batch, self.lr)
        return True

    @typed
    def eval(self, eval_batch: int = -1) -> bool:
        """Evaluate one batch; return False at the end of the data."""
        batch = self._eval.next_batch()
        if batch is None:
            return False
        trainer = self.viviane.trainer
        there = self._last_eval = batch.to(trainer.device)
        with evaluating(trainer.module), (trainer.precision or Precision("fp32")).context(trainer.device):
            output = trainer.module(there)
        loss = trainer.objective.loss(output, there, training=False)
        predicted = trainer.objective.predictions(output, there.size)
        sums = rows_of_all(torch.tensor([[float(loss) * there.size, there.size]], device=loss.device)).sum(0)
        found, labels = (rows_of_all(part).double().cpu().numpy() for part in (predicted, there.labels))
        self._scores.add(found, labels, float(sums[0] / sums[1]))
        return True

    def get_current_loss(self) -> float:
        """Return the loss of the last training batch."""
        return 0.0 if self._loss is None else float(self._loss)

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the metrics over the batches since the last call."""
        return self._scores.take()

    def start_data_reading(self) -> None:
        """Start reading at the beginning of the data.

        Raises:
            ConfigError: sources are read once; use set_source.
        """
        if not self.solver.repeat_dataset:
            raise ConfigError("start_data_reading is for repeat_dataset=True", fix="call set_source on the readers")
        self.viviane  # noqa: B018
        self._train.set_source()
        self._eval.set_source()

    def set_source(self, *given: Any, **named: Any) -> None:
        """Set the sources of the next fit, if sources are read once: (source, eval_source), or with keysets in between.

        Raises:
            ConfigError: repeat_dataset is True, or there is no source.
        """
        if self.solver.repeat_dataset:
            raise ConfigError("set_source is for repeat_dataset=False", where="set_source",
                              fix="CreateSolver(repeat_dataset=False)")  # fmt: skip
        names = ("source", "keyset", "eval_source") if len(given) + len(named) > 2 else ("source", "eval_source")
        older = older_names("Model.set_source")
        values = dict(zip(names, given, strict=False)) | {older.get(name, name): one for name, one in named.items()}
        unknown = sorted({*values} - {"source", "keyset", "eval_source"})
        if "source" not in values or unknown:
            raise ConfigError("give source and eval_source, or source, keyset and eval_source", where="set_source",
                              value=unknown[0] if unknown else None)  # fmt: skip
        sources, keysets = (_listed(name, values.get(name, [])) for name in ("source", "keyset"))
        self.reader_params.eval_source = _text("eval_source", values.get("eval_source", self.reader_params.eval_source))
        self._sources, self._keysets = sources, keysets

    @typed
    def check_out_tensor(self, tensor_name: str, tensor_type: Tensor_t) -> NDArray[np.float32]:
        """Return a tensor of the last evaluation batch, or its gradient in the last training step.

        In evaluation the input of a loss is already a probability. Gradients are those of the mean loss, unscaled.

        Raises:
            ConfigError: nothing has been evaluated or trained, or gradients were not kept.
        """
        tensor_name = graph_name(tensor_name)
        if tensor_type is Tensor_t.Train:
            self.viviane  # noqa: B018 - says that compile is missing
            if self._gradients is None:
                raise ConfigError("gradients were not kept", where="check_out_tensor", value=tensor_name,
                                  fix="mention hugectr.Tensor_t.Train in the script that `viviane hugectr` runs: "
                                      "then gradients are kept")  # fmt: skip
            return self._gradients.of(tensor_name)
        if self._last_eval is None:
            raise ConfigError("nothing has been evaluated", where="check_out_tensor", fix="call model.eval() first")
        return tensor_of(self.viviane, tensor_name, self._last_eval)

    def get_data_reader_train(self) -> DataReader | EarlyReader:
        """Return the reader of training data; before `compile`, a placeholder."""
        return self._early[True] if self._model is None else self._train

    def get_data_reader_eval(self) -> DataReader | EarlyReader:
        """Return the reader of evaluation data; before `compile`, a placeholder."""
        return self._early[False] if self._model is None else self._eval

    def get_learning_rate_scheduler(self) -> LearningRateScheduler:
        """Return the schedule of the solver."""
        return self._scheduler

    @typed
    def reset_learning_rate_scheduler(self, base_lr: float, *args: Any, **given: Any) -> None:
        """Start another schedule."""
        self._scheduler = LearningRateScheduler(base_lr, *args, **given)

    @typed
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `train`."""
        self.lr = float(lr)

    # Weights ----------------------------------------------------------------------------------------------

    @typed
    def freeze_embedding(self, embedding_name: str | None = None) -> None:
        """Freeze one embedding, or all."""
        self.viviane.freeze_embedding(None if embedding_name is None else graph_name(embedding_name))

    @typed
    def unfreeze_embedding(self, embedding_name: str | None = None) -> None:
        """Unfreeze one embedding, or all."""
        self.viviane.unfreeze_embedding(None if embedding_name is None else graph_name(embedding_name))

    def freeze_dense(self) -> None:
        """Freeze all dense weights."""
        self.viviane.freeze_dense()

    def unfreeze_dense(self) -> None:
        """Unfreeze all dense weights."""
        self.viviane.unfreeze_dense()

    def __getattr__(self, name: str) -> Any:
        if name in ("_train", "_eval", "_scores"):
            raise ConfigError("the model is not compiled", fix="call model.compile() first")
        public = [one for one in dir(type(self)) if not one.startswith("_")]
        raise AttributeError(f"HugeCTR's Model has no {name!r}; {suggest(name, public)}")


class ModelPerfExt(Model):
    """HugeCTR 3.3's faster Model; here the same as Model."""


_MADE_BY: Final = {
    "solver": "what CreateSolver returns", "reader_params": "DataReaderParams",
    "opt_params": "what CreateOptimizer returns", "etc_params": "what CreateETC or CreateMOS returns",
}  # fmt: skip


def _listed(name: str, value: Any) -> list[str]:
    """Return one name or several as a list."""
    return [_text(name, one) for one in (value if isinstance(value, list | tuple) else [value])]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError("names of files are texts", where=f"set_source, {name}", value=repr(value)[:100])
    return value


def _label_places(columns: Columns) -> dict[str, range]:
    starts = accumulate((len(members) for members in columns.labels.values()), initial=0)
    return {name: range(a, b) for name, (a, b) in zip(columns.labels, pairwise(starts), strict=True)}
