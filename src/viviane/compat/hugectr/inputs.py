"""HugeCTR's Input, its sparse parameters, its reader and its embeddings, as arguments only."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from viviane.compat.hugectr.arguments import REQUIRED, Arguments, Signature
from viviane.compat.hugectr.enums import (
    Alignment_t,
    Check_t,
    CommunicationType,
    DataReaderSparse_t,
    Embedding_t,
    HybridEmbeddingType,
)
from viviane.compat.hugectr.names import graph_name, graph_names
from viviane.core.errors import ConfigError

_MOST_SLOTS: Final = 1 << 20
_MOST_VALUES: Final = 1 << 20
"""Of a label or the dense input in a row."""
_MOST_MB: Final = 1 << 23
"""Of a table: 8 TiB; the files of its optimizer state have its size, and file systems have limits near 16 TiB."""


class AsyncParam(Arguments):
    """Settings of the RawAsync reader; `is_dense_float` sets the type of dense values, the rest only affects speed.

    With `shuffle` HugeCTR reads batches in another order; here they keep the order of the file.
    """

    signature: ClassVar[Signature] = Signature(
        "AsyncParam",
        {
            "num_threads": 1, "num_batches_per_thread": 1, "max_num_requests_per_thread": 0,
            "io_depth": 0, "io_alignment": 0, "shuffle": False, "aligned_type": Alignment_t.Non,
            "multi_hot_reader": True, "is_dense_float": True,
        },
        speed=frozenset({"shuffle"}),
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._says_type = len(args) > 7 or "multi_hot_reader" in given or "is_dense_float" in given

    @property
    def has_float_dense(self) -> bool | None:
        """Whether dense values are float32; None before 4.3, where the file determines it.

        The reader of one-hot data, the only one before 4.3, supports only int32.
        """
        return bool(self.multi_hot_reader and self.is_dense_float) if self._says_type else None


class DataReaderParams(Arguments):
    """Paths and format of the data."""

    eval_source: str

    signature: ClassVar[Signature] = Signature(
        "DataReaderParams",
        {
            "data_reader_type": REQUIRED, "source": REQUIRED, "keyset": "", "eval_source": REQUIRED,
            "check_type": Check_t.Non, "cache_eval_data": 0, "num_samples": 0, "eval_num_samples": 0,
            "float_label_dense": False, "read_file_sequentially": False, "num_workers": 12, "slot_size_array": [],
            "data_source_params": None, "async_param": None,
        },
        speed=frozenset({"cache_eval_data", "read_file_sequentially", "num_workers"}),
    )  # fmt: skip

    @property
    def sources(self) -> list[str]:
        """The training sources, one or several.

        Raises:
            ConfigError: there is none.
        """
        found = [self.source] if isinstance(self.source, str) else list(self.source)
        if not found:
            raise ConfigError("there is no source of training rows", where="DataReaderParams, source", value=[],
                              allowed="a path, or a list of them")  # fmt: skip
        return found

    @property
    def keysets(self) -> list[str]:
        """The keyset of each training source, or an empty list."""
        return ([self.keyset] if self.keyset else []) if isinstance(self.keyset, str) else list(self.keyset)


class DataReaderSparseParam(Arguments):
    """A group of slots: name, keys per slot, and number of slots.

    Up to 3.0 the arguments were (DataReaderSparse_t, max_feature_num, max_nnz, slot_num), and Input had the names.
    """

    top_name: str
    signature: ClassVar[Signature] = Signature(
        "DataReaderSparseParam",
        {"top_name": REQUIRED, "nnz_per_slot": REQUIRED, "is_fixed_length": REQUIRED, "slot_num": REQUIRED},
    )
    _old: ClassVar[Signature] = Signature(
        "DataReaderSparseParam",
        {"type": REQUIRED, "max_feature_num": REQUIRED, "max_nnz": REQUIRED, "slot_num": REQUIRED},
    )

    def __init__(self, *args: Any, **given: Any) -> None:
        if not (args and isinstance(args[0], DataReaderSparse_t)) and "max_feature_num" not in given:
            super().__init__(*args, **given)
            self.top_name = graph_name(self.top_name)
            return
        if len(args) == 3 and "slot_num" not in given:  # max_nnz was optional
            args = (*args[:2], args[1], args[2])
        old = self._old.bind(args, given)
        nnz = old["max_nnz"] if old["max_nnz"] > 0 else old["max_feature_num"]
        super().__init__("", nnz, False, old["slot_num"])

    @property
    def nnz(self) -> list[int]:
        """Maximum keys of each slot.

        Raises:
            ConfigError: neither one number, nor one per slot.
        """
        given = self.nnz_per_slot
        if not 0 < self.slot_num <= _MOST_SLOTS:
            raise ConfigError("slot_num is out of range", where=f"sparse {self.top_name!r}",
                              value=str(self.slot_num)[:50], allowed=f"1 to {_MOST_SLOTS}")  # fmt: skip
        values = list(given) if isinstance(given, list | tuple) else [given] * self.slot_num
        if len(values) != self.slot_num or min(values, default=1) < 1:
            raise ConfigError("nnz_per_slot must be one number, or one per slot", where=f"sparse {self.top_name!r}",
                              value=given, allowed=f"{self.slot_num} numbers of at least 1")  # fmt: skip
        return values

    @property
    def most(self) -> int:
        """Keys that a slot may have if nnz_per_slot is one number, else 0: up to 3.9 it limited only a row's sum."""
        return 0 if isinstance(self.nnz_per_slot, list | tuple) else sum(self.nnz)


