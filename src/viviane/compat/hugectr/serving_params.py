"""HugeCTR's arguments of inference: the files of a model, and its parameter server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

from viviane.compat.hugectr.arguments import REQUIRED, Arguments, Signature, note
from viviane.compat.hugectr.enums import (
    Database_t,
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    UpdateSourceType_t,
)
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.serving_databases import refuse_credentials
from viviane.core.errors import ConfigError, suggest
from viviane.core.json_files import expected_form, json_object

_LARGEST: Final = 2**64 - 1


class VolatileDatabaseParams(Arguments):
    """Copies of rows in memory, or in Redis."""

    signature: ClassVar[Signature] = Signature(
        "VolatileDatabaseParams",
        {
            "type": DatabaseType_t.parallel_hash_map, "address": "127.0.0.1:7000", "user_name": "default",
            "password": "", "num_partitions": 16, "algorithm": None, "allocation_rate": 268435456,
            "shared_memory_size": 16 * 2**30, "shared_memory_name": "hctr_mp_hash_map_database",
            "shared_memory_auto_remove": True, "max_get_batch_size": 10000, "max_set_batch_size": 10000,
            "max_batch_size": 65536, "num_node_connections": 5, "enable_tls": False,
            "tls_ca_certificate": "cacertbundle.crt", "tls_client_certificate": "client_cert.pem",
            "tls_client_key": "client_key.pem", "tls_server_name_identification": "redis.localhost",
            "refresh_time_after_fetch": False, "overflow_margin": _LARGEST,
            "overflow_policy": DatabaseOverflowPolicy_t.evict_random, "overflow_resolution_target": 0.8,
            "initialize_after_startup": True, "initial_cache_rate": 1.0, "cache_missed_embeddings": False,
            "update_filters": ["^hps_.+$"],
        },
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        refuse_credentials("VolatileDatabaseParams", vars(self))


class PersistentDatabaseParams(Arguments):
    """A database on disk, below the copies and above the files of the model."""

    signature: ClassVar[Signature] = Signature(
        "PersistentDatabaseParams",
        {
            "type": DatabaseType_t.disabled, "path": "/tmp/rocksdb", "num_threads": 16, "read_only": False,
            "initialize_after_startup": True, "max_batch_size": 65536, "max_get_batch_size": 10000,
            "max_set_batch_size": 10000, "update_filters": ["^hps_.+$"], "backend": None,
        },
    )  # fmt: skip


class UpdateSourceParams(Arguments):
    """The source of updates of a running model: Kafka topics "hps_et.<model>.<table>"."""

    signature: ClassVar[Signature] = Signature(
        "UpdateSourceParams",
        {
            "type": UpdateSourceType_t.null, "brokers": "127.0.0.1:9092", "metadata_refresh_interval_ms": 30000,
            "receive_buffer_size": 262144, "max_receive_buffer_size": 2000, "poll_timeout_ms": 500,
            "max_batch_size": 8192, "failure_backoff_ms": 50, "max_commit_interval": 32,
        },
    )  # fmt: skip


_SPEED: Final = frozenset({
    "scaler", "num_of_worker_buffer_in_pool", "maxnum_des_feature_per_sample", "refresh_delay", "refresh_interval",
    "maxnum_catfeature_query_per_table_per_sample", "label_dim", "slot_num", "use_static_table", "use_context_stream",
    "fuse_embedding_table", "use_hctr_cache_implementation", "thread_pool_size", "init_ec", "embedding_cache_type",
    "enable_pagelock", "fp8_quant", "cache_refresh_percentage_per_iteration", "number_of_worker_buffers_in_pool",
    "number_of_refresh_buffers_in_pool", "deployed_devices", "network_file", "i64_input_key",
})  # fmt: skip
"""Arguments of a model in JSON that affect only speed or nothing: caches receive updates, so they need no refresh, and
supportlonglong states the width of keys."""


_OF_3_1: Final = ("db_type", "redis_ip", "rocksdb_path", "cache_size_percentage_redis")
_DATABASES: Final = "name the databases in volatile_db and persistent_db, beside models"


class InferenceParams(Arguments):
    """The files of a trained model, and its serving settings."""

    signature: ClassVar[Signature] = Signature(
        "InferenceParams",
        {
            "model_name": REQUIRED, "max_batchsize": REQUIRED, "hit_rate_threshold": 1.0, "dense_model_file": "",
            "sparse_model_files": [], "device_id": 0, "use_gpu_embedding_cache": True, "cache_size_percentage": 0.2,
            "i64_input_key": False, "use_mixed_precision": False, "scaler": 1.0, "use_algorithm_search": True,
            "use_cuda_graph": True, "number_of_worker_buffers_in_pool": 2, "number_of_refresh_buffers_in_pool": 1,
            "cache_refresh_percentage_per_iteration": 0.0, "deployed_devices": [0],
            "default_value_for_each_table": [0.0], "volatile_db": None, "persistent_db": None, "update_source": None,
            "maxnum_des_feature_per_sample": 26, "refresh_delay": 0.0, "refresh_interval": 0.0,
            "maxnum_catfeature_query_per_table_per_sample": [], "embedding_vecsize_per_table": [],
            "embedding_table_names": [], "network_file": "", "label_dim": 1, "slot_num": 10,
            "non_trainable_params_file": "", "use_static_table": False, "use_context_stream": True,
            "fuse_embedding_table": False, "use_hctr_cache_implementation": True, "thread_pool_size": 16,
            "init_ec": True, "embedding_cache_type": EmbeddingCacheType_t.Dynamic, "enable_pagelock": False,
            "fp8_quant": False, "db_type": None, "redis_ip": "", "rocksdb_path": "",
            "cache_size_percentage_redis": 0.1,
        },
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        if self.max_batchsize < 1:
            raise ConfigError("no size of a batch", where="InferenceParams, max_batchsize", value=self.max_batchsize,
                              allowed="at least 1")  # fmt: skip
        if self.db_type not in (None, Database_t.Local, Database_t.ParallelLocal):
            raise ConfigError(
                "a database of HugeCTR 3.1 and 3.2", where="InferenceParams, db_type", value=self.db_type,
                allowed="Database_t.Local, Database_t.ParallelLocal", fix=_DATABASES,
            )  # fmt: skip
        note("InferenceParams", "GPU execution settings; sizes of buffers and pools")

    def default_of(self, table: int) -> float:
        """Return the value of absent keys."""
        values = self.default_value_for_each_table or [0.0]
        return float(values[min(table, len(values) - 1)])


class ParameterServerConfig(Arguments):
    """The tables of several models."""

    signature: ClassVar[Signature] = Signature(
        "ParameterServerConfig",
        {
            "emb_table_name": {}, "embedding_vec_size": {}, "max_feature_num_per_sample_per_emb_table": {},
            "inference_params_array": REQUIRED, "volatile_db": None, "persistent_db": None, "update_source": None,
        },
    )  # fmt: skip


_OF_JSON: Final = {
    "model": "model_name", "sparse_files": "sparse_model_files", "dense_file": "dense_model_file",
    "max_batch_size": "max_batchsize", "gpucacheper": "cache_size_percentage", "gpucache": "use_gpu_embedding_cache",
    "deployed_device_list": "deployed_devices", "num_of_worker_buffer_in_pool": "number_of_worker_buffers_in_pool",
    "num_of_refresher_buffer_in_pool": "number_of_refresh_buffers_in_pool", "mixed_precision": "use_mixed_precision",
}  # fmt: skip
_SAME: Final = ("default_value_for_each_table", "embedding_vecsize_per_table", "embedding_table_names",
                "hit_rate_threshold", "non_trainable_params_file", "use_mixed_precision")  # fmt: skip
_CLAUSES: Final = ("volatile_db", "persistent_db", "update_source")
_TOP: Final = ("supportlonglong", "models", "fuse_embedding_table", *_CLAUSES)


def server_from_json(file: str | Path) -> ParameterServerConfig:
    """Return the arguments in a parameter server's JSON.

    Raises:
        ConfigError: a key is missing or unknown, or a value is unknown.
    """
    with expected_form(str(file)):
        return _server_of(load_json(file), str(file))


def _server_of(given: Any, file: str) -> ParameterServerConfig:
    content = json_object(given, where=file)
    _check_names(content, _TOP, file)
    for key in ("supportlonglong", "models"):
        if key not in content:
            raise ConfigError("a key is missing", where=file, value=key)
    if not isinstance(content["supportlonglong"], bool):
        raise ConfigError("not a boolean", where=f"{file}, supportlonglong", value=str(content["supportlonglong"])[:80],
                          allowed="true, false")  # fmt: skip
    if not isinstance(content["models"], list) or not content["models"]:
        raise ConfigError("not a list of models", where=f"{file}, models", value=str(content["models"])[:80],
                          allowed="a list of at least one object")  # fmt: skip
    if content.get("fuse_embedding_table"):
        note(file, "fuse_embedding_table")
    return ParameterServerConfig(
        inference_params_array=[_model_of(one, content["supportlonglong"], file) for one in content["models"]],
        volatile_db=_clause(content, "volatile_db", VolatileDatabaseParams, file),
        persistent_db=_clause(content, "persistent_db", PersistentDatabaseParams, file),
        update_source=_clause(content, "update_source", UpdateSourceParams, file),
    )


def _model_of(given: Any, wide: bool, file: str) -> InferenceParams:
    where = f"{file}, models"
    content = json_object(given, where=where)
    _check_names(content, (*_OF_JSON, *_SAME, *_SPEED), where)
    values = {_OF_JSON.get(key, key): value for key, value in content.items()}
    unused = [name for name in values if name in _SPEED]
    if unused:
        note(where, ", ".join(unused))
    values = {name: _of_text(value, name) for name, value in values.items() if name not in _SPEED}
    return InferenceParams(**{"max_batchsize": 64, "hit_rate_threshold": 0.9, **values, "i64_input_key": wide})


def _of_text(value: Any, name: str) -> Any:
    """Return the number or boolean of a text, which Triton's backend reads as well: "0.5" for 0.5, "true" for true."""
    default = InferenceParams.signature.defaults[name]
    if isinstance(value, list) and name in _LISTS_OF_NUMBERS:
        return [_number_of_text(one) for one in value]
    if isinstance(value, str) and isinstance(default, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    return _number_of_text(value) if isinstance(default, int | float) or name == "max_batchsize" else value


_LISTS_OF_NUMBERS: Final = ("default_value_for_each_table", "embedding_vecsize_per_table")


def _number_of_text(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_names(given: Any, known: Iterable[str], where: str) -> None:
    for name in given:
        if name in _OF_3_1:
            raise ConfigError("a key of HugeCTR 3.1 and 3.2", where=where, value=name, fix=_DATABASES)
        if name in _CLAUSES and name not in known:
            raise ConfigError("a database of one model", where=where, value=name, fix="move it beside models")
        if name not in known:
            raise ConfigError("unknown key", where=where, value=str(name)[:80], fix=suggest(str(name), known))


_WORDS: Final[dict[str, dict[str, Any]]] = {
    "volatile_db": {"type": DatabaseType_t, "overflow_policy": DatabaseOverflowPolicy_t},
    "persistent_db": {"type": DatabaseType_t},
    "update_source": {"type": UpdateSourceType_t},
}


def _clause(content: Any, name: str, kind: Any, file: str) -> Any:
    """Return the arguments of a clause; an empty one is as if it were absent, which HugeCTR calls disabled."""
    where = f"{file}, {name}"
    values = dict(json_object(content.get(name, {}), where=where))
    if not values:
        return None
    if "type" not in values:
        allowed = ", ".join(one.name for one in _WORDS[name]["type"])
        raise ConfigError("a clause has no type, so HugeCTR ignores it", where=where, allowed=allowed,
                          fix="add the type, or remove the clause")  # fmt: skip
    for field, words in _WORDS[name].items():
        if field in values:
            known = [one.name for one in words]
            if values[field] not in known:
                raise ConfigError("unknown value", where=f"{where}, {field}", value=str(values[field])[:80],
                                  allowed=", ".join(known))  # fmt: skip
            values[field] = words[values[field]]
    return kind(**values)


JSON_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "ps.json": (*_TOP, *_OF_3_1),
    "models": tuple({*_OF_JSON, *_SAME, *_SPEED}),
    "volatile_db": tuple(VolatileDatabaseParams.signature.defaults),
    "persistent_db": tuple(PersistentDatabaseParams.signature.defaults),
    "update_source": tuple(UpdateSourceParams.signature.defaults),
}
"""Every key that a parameter server's JSON may have, by clause."""
