"""Types of HugeCTR's arguments: each argument has the type of its default, or the one listed here for its name."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, TypeVar, cast

from viviane.compat.hugectr.enums import (
    Activation_t,
    Check_t,
    DataReaderSparse_t,
    DataReaderType_t,
    Embedding_t,
    GroupLayer_t,
    Tensor_t,
)
from viviane.core.errors import ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
Check = Callable[[Any], Any]
"""Returns the value in its type; raises TypeError for another."""


def _whole(value: Any) -> int:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and float(value).is_integer():
        return int(float(value))
    raise TypeError


def _number(value: Any) -> Any:
    if isinstance(value, Real) and math.isfinite(value):
        return value
    raise TypeError


def _flag(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    raise TypeError


def _text(value: Any) -> str:
    if isinstance(value, str | os.PathLike) and "\0" not in str(value):
        return str(value)
    raise TypeError


def _name_or_member(value: Any) -> Any:
    if isinstance(value, str | Enum):
        return value
    raise TypeError


def _text_or_whole(value: Any) -> Any:
    if isinstance(value, str | int):
        return value
    raise TypeError


def _list(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value
    raise TypeError


def _dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    raise TypeError


def _texts(value: Any) -> Any:
    return _text(value) if isinstance(value, str | os.PathLike) else [_text(one) for one in _list(value)]


def _list_of(check: Check) -> Check:
    return lambda value: [check(one) for one in _list(value)]


def _member_of(kind: type[Enum]) -> Check:
    def check(value: Any) -> Any:
        value = "Non" if value == "None" else value  # HugeCTR's JSON has the word that Python reserves
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
        if isinstance(value, kind):
            return value
        raise TypeError

    return check


def _made_by(*calls: str) -> tuple[Check, str]:
    """Check an object that calls of HugeCTR's return."""

    def check(value: Any) -> Any:
        for kind in type(value).__mro__:
            if getattr(vars(kind).get("signature"), "name", None) in calls:
                return value
        raise TypeError

    return check, f"what {' or '.join(calls)} returns"


def _list_made_by(call: str) -> tuple[Check, str]:
    check, allowed = _made_by(call)
    return _list_of(check), f"a list of {allowed}"


def _enumerated(kind: type[Enum]) -> tuple[Check, str]:
    return _member_of(kind), ", ".join(f"{kind.__name__}.{one}" for one in kind.__members__)


_WHOLE: Final = (_whole, "a whole number")
_NUMBER: Final = (_number, "a finite number")
_TEXT: Final = (_text, "a text")
_TEXTS: Final = (_texts, "a text, or a list of texts")
_WHOLES: Final = (_list_of(_whole), "a list of whole numbers")
_NUMBERS: Final = (_list_of(_number), "a list of numbers")


def _one_or_more(value: Any) -> Any:
    return _whole(value) if isinstance(value, Real) else [_whole(one) for one in _list(value)]


_ONE_OR_MORE: Final = (_one_or_more, "a whole number, or a list of them")
_BY_NAME: Final[Mapping[str, tuple[Check, str]]] = {
    **dict.fromkeys(("bottom_names", "top_names", "bottom_name_list", "top_name_list", "keyset", "label_names",
                     "sparse_models", "trained_sparse_models", "dest_sparse_models", "local_paths",
                     "sparse_model_files", "sparse_names"), _TEXTS),
    **dict.fromkeys(("slot_size_array", "nnz_array", "selected_slots", "indices", "index", "weight_dims", "shape",
                     "num_outputs", "embedding_vecsize_per_table"), _WHOLES),
    **dict.fromkeys(("vvgpu", "ranges"), (_list_of(_list_of(_whole)), "a list of lists of whole numbers")),
    **dict.fromkeys(("target_weight_vec", "default_value_for_each_table"), _NUMBERS),
    **dict.fromkeys(("num_slot", "embedding_vec_size", "slot_num", "max_batchsize", "ev_size", "dense_dim",
                     "max_vocabulary_size", "max_feature_num", "max_nnz"), _WHOLE),
    **dict.fromkeys(("label_dim", "nnz_per_slot", "label_dims"), _ONE_OR_MORE),
    **dict.fromkeys(("top_name", "dense_name", "sparse_embedding_name", "bottom_name", "model_name", "eval_source"),
                    _TEXT),
    **dict.fromkeys(("lambda", "lr"), _NUMBER),
    **dict.fromkeys(("compute_config", "dense_layer_switches"),
                    _made_by("DenseLayerComputeConfig", "DenseLayerSwitchs")),
    **dict.fromkeys(("optimizer", "opt_params", "opt_params_or_empty"),
                    _made_by("CreateOptimizer", "optimizer.CreateOptimizer")),
    **{name: _made_by(call) for name, call in {
        "data_source_params": "DataSourceParams", "async_param": "AsyncParam",
        "hybrid_embedding_param": "HybridEmbeddingParam", "volatile_db": "VolatileDatabaseParams",
        "persistent_db": "PersistentDatabaseParams", "update_source": "UpdateSourceParams",
    }.items()},
    **{name: _enumerated(kind) for name, kind in {
        "data_reader_type": DataReaderType_t, "embedding_type": Embedding_t, "group_layer_type": GroupLayer_t,
    }.items()},
    **dict.fromkeys(("hdfs_sparse_model", "hdfs_sparse_opt_states", "local_sparse_model", "local_sparse_opt_states",
                     "embedding_table_names", "embedding_files", "update_filters"),
                    (_list_of(_text), "a list of texts")),
    **dict.fromkeys(("deployed_devices", "maxnum_catfeature_query_per_table_per_sample"), _WHOLES),
    "activations": (_list_of(_member_of(Activation_t)), "a list of Activation_t.Relu, Activation_t.Non"),
    "biases": (_list_of(_flag), "a list of True, False"),
    "data_reader_sparse_param_array": _list_made_by("DataReaderSparseParam"),
    "inference_params_array": _list_made_by("InferenceParams"),
    "label_name": _TEXTS, "label_weights": _NUMBERS, "i64_input_key": (_flag, "True, False"),
    "combiner": (_text_or_whole, "'sum', 'mean'"), "table_id": _WHOLE, "eval_batches": _WHOLE,
    "is_fixed_length": (_flag, "True, False"),
    "layer_type": (_name_or_member, "a member of Layer_t"),
    "source": (lambda value: value if isinstance(value, Enum) else _texts(value), "a text, or a list of texts"),
}  # fmt: skip
"""Types of arguments that have no default, or whose default does not show it."""
_OF_CALLS: Final[Mapping[tuple[str, str], tuple[Check, str]]] = {
    ("DataGeneratorParams", "format"): _enumerated(DataReaderType_t),
    ("DataReaderSparseParam", "type"): _enumerated(DataReaderSparse_t),
    ("EmbeddingTableConfig", "name"): _TEXT,
}  # fmt: skip
"""Types of arguments whose name has another type in other calls."""
_ANY: Final = frozenset({"selected", "lr_policy"})
"""Arguments with several forms, checked where they are used."""


