"""The model: graph, solver and optimizer in one object, with Keras's verbs."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import nn

from viviane.batch import Batch
from viviane.config import Adam, AnyOptimizer, Solver
from viviane.config.optimizers import optimizer_settings
from viviane.core.errors import ConfigError, expect, suggest
from viviane.core.files import write_bytes_atomic
from viviane.core.html import html_table
from viviane.core.locations import AnyPath
from viviane.core.logging import get_logger
from viviane.core.rows import refuse_shuffled
from viviane.data import DataPass, DataPasses, Dataset, KafkaStream
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.model.graph import GraphPlan, plan_graph, unused_message
from viviane.model.hub import model_card, pull, push
from viviane.model.losses import terms, weigh_losses
from viviane.model.module import GraphModule, build_module
from viviane.model.nodes import DenseLayer, Input, Node, Recipe, SparseEmbedding
from viviane.model.output_bias import base_rates, start_at_rates
from viviane.model.plot import graph_svg
from viviane.model.prediction import as_batches, as_dataset, opened, predict_rows, tensor_rows
from viviane.model.publication import Publication
from viviane.model.saving import (
    ETL_FILE,
    WEIGHTS,
    ModelFile,
    find_model,
    load_weights,
    read_model,
    read_model_file,
    write_model,
)
from viviane.model.summary import ModelSummary, summarize
from viviane.parallel import join_processes
from viviane.schema import Schema
from viviane.training import Callback, EvaluationLines, History, Trainer
from viviane.training.checkpoint.load import SavedSizes, saved_sizes
from viviane.training.evaluation import choose_metrics
from viviane.training.step.objective import LossTerm

_log = get_logger("model")


class Model:
    """A model that is described layer by layer, trained, saved, and used to predict.

    Args:
        solver: how to train.
        schema: the data's columns, or a data set that has them.
        name: shown in summaries and reports.
        module: a torch module that takes a Batch and returns logits (B,), (B, 1) or (B, L), instead of a graph.

    Example:
        >>> schema = Schema(labels=[{"name": "click"}], categorical=[{"name": "city", "num_ids": 9}])
        >>> model = Model(Solver(device="cpu"), schema)
        >>> model.add(Input(label="label", sparse="cats"))
        >>> model.add(SparseEmbedding("emb", bottom="cats", dim=4))
        >>> model.add(DenseLayer("flat", "Reshape", bottom="emb", leading_dim=4))
        >>> model.add(DenseLayer("logit", "MLP", bottom="flat", num_outputs=[1], act_type="none"))
        >>> model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
        >>> model.compile(optimizer=Adam(lr=1e-3), metrics=["auc"])
        >>> model.predict({"city": [3, 4]}).shape
        (2, 1)
    """

    def __init__(
        self, solver: Solver, schema: Schema | Dataset, *, name: str = "model", module: nn.Module | None = None
    ) -> None:
        expect("solver", solver, Solver)
        expect("schema", schema, Schema, Dataset)
        self.solver = solver
        self.schema = schema.schema if isinstance(schema, Dataset) else schema
        self.name = ModelFile(name=name).name
        self.nodes: list[Node] = []
        self.optimizer: AnyOptimizer | None = None
        self.embedding_optimizer: AnyOptimizer | None = None
        self.metrics: tuple[str, ...] | None = None
        self.etl: AnyPath | None = None
        """The fitted ETL of the data, where it is known: `save` takes it along, `predict(raw=True)` uses it."""
        self._own_module = module
        self._saved_sizes: SavedSizes | None = None
        self._module: nn.Module | None = None
        self._terms: list[LossTerm] | None = None
        self._publications: list[Publication] = []
        self._trainer: Trainer | None = None
        if isinstance(schema, Dataset):
            self._remember_etl(schema)

    # Building ---------------------------------------------------------------------------------------------

    def add(self, node: Node | Recipe) -> None:
        """Append a node, or all nodes of a recipe such as `viviane.zoo.DCNv2()`.

        Raises:
            ConfigError: the model is compiled already, or was made from a torch module.
        """
        if self._own_module is not None:
            raise ConfigError("this model was made from a torch module; nothing can be added to it")
        if self._module is not None:
            raise ConfigError("the model is compiled; nothing can be added any more", fix="build another Model")
        self._saved_sizes = None
        if isinstance(node, Input | SparseEmbedding | DenseLayer):
            self.nodes.append(node)
        elif hasattr(node, "nodes"):
            self.nodes.extend(node.nodes(self.schema))
        else:
            allowed = "Input, SparseEmbedding, DenseLayer, or a model of viviane.zoo"
            raise ConfigError("a model is made of nodes", value=type(node).__name__, allowed=allowed)

    def plan(self) -> GraphPlan:
        """Check the graph against the schema and infer all shapes, without making tables."""
        return plan_graph(self.nodes, self.schema, seed=self.solver.seed, saved=self._saved_sizes)

    def compile(
        self,
        optimizer: AnyOptimizer | str | None = None,
        embedding_optimizer: AnyOptimizer | str | None = None,
        metrics: Sequence[str] | str | None = None,
        loss_weights: Mapping[str, float] | None = None,
        statistics: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the graph, make its weights, and settle how they are trained.

        Args:
            optimizer: of the dense layers: settings, or a name such as "adam"; None takes Adam().
            embedding_optimizer: of tables without their own; None takes `optimizer`.
            metrics: a name such as "auc" or "gauc:user", or several; the first one leads. None takes "auc" and
                "log_loss".
            loss_weights: of several losses, by label tensor or loss node, as `loss_weight` there; they scale gradients.
            statistics: `info` of the training data, by which several processes share out tables.

        Raises:
            ConfigError, SchemaError: the graph is not right; the node, tensor or column is named.
        """
        if self._module is not None:
            raise ConfigError("the model is compiled already", fix="build another Model")
        group = join_processes(self.solver.device, self.solver.peer_timeout_s)
        chosen = Adam() if optimizer is None else optimizer_settings(optimizer)
        if embedding_optimizer is not None:
            embedding_optimizer = optimizer_settings(embedding_optimizer, "embedding_optimizer")
        metrics = None if metrics is None else choose_metrics(self.schema, metrics)
        if self._own_module is not None:
            if embedding_optimizer is not None:
                fix = "give it to the EmbeddingCollection inside the module"
                raise ConfigError("a torch module's tables have their own optimizer", fix=fix)
            if loss_weights is not None:
                raise ConfigError("loss_weights are for a graph's losses", fix="weigh them in a loss of your own")
            module: nn.Module = self._own_module
        else:
            self.nodes = weigh_losses(self.nodes, loss_weights or {})
            plan = self.plan()
            self._terms = terms(plan.losses, self.schema)
            if plan.unused and group.rank == 0:
                _log.warning("%s: %s", self.name, unused_message(plan.unused))
            module = build_module(plan, embedding_optimizer or chosen, self.solver, group, statistics or {})
        self.optimizer, self.embedding_optimizer = chosen, embedding_optimizer
        self.metrics = None if metrics is None else tuple(metrics)
        self._trainer = Trainer(module, self.schema, self.solver, chosen, metrics=self.metrics, terms=self._terms)
        self._module = module

    @property
    def module(self) -> nn.Module:
        """The torch module: a batch in, logits out.

        Raises:
            ConfigError: before `compile`.
        """
        self._need_compiled()
        assert self._module is not None
        return self._module

    @property
    def trainer(self) -> Trainer:
        """The trainer, which keeps optimizer state and step counts from one fit to the next."""
        self._need_compiled()
        assert self._trainer is not None
        return self._trainer

    def _need_compiled(self) -> None:
        if self._module is None:
            raise ConfigError("the model is not compiled", fix="call model.compile(optimizer=vv.Adam()) first")

    # Looking ----------------------------------------------------------------------------------------------

    def describe(self) -> ModelSummary:
        """Return layers, tables, shapes and sizes as data; before compile as with its default optimizer."""
        rule = self.embedding_optimizer or self.optimizer or Adam()
        if self._own_module is not None:
            return summarize(self.name, None, self._own_module, rule)
        return summarize(self.name, self.plan(), None, rule)

    def summary(self) -> None:
        """Print layers, shapes, parameters, tables and bytes.

        Raises:
            ConfigError: before `compile`.
        """
        self._need_compiled()
        self.describe().print()

    def plot(self, file: str | Path | None = None) -> str:
        """Return a drawing of the graph as SVG, and write it to a file if one is given."""
        drawing = graph_svg(self._content().model_dump(mode="json"), self.schema)
        if file is not None:
            write_bytes_atomic(Path(file), drawing.encode())
        return drawing

    # Training ---------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Any,
        validation: Any = None,
        *,
        epochs: int | None = None,
        run_folder: str | AnyPath | None = None,
        callbacks: Sequence[Callback] = (),
        resume: bool = False,
        files: Mapping[str, Any] | None = None,
        tracker: Any = None,
        verbose: int | None = None,
    ) -> History:
        """Train; a second call continues with the optimizer's state where the first one ended.

        Args:
            train: training rows: a data set or its folder, a stream for online training, or rows in memory as `predict`
                takes them, with labels. A list of data sets, their folders or `DataPass`es is trained on in passes, see
                `viviane.data.DataPasses`.
            validation: rows to evaluate on at the end of each epoch, or every `solver.eval_every` steps.
            epochs: instead of the solver's.
            run_folder: where metrics and checkpoints go, a folder or a URL.
            callbacks: hooks, see `viviane.training.Callback`.
            resume: continue from the newest checkpoint of the run folder.
            files: more JSON files of the run folder, by name.
            tracker: "mlflow", "wandb" or "tensorboard", a `viviane.training.Tracker`, or several of these.
            verbose: 0 shows nothing; 1 progress, in a file or a pipe as a line every ten seconds; 2 a line for each
                evaluation too. None shows progress at a terminal and in a notebook, and logs it elsewhere.
        """
        if verbose is not None and verbose not in (0, 1, 2):
            raise ConfigError("unknown verbose", value=verbose, allowed="0, 1, 2, None")
        more = (*callbacks, *([EvaluationLines()] if verbose == 2 else []))
        with ExitStack() as held:
            if isinstance(train, list | tuple):
                parts = [opened(one) for one in train]
                if parts and all(isinstance(one, Dataset | DataPass) for one in parts):
                    train = DataPasses(parts)
            if not isinstance(train, Dataset | DataPasses | KafkaStream):
                train = held.enter_context(as_dataset(train, self.schema, self.etl))
            if validation is not None:
                validation = held.enter_context(as_dataset(validation, self.schema, self.etl))
            return self._fit(
                train, validation, epochs=epochs, run_folder=run_folder, callbacks=more, resume=resume, files=files,
                tracker=tracker, progress=None if verbose is None else verbose > 0,
            )  # fmt: skip

    def _fit(
        self,
        train: Dataset | DataPasses | KafkaStream,
        validation: Dataset | None,
        *,
        epochs: int | None,
        run_folder: str | AnyPath | None,
        callbacks: Sequence[Callback],
        resume: bool,
        files: Mapping[str, Any] | None,
        tracker: Any,
        progress: bool | None,
    ) -> History:
        with self.trainer.lock:  # another thread would replace the trainer of one that trains
            before = self.trainer
            for data in (train, *(() if validation is None else (validation,))):
                before.check_schema(data)
            solver = self.solver if epochs is None else Solver(**{**self.solver.model_dump(), "epochs": epochs})
            graph = self._content().model_dump(mode="json", exclude_none=True, include={"nodes", "embedding_optimizer"})
            self._trainer = Trainer(
                self.module,
                self.schema,
                solver,
                before.optimizer,
                metrics=self.metrics,
                terms=self._terms,
                callbacks=[*callbacks, *self._publications],
                run_folder=run_folder,
                config={"name": self.name, **graph},
                files=files,
                tracker=tracker,
                progress=progress,
            )
            self._trainer.lock = before.lock
            if before.step:
                self._trainer.continue_from(before)
            elif solver.init_output_bias and not isinstance(train, KafkaStream) and self._own_module is None:
                self.init_output_bias(train.parts[0].data if isinstance(train, DataPasses) else train)
            self._remember_etl(train)
            return self._trainer.fit(train, validation, resume=resume)

    def publish(
        self,
        address: str,
        *,
        outbox: str | Path,
        every_s: float = 1.0,
        dense_every: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Send the rows that `fit` changes to servers, from now on; see `viviane.model.publication.Publication`.

        Args:
            address: kafka://host:port/topic.
            outbox: folder for what the broker has not confirmed; of this model alone.
            every_s: seconds between publications.
            dense_every: publications between two that hold the dense weights.
            settings: librdkafka's own; user and password come from the environment.

        Raises:
            RemoteError: no broker answers within 3 seconds, or there is no such topic.
            ConfigError: an optimizer moves rows that no batch touches.
        """
        self._publications.append(
            Publication(self, address, outbox=outbox, every_s=every_s, dense_every=dense_every, settings=settings)
        )
        return self._publications[-1]

    def end_publication(self, publication: Publication) -> None:
        """Let later calls of `fit` publish there no more; `Publication.close` calls it."""
        self._publications = [one for one in self._publications if one is not publication]

    def init_output_bias(self, train: Dataset) -> list[str]:
        """Let training begin at the base rate p of each binary label: the bias of its logit becomes ln(p / (1 - p)).

        The first `fit` does so (`Solver.init_output_bias`); a loop of your own calls it before its first step.

        Args:
            train: rows with labels, of which up to 65,536 are read.

        Returns:
            The labels it was done for: those whose logit comes from an `InnerProduct`, an `MLP` without a last
            activation, or an `Add` of such, with the default initial bias or zero.

        Raises:
            ConfigError: before `compile`, or for a torch module, which has no graph.
        """
        if self._own_module is not None:
            raise ConfigError("a torch module has no graph, so its output bias is unknown", fix="set it yourself")
        self.trainer.check_schema(train)
        return start_at_rates(self.nodes, self.schema, self.module, base_rates(train, self.solver))

    def evaluate(self, rows: Any, *, max_batches: int | None = None) -> dict[str, float]:
        """Return "loss" and the metrics over rows with labels, as `predict` takes them."""
        with as_dataset(rows, self.schema, self.etl) as data:
            return self.trainer.evaluate(data, max_batches=max_batches)

    def predict(self, rows: Any, *, raw: bool | None = None) -> NDArray[np.float32]:
        """Return a probability for each row and label, (rows, L), in the order of the rows.

        Args:
            rows: a Dataset or its folder, a Batch, or rows in memory: a pandas, Polars, Arrow or Hugging Face table,
                columns by name, a list of dicts, a torch Dataset or DataLoader of dicts. Labels may be left out.
            raw: whether rows are as they came, before the ETL; the model's own ETL then turns them into ids first, and
                values that it never saw count as unknown. None finds out by columns and values.

        Raises:
            ConfigError: raw rows without an ETL, an unknown kind of rows, or rows that may be raw or encoded.
        """
        refuse_shuffled(rows)
        rows = rows if raw else opened(rows)
        if isinstance(rows, Dataset) and not raw:
            return self.trainer.predict(rows)
        parts = list(self.predict_batches(as_batches(rows, self.schema, self.etl, raw=raw)))
        return np.concatenate(parts) if parts else np.empty((0, len(self.schema.labels)), dtype=np.float32)

    def tensor(self, name: str, rows: Any) -> NDArray[np.float32]:
        """Return a tensor of the graph for each row, such as the "user_vector" of a two-tower model.

        Args:
            name: a tensor that a loss depends on.
            rows: as `predict` takes them; columns by name or a table need only the columns that it depends on.
        """
        if not isinstance(self.module, GraphModule):
            raise ConfigError("only a graph has tensors by name", value=type(self.module).__name__)
        return tensor_rows(self.trainer, self.module, name, rows, self.schema)

    def predict_batches(self, rows: Dataset | str | AnyPath | Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
        """Yield predictions (B, L) batch by batch, for input that does not fit into memory."""
        data = opened(rows)
        if not isinstance(data, Dataset):
            yield from predict_rows(self.trainer, data)
            return
        self.trainer.check_schema(data, with_labels=False)
        with data.reader(self.trainer.eval_batch_size()) as reader:
            yield from predict_rows(self.trainer, reader)

    # Freezing ---------------------------------------------------------------------------------------------

    def freeze_embedding(self, name: str | None = None) -> None:
        """Keep the tables of one embedding node, or of all, as they are."""
        for collection, table in self._tables(name):
            collection.freeze(table)

    def unfreeze_embedding(self, name: str | None = None) -> None:
        """Let frozen tables move again; those made with trainable=False stay."""
        for collection, table in self._tables(name):
            if collection.tables[table].trainable:
                collection.unfreeze(table)

    def freeze_dense(self) -> None:
        """Keep all dense weights as they are; running statistics of batch normalisation still follow the data."""
        for parameter in dense_parameters(self.module).values():
            parameter.requires_grad_(False)

    def unfreeze_dense(self) -> None:
        """Let dense weights move again."""
        for parameter in dense_parameters(self.module).values():
            parameter.requires_grad_(True)

    def _tables(self, name: str | None) -> list[tuple[Any, str]]:
        collections = collections_of(self.module)
        if name is not None and name not in collections:
            raise ConfigError("no such embedding in the model", value=name, fix=suggest(name, collections))
        chosen = collections.values() if name is None else [collections[name]]
        return [(collection, table) for collection in chosen for table in collection.tables]

    # Saving -----------------------------------------------------------------------------------------------

    def to_json(self, file: str | Path | None = None) -> str:
        """Return the graph as JSON, and write it to a file if one is given."""
        if self._own_module is not None:
            raise ConfigError("a torch module has no graph to write", fix="save its weights with model.save(folder)")
        text = ModelFile(name=self.name, nodes=tuple(self.nodes)).text()
        if file is not None:
            write_bytes_atomic(Path(file), text.encode())
        return text

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any], solver: Solver, schema: Schema | Dataset) -> Self:
        """Build a model, not yet compiled, from a graph that `to_json` or `save` wrote."""
        content = read_model_file(source)
        model = cls(solver, schema, name=content.name)
        model.nodes.extend(content.nodes)
        return model

    def save(self, folder: str | AnyPath, *, published: Mapping[str, Any] | None = None) -> AnyPath:
        """Write graph, schema, weights and the data's ETL into a folder, whole or not at all; the folder may be a URL.

        Several processes call it together; rank 0 writes. Where it is refused or fails, all of them raise the error.

        Args:
            folder: where to; an older model there is replaced.
            published: which published changes the weights contain; None: of a model that publishes to one topic, all
                so far, so that servers may begin with the saved model.
        """
        if published is None and len(self._publications) == 1:
            published = self._publications[0].position().to_json()
        with self.trainer.averaged():
            return write_model(
                folder, self._content(), self.schema, self.module, self.etl, self.trainer.group, published=published
            )

    @classmethod
    def load(cls, folder: str | AnyPath, *, device: str = "auto", module: nn.Module | None = None) -> Self:
        """Read a saved model, verified; it predicts the same bits on the same device and can be trained further.

        Args:
            folder: what `save` wrote, or a run folder with `model` in it.
            device: where to put it, whatever it was trained on.
            module: for a model made from a torch module, a module of the same shapes.

        Raises:
            CheckpointError: a file is missing, truncated or altered.
        """
        model = cls.blueprint(folder, device=device, module=module)
        model.compile(model.optimizer, model.embedding_optimizer, model.metrics)
        load_weights(find_model(folder), model.module)
        return model

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        endpoint: str | None = None,
        message: str = "Add a model",
    ) -> str:
        """Write the model to a repository of the Hugging Face Hub, with a model card; returns its address.

        Args:
            repo_id: "owner/name"; it is made if it does not exist.
            card: README.md of the repository; None takes `viviane.model.hub.model_card(model)`.
            private: whether a new repository is private; None takes the owner's default.
            token: None takes the one of `hf auth login`.
            endpoint: of another Hub.
            message: of the commit.

        Raises:
            RemoteError: the Hub does not answer or refuses.
        """
        text = model_card(self) if card is None else card
        return push(self, repo_id, private=private, token=token, endpoint=endpoint, card=text, message=message)

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        device: str = "auto",
        token: str | None = None,
        endpoint: str | None = None,
    ) -> Self:
        """Load a model from a repository of the Hugging Face Hub; every file is verified as by `load`.

        Args:
            repo_id: "owner/name".
            revision: a branch, tag or commit; None takes the main branch.
            device: where to put it.
            token: None takes the one of `hf auth login`.
            endpoint: of another Hub.

        Raises:
            RemoteError: no such repository, or the Hub does not answer. ConfigError: it holds no model of Viviane.
        """
        folder = pull(repo_id, revision=revision, token=token, endpoint=endpoint)
        try:
            model = cls.load(folder, device=device)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)  # it holds the model's ETL
        return model

    @classmethod
    def blueprint(cls, folder: str | AnyPath, *, device: str = "auto", module: nn.Module | None = None) -> Self:
        """Read a saved model without its weights: everything verified, nothing compiled; arguments as for `load`."""
        path = find_model(folder)
        content, schema = read_model(path)
        if (content.module is None) != (module is None):
            what = "the model is a graph" if content.module is None else "the model was made from a torch module"
            fix = (
                "load it without module="
                if content.module is None
                else f"Model.load(path, module={content.module}(...))"
            )
            raise ConfigError(what, where=str(path), fix=fix)
        solver = Solver(**{**(content.solver or Solver()).model_dump(), "device": device})
        model = cls(solver, schema, name=content.name, module=module)
        model.nodes.extend(content.nodes)
        model.optimizer, model.embedding_optimizer = content.optimizer, content.embedding_optimizer
        model.metrics = content.metrics
        model._saved_sizes = saved_sizes(path / WEIGHTS) if module is None else None
        model.etl = path / ETL_FILE if (path / ETL_FILE).exists() else None
        return model

    def _content(self) -> ModelFile:
        return ModelFile(
            name=self.name,
            nodes=tuple(self.nodes),
            module=None if self._own_module is None else type(self._own_module).__name__,
            solver=self.solver,
            optimizer=self.optimizer,
            embedding_optimizer=self.embedding_optimizer,
            metrics=self.metrics,
        )

    def _remember_etl(self, data: Dataset | DataPasses | KafkaStream) -> None:
        if isinstance(data, Dataset | DataPasses) and (data.path / ETL_FILE).exists():
            self.etl = data.path / ETL_FILE

    def _repr_html_(self) -> str:
        """Return layers and tables, for notebooks."""
        return (
            self.describe().html()
            if self.nodes or self._own_module is not None
            else html_table(repr(self), ["node"], [])
        )

    def __repr__(self) -> str:
        state = "compiled" if self._module is not None else "not compiled"
        kind = type(self._own_module).__name__ if self._own_module is not None else f"{len(self.nodes)} nodes"
        return f"Model({self.name!r}, {kind}, {state})"
