"""Differences between HugeCTR's versions: names of arguments and methods that the last version does not have.

`RENAMED` contains, by version, the arguments that a call had under another name, and `METHODS` the methods. The name on
the right is the one that this package uses.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

RENAMED: Final = MappingProxyType(
    {
        "2.3 and 3.0": {
            "DataReaderSparseParam": {"sparse_name": "top_name"},
            "InferenceSession.predict": {
                "dense": "dense_feature", "dense_features": "dense_feature", "embedding_columns": "embeddingcolumns",
            },
        },
        "3.1 and 3.2": {
            "Model.set_source": {"source_list": "source", "keyset_list": "keyset"},
            "CreateMOS": {"hcache_configs": "hmem_cache_configs"},
        },
        "3.3 to 3.9": {
            "CreateETC": {"hcache_configs": "hmem_cache_configs"},
            "CreateSolver": {"kafka_brokers": "kafka_brockers"},
            "DataSourceParams": {"type": "source"},
            "EmbeddingTableConfig": {"id_space": "table_id"},
            "GroupDenseLayer": {"bottom_name": "bottom_name_list"},
        },
        "4.0": {"AsyncParam": {"io_block_size": "max_num_requests_per_thread"}},
    }
)  # fmt: skip
"""By version and call: the version's name of an argument, and the name here."""
METHODS: Final = MappingProxyType(
    {
        "2.3 and 3.0": {
            "DataReader.set_file_list_source": "set_source",
            "Session.get_model_prefetcher": "get_model_oversubscriber",
            "Session.Create": "Session",
            "SolverParser": "solver_parser_helper",
        },
        "3.1 and 3.2": {"Model.get_model_oversubscriber": "get_embedding_training_cache"},
    }
)
"""By version: its name of a method or function, and the name here."""


def older_names(call: str) -> dict[str, str]:
    """Return the names of a call's arguments in other versions, and their names here.

    Example:
        >>> older_names("CreateMOS")
        {'hcache_configs': 'hmem_cache_configs'}
    """
    return {old: new for calls in RENAMED.values() for old, new in calls.get(call, {}).items()}
