"""Every public symbol of HugeCTR 2.3 to 25.03 is there, or refused by name with what to do instead."""

import re
from pathlib import Path

import pytest

from viviane.compat.hugectr.symbols import REFUSED, modules
from viviane.core.errors import ConfigError

TRAINING = [
    "CreateSolver",
    "CreateOptimizer",
    "DataReaderParams",
    "AsyncParam",
    "Input",
    "DataReaderSparseParam",
    "SparseEmbedding",
    "HybridEmbeddingParam",
    "EmbeddingTableConfig",
    "EmbeddingCollectionConfig",
    "EmbeddingPlanner",
    "EmbeddingTablePlaceHolder",
    "DenseLayer",
    "GroupDenseLayer",
    "DenseLayerComputeConfig",
    "DenseLayerSwitchs",
    "Model",
    "ModelPerfExt",
    "LearningRateScheduler",
    "TrainingCallback",
    "CreateETC",
    "CreateMOS",
    "CreateHMemCache",
    "Session",
    "solver_parser_helper",
    "SolverParser",
    "get_learning_rate_scheduler",
    "InitParams",
    "hugectr_tf_ops",
    "tools",
    "data",
    "inference",
    "optimizer",
]
MEMBERS = {
    "Optimizer_t": "Ftrl Adam RMSProp AdaGrad MomentumSGD Nesterov SGD",
    "Update_t": "Local Global LazyGlobal",
    "DataReaderType_t": "Norm Raw Parquet RawAsync",
    "Check_t": "Sum Non",
    "Alignment_t": "Auto Non",
    "LrPolicy_t": "fixed",
    "Activation_t": "Relu Non",
    "FcPosition_t": "Head Body Tail Isolated Non",
    "Regularizer_t": "L1 L2",
    "Initializer_t": "Default Uniform XavierNorm XavierUniform Zero",
    "MetricsType": "AUC AverageLoss HitRate NDCG SMAPE",
    "AllReduceAlgo": "NCCL OneShot",
    "DeviceLayout": "LocalFirst NodeFirst",
    "GroupLayer_t": "GroupFusedInnerProduct",
    "Distribution_t": "PowerLaw Uniform",
    "PowerLaw_t": "Long Medium Short Specific",
    "CommunicationType": "IB_NVLink IB_NVLink_Hier NVLink_SingleNode",
    "HybridEmbeddingType": "Distributed",
    "CommunicationStrategy": "Uniform Hierarchical",
    "CompressionStrategy": "Reduction Unique",
    "TrainPSType_t": "Staged Cached",
    "Tensor_t": "Train Evaluate",
    "DataReaderSparse_t": "Distributed Localized",
    "FileSystemType_t": "Local HDFS S3 GCS Other",
    "DataSourceType_t": "HDFS Local S3",
    "Database_t": "Local Redis RocksDB",
    "DatabaseType_t": "disabled hash_map parallel_hash_map multi_process_hash_map redis_cluster rocks_db",
    "DatabaseOverflowPolicy_t": "evict_oldest evict_least_used evict_random",
    "UpdateSourceType_t": "null kafka_message_queue",
    "Embedding_t": """DistributedSlotSparseEmbeddingHash LocalizedSlotSparseEmbeddingHash
        LocalizedSlotSparseEmbeddingOneHot HybridSparseEmbedding""",
    "Layer_t": """BatchNorm BinaryCrossEntropyLoss Reshape Concat CrossEntropyLoss Dropout ElementwiseMultiply ELU
        InnerProduct FusedInnerProduct Interaction MultiCrossEntropyLoss ReLU ReLUHalf Sigmoid Slice WeightMultiply
        FmOrder2 Add ReduceSum Softmax Gather PReLU_Dice GRU MatrixMultiply Scale FusedReshapeConcat
        FusedReshapeConcatGeneral Sub ReduceMean MultiCross Cast LayerNorm Select MLP MultiHeadAttention
        SequenceMask""",
}
MODEL = [
    "add",
    "compile",
    "summary",
    "fit",
    "set_source",
    "train",
    "eval",
    "get_current_loss",
    "get_eval_metrics",
    "start_data_reading",
    "get_data_reader_train",
    "get_data_reader_eval",
    "get_learning_rate_scheduler",
    "set_learning_rate",
    "reset_learning_rate_scheduler",
    "freeze_embedding",
    "unfreeze_embedding",
    "freeze_dense",
    "unfreeze_dense",
    "save_params_to_files",
    "load_dense_weights",
    "load_sparse_weights",
    "load_dense_optimizer_states",
    "load_sparse_optimizer_states",
    "graph_to_json",
    "construct_from_json",
    "check_out_tensor",
    "export_predictions",
    "get_incremental_model",
    "dump_incremental_model_2kafka",
    "get_embedding_training_cache",
    "get_model_oversubscriber",
    "embedding_load",
    "embedding_dump",
]
SESSION = [
    "start_data_reading",
    "set_learning_rate",
    "train",
    "eval",
    "check_overflow",
    "copy_weights_for_evaluation",
    "get_eval_metrics",
    "evaluation",
    "get_current_loss",
    "download_params_to_files",
    "get_data_reader_train",
    "get_data_reader_eval",
    "get_model_oversubscriber",
]
INNER = {
    "tools": "DataGenerator DataGeneratorParams",
    "data": "DataSource DataSourceParams",
    "optimizer": "CreateOptimizer",
    "inference": """InferenceParams CreateInferenceSession InferenceSession InferenceModel CreateParameterServer
        CreateEmbeddingCache HPS ParameterServerConfig VolatileDatabaseParams PersistentDatabaseParams
        UpdateSourceParams EmbeddingCacheType_t""",
}
MADE = modules()
HUGECTR = MADE["hugectr"]