_READER_OF_3_0 = {
    name: default for name, default in DataReaderParams.signature.defaults.items() if default is not REQUIRED
} | {"data_reader_type": None, "source": None, "eval_source": ""}  # fmt: skip


class Input(Arguments):
    """The tensors of the data; `label_dim` with `label_name`, or several labels. In 3.0 also the reader."""

    signature: ClassVar[Signature] = Signature(
        "Input",
        {
            "label_dim": None, "label_name": None, "dense_dim": REQUIRED, "dense_name": REQUIRED,
            "data_reader_sparse_param_array": REQUIRED, "label_dims": None, "label_names": None,
            "label_weights": None, "sparse_names": [], **_READER_OF_3_0,
        },
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        if isinstance(vars(self)["label_dim"], list | tuple):  # several labels by position
            vars(self).update(label_dims=self.label_dim, label_names=self.label_name, label_dim=None, label_name=None)
        one = self.label_dim is not None and self.label_name is not None
        many = self.label_dims is not None and self.label_names is not None
        both = [vars(self)[name] for name in ("label_dims", "label_names")] if many else []
        pairs = all(isinstance(part, list | tuple) for part in both) and len({len(part) for part in both}) < 2
        if one == many or not pairs:
            raise ConfigError("set label_dim and label_name, or label_dims and label_names of equal length",
                              where="Input", value=self.label_name or self.label_names)  # fmt: skip
        for label in [self.label_name] if one else self.label_names:
            if not isinstance(label, str) or not label:
                raise ConfigError("the name of a label is a text", where="Input, label_name", value=repr(label)[:100])
        self._check_widths()
        for group, name in zip(self.sparse, self.sparse_names, strict=False):
            group.top_name = graph_name(name)
        for name in ("label_name", "label_names", "dense_name"):
            if vars(self)[name] is not None:
                vars(self)[name] = graph_names(vars(self)[name])

    def _check_widths(self) -> None:
        for name in ("label_dim", "label_dims", "dense_dim"):
            given = vars(self)[name]
            for width in given if isinstance(given, list) else [given or 0]:
                if not 0 <= width <= _MOST_VALUES:
                    raise ConfigError("the number of values in a row is out of range", where=f"Input, {name}",
                                      value=width, allowed=f"0 to {_MOST_VALUES:,}")  # fmt: skip

    def reader(self) -> DataReaderParams | None:
        """The reader described here in 3.0, or None."""
        if self.source is None:
            return None
        return DataReaderParams(**{name: getattr(self, name) for name in _READER_OF_3_0})

    @property
    def labels(self) -> dict[str, int]:
        """Width of each label, in the order of the data's columns, which HugeCTR sorts by name."""
        if self.label_names is None:
            return {self.label_name: self.label_dim}
        return dict(sorted(zip(self.label_names, self.label_dims, strict=True)))

    @property
    def sparse(self) -> list[DataReaderSparseParam]:
        """The groups of slots, in the order of the data's slots."""
        return list(self.data_reader_sparse_param_array)


class SparseEmbedding(Arguments):
    """One embedding table that all slots of a group share."""

    signature: ClassVar[Signature] = Signature(
        "SparseEmbedding",
        {
            "embedding_type": REQUIRED, "workspace_size_per_gpu_in_mb": 0, "embedding_vec_size": REQUIRED,
            "combiner": REQUIRED, "sparse_embedding_name": REQUIRED, "bottom_name": REQUIRED, "slot_size_array": [],
            "optimizer": None, "hybrid_embedding_param": None, "max_vocabulary_size_per_gpu": 0, "plan_file": "",
        },
        speed=frozenset({"hybrid_embedding_param", "plan_file"}),
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.sparse_embedding_name, self.bottom_name = graph_names(
            [vars(self)["sparse_embedding_name"], vars(self)["bottom_name"]]
        )
        if not 0 <= self.workspace_size_per_gpu_in_mb <= _MOST_MB:
            raise ConfigError("workspace_size_per_gpu_in_mb is out of range",
                              where=f"SparseEmbedding {self.sparse_embedding_name!r}",
                              value=self.workspace_size_per_gpu_in_mb, allowed=f"0 to {_MOST_MB}")  # fmt: skip
        combiner: Any = vars(self)["combiner"]
        self.combiner: Any = {0: "sum", 1: "mean"}.get(combiner) if isinstance(combiner, int) else combiner
        if self.combiner not in ("sum", "mean"):
            raise ConfigError("unknown combiner", where=f"SparseEmbedding {self.sparse_embedding_name!r}",
                              value=combiner, allowed="'sum', 'mean'")  # fmt: skip
        sized = (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, Embedding_t.HybridSparseEmbedding)
        if self.embedding_type in sized and not self.slot_size_array:
            raise ConfigError(f"{self.embedding_type.name} needs slot_size_array",
                              where=f"SparseEmbedding {self.sparse_embedding_name!r}")  # fmt: skip


class DenseLayerComputeConfig(Arguments):
    """Computation of weight gradients; affects only speed."""

    signature: ClassVar[Signature] = Signature("DenseLayerComputeConfig", {"async_wgrad": False, "fuse_wb": False})


class DenseLayerSwitchs(Arguments):
    """The older form of DenseLayerComputeConfig; affects only speed."""

    signature: ClassVar[Signature] = Signature("DenseLayerSwitchs", {"fuse_wb": False})


class HybridEmbeddingParam(Arguments):
    """Distribution of HybridSparseEmbedding's keys over GPUs; affects only speed."""

    signature: ClassVar[Signature] = Signature(
        "HybridEmbeddingParam",
        {
            "max_num_frequent_categories": 1, "max_num_infrequent_samples": -1, "p_dup_max": 0.01,
            "max_all_reduce_bandwidth": 1.3e11, "max_all_to_all_bandwidth": 1.9e11,
            "efficiency_bandwidth_ratio": 1.0, "communication_type": CommunicationType.NVLink_SingleNode,
            "hybrid_embedding_type": HybridEmbeddingType.Distributed, "use_train_precompute_indices": False,
            "use_eval_precompute_indices": False,
        },
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        if len(args) == 10:  # 3.3 and 3.4 had the two flags in the middle
            args = (*args[:6], *args[8:], *args[6:8])
        super().__init__(*args, **given)
