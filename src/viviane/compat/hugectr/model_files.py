"""Methods of HugeCTR's Model for files and for its embedding training cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from viviane.compat.hugectr import collection_files, files, states
from viviane.compat.hugectr.argument_types import typed
from viviane.compat.hugectr.arguments import note
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.inputs import SparseEmbedding
from viviane.compat.hugectr.messages import MessageSink, topic_of
from viviane.compat.hugectr.passes import EmbeddingTrainingCache, Updates
from viviane.compat.hugectr.processes import is_first, wait_for_all
from viviane.compat.hugectr.slot_ids import records_slots, slots_of_keys
from viviane.compat.hugectr.sources import check_writable, note_remote
from viviane.core.errors import ConfigError
from viviane.model import Model as VivianeModel

if TYPE_CHECKING:
    from viviane.compat.hugectr.reading import DataReader
    from viviane.compat.hugectr.scores import Scores
    from viviane.compat.hugectr.tables import Keys


class ModelFiles:
    """File methods of a compiled model."""

    added: list[Any]
    solver: Any
    columns: Columns
    _scores: Scores
    _orders: dict[str, Keys]
    _cache: EmbeddingTrainingCache | None
    _train: DataReader
    _sources: Sequence[str]

    @property
    def viviane(self) -> VivianeModel:
        """The Viviane model of this model."""
        raise NotImplementedError

    @property
    def _collections(self) -> list[EmbeddingCollectionConfig]:
        return [one for one in self.added if isinstance(one, EmbeddingCollectionConfig)]

    @typed
    def save_params_to_files(  # iter and data_source_params are HugeCTR's names
        self,
        prefix: str,
        iter: int = 0,  # noqa: A002
        *more: Any,
        data_source_params: Any = None,
    ) -> None:
        """Write dense weights, tables and optimizer state in HugeCTR's layout.

        With an embedding training cache the tables are written to its folders instead, without optimizer state.
        """
        _check((*more, data_source_params), "save_params_to_files")
        check_writable(prefix, "save_params_to_files")
        embeddings = [one for one in self.added if isinstance(one, SparseEmbedding)]
        cached = self._cache is not None and bool(self._cache.folders)
        files.save(self.viviane, self.columns, prefix, iter, with_tables=not cached, find_slots=self._find_slots)
        states.save_states(self.viviane, self.columns, prefix, iter, [] if cached else embeddings)
        if self._cache is not None and cached:
            self._cache.write()
        wait_for_all()

    def _find_slots(self, node: Any, slots: Sequence[Slot], keys: Keys) -> NDArray[np.int64] | None:
        """Return the slots of the keys of a localized embedding without sizes; None for other embeddings."""
        embeddings = [one for one in self.added if isinstance(one, SparseEmbedding)]
        given = next((one for one in embeddings if one.sparse_embedding_name == node.name), None)
        if given is None or not records_slots(given):
            return None
        sources = dict.fromkeys([*([self._train.source] if self._train.source else []), *self._sources])
        found = slots_of_keys(keys, slots, self._train.every_batch(sources))
        if found is None:
            note("save_params_to_files", f"slot_id of {node.name}: the training data lack a key of the table")
        return found

    @typed
    def load_dense_weights(self, dense_model_file: str, *more: Any, data_source_params: Any = None) -> None:
        """Load dense weights that save_params_to_files or HugeCTR wrote."""
        _check((*more, data_source_params), "load_dense_weights")
        files.load_dense(self.viviane, dense_model_file)

    @typed
    def load_sparse_weights(
        self,
        sparse_embedding_files: Sequence[str] | Mapping[str, str] = (),
        *more: Any,
        sparse_embedding_files_map: Mapping[str, str] | None = None,
        data_source_params: Any = None,
    ) -> None:
        """Load tables: one folder per embedding, in order or by name."""
        _check((*more, data_source_params), "load_sparse_weights")
        given = sparse_embedding_files_map or sparse_embedding_files
        self.remember_orders(files.load_sparse(self.viviane, self.columns, given))

    @typed
    def load_dense_optimizer_states(
        self, dense_opt_states_file: str, *more: Any, data_source_params: Any = None
    ) -> None:
        """Load the optimizer state of dense weights."""
        _check((*more, data_source_params), "load_dense_optimizer_states")
        states.load_dense_states(self.viviane, dense_opt_states_file)

    @typed
    def load_sparse_optimizer_states(
        self,
        sparse_opt_states_files: Sequence[str] | Mapping[str, str] = (),
        *more: Any,
        sparse_opt_states_files_map: Mapping[str, str] | None = None,
        data_source_params: Any = None,
    ) -> None:
        """Load the optimizer state of tables, in the key order of load_sparse_weights."""
        _check((*more, data_source_params), "load_sparse_optimizer_states")
        given = sparse_opt_states_files_map or sparse_opt_states_files
        embeddings = [one for one in self.added if isinstance(one, SparseEmbedding)]
        states.load_sparse_states(self.viviane, self.columns, given, self._orders, embeddings)

    def remember_orders(self, orders: Mapping[str, Keys]) -> None:
        """Store the order of keys in files: files of optimizer state use the same order."""
        self._orders.update(orders)

    @typed
    def embedding_dump(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Write the tables of embedding collections, or the named ones, in HugeCTR's layout."""
        collection_files.dump(self.viviane, self.columns, self._collections, path, table_names)

    @typed
    def embedding_load(self, path: str, table_names: Sequence[str] = ()) -> None:
        """Load the tables of embedding collections, or the named ones."""
        collection_files.load(self.viviane, self.columns, self._collections, path, table_names)

    @typed
    def export_predictions(self, output_prediction_file_name: str, output_label_file_name: str) -> None:
        """Append predictions and labels of the last evaluation batch to text files, one value per line.

        Raises:
            ConfigError: nothing has been evaluated.
        """
        if self._scores.last is None:
            raise ConfigError("nothing has been evaluated", where="export_predictions", fix="call model.eval() first")
        names = (output_prediction_file_name, output_label_file_name)
        for file, values in zip(names, self._scores.last if is_first() else (), strict=False):
            with Path(file).open("a", encoding="utf-8") as out:
                np.savetxt(out, values.reshape(-1), fmt="%g")

    @property
    def has_passes(self) -> bool:
        """Whether the model has an embedding training cache."""
        return self._cache is not None

    # Passes -----------------------------------------------------------------------------------------------

    def get_embedding_training_cache(self) -> EmbeddingTrainingCache:
        """Return the embedding training cache.

        Raises:
            ConfigError: the model has none.
        """
        self.viviane  # noqa: B018 - says that compile is missing
        if self._cache is None:
            raise ConfigError("the model has no embedding training cache",
                              fix="hugectr.Model(solver, reader, optimizer, hugectr.CreateETC(...))")  # fmt: skip
        return self._cache

    get_model_oversubscriber = get_embedding_training_cache

    def get_incremental_model(self) -> Updates:
        """Return, for each embedding, the keys of all keysets since the last call, and their vectors."""
        return self.get_embedding_training_cache().incremental()

    def dump_incremental_model_2kafka(self) -> None:
        """Send the rows of `get_incremental_model` to the solver's brokers, topic "hps_et.<model>.<table>".

        Raises:
            ConfigError: the solver has no brokers. RemoteError: no broker responds, a topic is missing, or a row is not
                acknowledged; later calls do not send the rows again, but `save_params_to_files` writes them.
        """
        brokers = str(self.solver.kafka_brockers).replace(";", ",")
        if not brokers:
            raise ConfigError("the solver has no Kafka brokers", where="dump_incremental_model_2kafka",
                              fix='hugectr.CreateSolver(..., model_name="m", kafka_brockers="host:9092")')  # fmt: skip
        names = [one.sparse_embedding_name for one in self.added if isinstance(one, SparseEmbedding)]
        topics = {name: topic_of(str(self.solver.model_name), name) for name in names}
        sink = MessageSink(brokers, list(topics.values()))
        for name, (keys, vectors) in zip(names, self.get_incremental_model(), strict=True):
            sink.send(topics[name], np.asarray(keys, np.int64), np.asarray(vectors, np.float32))


def _check(more: Sequence[Any], where: str) -> None:
    for one in more:
        note_remote(one, where)