def test_every_name_of_the_module_is_there_or_refused() -> None:
    for name in TRAINING:
        if name in REFUSED:
            with pytest.raises(ConfigError, match=f"hugectr.{name}"):
                getattr(HUGECTR, name)
        else:
            assert hasattr(HUGECTR, name), name


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_of_an_enumeration_is_there(name: str) -> None:
    kind = getattr(HUGECTR, name)
    for member in MEMBERS[name].split():
        found = kind.__members__[member]
        assert found.name == member
        assert {found: 1}[getattr(kind, member)] == 1  # hashable: keys of metrics_spec
        assert member in ("Non", "Uniform") or hasattr(HUGECTR, member), member


def test_every_method_and_inner_module_is_there() -> None:
    for name in MODEL:
        assert callable(getattr(HUGECTR.Model, name)), name
    for name in SESSION:
        assert callable(getattr(HUGECTR.Session, name)), name
    for module, names in INNER.items():
        for name in names.split():
            assert hasattr(MADE[f"hugectr.{module}"], name), f"{module}.{name}"
    for name in ("predict", "evaluate", "check_out_tensor", "refresh_embedding_cache"):
        assert callable(getattr(MADE["hugectr.inference"].InferenceSession, name))
    for name in ("lookup", "lookup_fromdlpack"):
        assert callable(getattr(MADE["hugectr.inference"].HPS, name))
    with pytest.raises(AttributeError, match="CreateSolver"):
        HUGECTR.CreateSolve  # noqa: B018


SOLVER = [
    "model_name",
    "seed",
    "lr_policy",
    "lr",
    "warmup_steps",
    "decay_start",
    "decay_steps",
    "decay_power",
    "end_lr",
    "max_eval_batches",
    "batchsize_eval",
    "batchsize",
    "vvgpu",
    "repeat_dataset",
    "use_mixed_precision",
    "enable_tf32_compute",
    "scaler",
    "metrics_spec",
    "i64_input_key",
    "use_algorithm_search",
    "use_cuda_graph",
    "gen_loss_summary",
    "train_intra_iteration_overlap",
    "train_inter_iteration_overlap",
    "eval_intra_iteration_overlap",
    "eval_inter_iteration_overlap",
    "device_layout",
    "use_embedding_collection",
    "all_reduce_algo",
    "grouped_all_reduce",
    "num_iterations_statistics",
    "perf_logging",
    "drop_incomplete_batch",
    "kafka_brockers",
    "training_callbacks",
    "async_mlp_wgrad",
    "overlap_lr",
    "overlap_init_wgrad",
    "overlap_ar_a2a",
    "use_holistic_cuda_graph",
    "use_overlapped_pipeline",
    "is_dlrm",
    "data_source_params",
]


def test_every_argument_is_read_back() -> None:
    solver = HUGECTR.CreateSolver()
    for name in SOLVER:
        assert hasattr(solver, name), name
    assert (solver.lr, solver.batchsize, solver.vvgpu, solver.max_eval_batches) == (0.001, 2048, [[0]], 100)
    params = MADE["hugectr.inference"].InferenceParams("m", 64, 1.0, "d", ["s"], 0, True, 0.5, True)
    assert (params.i64_input_key, params.cache_size_percentage, params.deployed_devices) == (True, 0.5, [0])
    assert MADE["hugectr.data"].DataSourceParams(use_hdfs=False, local_model_home="x").local_model_home == "x"


def test_the_guide_has_a_place_for_every_symbol() -> None:
    guide = (Path(__file__).parents[2] / "docs/how-to/migrate-from-hugectr.md").read_text(encoding="utf-8")
    inner = [name for names in INNER.values() for name in names.split()]
    for name in {*TRAINING, *MEMBERS, *MODEL, *inner} - {"tools", "data", "inference", "optimizer"}:
        assert re.search(rf"\b{name}\b", guide), name


def test_members_are_numbered_as_in_hugectr() -> None:
    h = modules()["hugectr"]
    numbers = {"Ftrl": 0, "Adam": 1, "SGD": 6, "Sum": 0, "Parquet": 2, "RawAsync": 3, "Evaluate": 1, "BatchNorm": 0}
    assert {name: int(getattr(h, name)) for name in numbers} == numbers
    assert int(h.FcPosition_t.Non) == 0
    assert ["none", "adam"][h.Optimizer_t.Adam] == "adam"
    assert h.Optimizer_t(1) is h.Adam
    assert h.Adam != 1
    assert f"{h.Adam}" == "Optimizer_t.Adam"