def checked_type(call: str, name: str, value: Any, default: Any, required: object) -> Any:
    """Return an argument's value in its type: a member for its name, a whole number for 2.0, a text for a path.

    Raises:
        ConfigError: the value has another type.

    Example:
        >>> checked_type("CreateSolver", "batchsize", 64.0, 2048, None), checked_type("F", "keyset", ["a"], "", None)
        (64, ['a'])
    """
    if name in _ANY or (value is None and default is None):
        return value
    check, allowed = _of_name(call, name) or _of_default(default, required)
    try:
        return check(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            "an argument has the wrong type", where=f"{call}, {name}", value=value, allowed=allowed
        ) from None


def _of_name(call: str, name: str) -> tuple[Check, str] | None:
    if name == "embedding_vec_size" and call == "ParameterServerConfig":
        return None
    return _OF_CALLS.get((call, name)) or _BY_NAME.get(name)


def _of_default(default: Any, required: object) -> tuple[Check, str]:
    if default is None or default is required:
        return (lambda value: value), "any"
    if isinstance(default, Enum):
        return _enumerated(type(default))
    return _OF_DEFAULTS[type(default)]


_FLAG: Final = (_flag, "True, False")
_OF_DEFAULTS: Final[Mapping[type, tuple[Check, str]]] = {
    bool: _FLAG, int: _WHOLE, float: _NUMBER, str: _TEXT, dict: (_dict, "a dict"), list: (_list, "a list"),
}  # fmt: skip


def _files(value: Any) -> Any:
    return {_text(key): _text(one) for key, one in value.items()} if isinstance(value, Mapping) else _texts(value)


_OF_ANNOTATIONS: Final[Mapping[str, tuple[Check, str]]] = {
    "bool": _FLAG, "int": _WHOLE, "float": _NUMBER, "str": _TEXT, "str | Path": _TEXT, "Sequence[str]": _TEXTS,
    "str | list[str]": _TEXTS, "Sequence[float]": _NUMBERS, "Sequence[int]": _WHOLES,
    "Tensor_t": _enumerated(Tensor_t), "DataReaderType_t": _enumerated(DataReaderType_t),
    "Check_t": _enumerated(Check_t), "InferenceParams": _made_by("InferenceParams"),
    "DataSourceParams": _made_by("DataSourceParams"), "Solver": _made_by("CreateSolver", "solver_parser_helper"),
    "Sequence[str] | Mapping[str, str]": (_files, "a text, a list of texts, or a dict of texts by name"),
    "Mapping[str, str]": (_files, "a dict of texts by name"),
}  # fmt: skip


def typed(method: Method) -> Method:
    """Check the arguments of a method of HugeCTR's by their annotations; other annotations are not checked.

    Raises:
        ConfigError: an argument is unknown, missing, one too many, or of another type.
    """
    signature = inspect.signature(method)
    owner = method.__qualname__.replace(".__init__", "")
    checks: dict[str, tuple[Check, str, bool]] = {}
    for name, one in signature.parameters.items():
        annotation = str(one.annotation).removesuffix(" | None")
        if annotation in _OF_ANNOTATIONS:
            checks[name] = (*_OF_ANNOTATIONS[annotation], annotation != str(one.annotation))

    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            names = [name for name in signature.parameters if name not in ("self", "more")]
            raise ConfigError("the arguments do not fit the call", where=owner, value=str(error),
                              allowed=", ".join(names) or "none") from None  # fmt: skip
        for name in bound.arguments.keys() & checks.keys():
            check, allowed, is_optional = checks[name]
            value = bound.arguments[name]
            if value is None and is_optional:
                continue
            try:
                bound.arguments[name] = check(value)
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(
                    "an argument has the wrong type", where=f"{owner}, {name}", value=value, allowed=allowed
                ) from None
        return method(*bound.args, **bound.kwargs)

    return cast(Method, call)


def typed_methods(kind: Kind) -> Kind:
    """Check the arguments of all public methods of a class, and of its constructor, as `typed` does."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, method if hasattr(method, "__wrapped__") else typed(method))
    return kind
