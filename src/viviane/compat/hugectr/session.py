"""HugeCTR's API before 3.1: a session over a JSON file, and the preview of `Model` of 3.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Final

from viviane.compat.hugectr.argument_types import checked_type, typed, typed_methods
from viviane.compat.hugectr.arguments import REQUIRED, Signature
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.json_graph import read_graph, reader_from_json, with_data_layer
from viviane.compat.hugectr.json_optimizer import optimizer_from_json, schedule_from_json
from viviane.compat.hugectr.model import Model
from viviane.compat.hugectr.passes import EmbeddingTrainingCache, EtcParams
from viviane.compat.hugectr.reading import DataReader, EarlyReader
from viviane.compat.hugectr.solver import LearningRateScheduler, OptParams, Solver
from viviane.compat.hugectr.train_json import solver_from_json
from viviane.core.errors import ConfigError
from viviane.core.json_files import expected_form, json_object

_OLD: Final[dict[str, Any]] = {
    "eval_batches": None, "model_file": "", "dense_model_file": "", "dense_opt_states_file": "",
    "sparse_opt_states_file": "", "sparse_opt_states_files": [], "embedding_files": [], "sparse_model_files": [],
    "max_iter": 0, "num_epochs": 0, "display": 200, "snapshot": 10000, "snapshot_prefix": "", "eval_interval": 1000,
    "use_model_oversubscriber": False, "temp_embedding_dir": "",
}  # fmt: skip
"""Arguments of solver_parser_helper that CreateSolver no longer has."""


class SessionSolver(Solver):
    """The result of solver_parser_helper."""

    signature: ClassVar[Signature] = Signature(
        "solver_parser_helper", {**Solver.signature.defaults, **_OLD}, Solver.signature.speed
    )

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        if self.eval_batches is not None:  # 2.3, which reads data once by default
            self.max_eval_batches = self.eval_batches
            self.repeat_dataset = given.get("repeat_dataset", False)


@typed
def solver_of_file(config_file: str | Path) -> SessionSolver:
    """Return the solver of a JSON file's clause: SolverParser, before solver_parser_helper."""
    with expected_form(str(config_file)):
        return solver_from_json(load_json(config_file), SessionSolver)


class SessionOptParams(OptParams):
    """The result of 3.0's hugectr.optimizer.CreateOptimizer, with learning rate and precision."""

    signature: ClassVar[Signature] = Signature(
        "optimizer.CreateOptimizer",
        {
            **OptParams.signature.defaults, "use_mixed_precision": False, "learning_rate": 0.001, "lr": None,
            "scaler": 1.0, "global_update": False, "warmup_steps": 1, "decay_start": 0, "decay_steps": 1,
            "decay_power": 2.0, "end_lr": 0.0,
        },
        frozenset({*OptParams.signature.speed, "scaler", "use_mixed_precision"}),
    )  # fmt: skip

    def schedule(self) -> dict[str, float]:
        """Return the learning rate schedule in these arguments."""
        names = ("warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
        changed = {n: getattr(self, n) for n in names if getattr(self, n) != self.signature.defaults[n]}
        return {"lr": self.lr or self.learning_rate, **changed}


@typed
def get_learning_rate_scheduler(config_file: str | Path) -> LearningRateScheduler:
    """Return the learning rate schedule of a JSON file's optimizer clause."""
    with expected_form(str(config_file)):
        schedule = schedule_from_json(load_json(config_file)["optimizer"])
    return LearningRateScheduler(schedule.pop("lr"), **schedule)


@typed_methods
class Session:
    """Trains the model of a JSON file step by step.

    Args:
        solver_config: result of solver_parser_helper.
        config_file: the JSON file; its solver clause is not used.
        use_model_oversubscriber: train in passes, see `passes`.
        temp_embedding_dir: HugeCTR's folder for rows that do not fit in memory.
    """

    def __init__(
        self,
        solver_config: Solver,
        config_file: str,
        use_model_oversubscriber: bool = False,
        temp_embedding_dir: str = "",
    ) -> None:
        content = json_object(load_json(config_file), where=config_file)
        for clause in ("optimizer", "layers"):
            if clause not in content:
                raise ConfigError("a clause is missing", where=config_file, value=clause)
        with expected_form(config_file):
            schedule = schedule_from_json(content["optimizer"])
            reader = reader_from_json(with_data_layer(content, config_file)[0])
            rule = optimizer_from_json(content["optimizer"])
        defaults = Solver.signature.defaults
        for name, value in schedule.items():
            typed_value = checked_type(f"{config_file}, optimizer", name, value, defaults[name], REQUIRED)
            setattr(solver_config, name, typed_value)
        solver = solver_config
        passes = use_model_oversubscriber or getattr(solver, "use_model_oversubscriber", False)
        folders = [temp_embedding_dir] if temp_embedding_dir else []
        etc = EtcParams(local_paths=folders) if passes else None
        self.model = Model(solver, reader, rule, etc)
        for layer in read_graph(config_file, include_dense_network=True):
            self.model.add(layer)
        self.model.compile()
        self._load(solver)

    @classmethod
    def Create(cls, *args: Any, **given: Any) -> Session:  # noqa: N802 - HugeCTR's word
        """Return a session; the constructor in HugeCTR's first Python API."""
        return cls(*args, **given)

    def _load(self, solver: Solver) -> None:
        dense = getattr(solver, "model_file", "") or getattr(solver, "dense_model_file", "")
        sparse = getattr(solver, "embedding_files", []) or getattr(solver, "sparse_model_files", [])
        states = getattr(solver, "sparse_opt_states_files", []) or getattr(solver, "sparse_opt_states_file", "")
        if dense:
            self.model.load_dense_weights(dense)
        if sparse:
            self.model.load_sparse_weights(sparse)
        if getattr(solver, "dense_opt_states_file", ""):
            self.model.load_dense_optimizer_states(solver.dense_opt_states_file)
        if states:
            self.model.load_sparse_optimizer_states(states)

    def start_data_reading(self) -> None:
        """Start reading at the beginning of the data."""
        if self.model.solver.repeat_dataset:
            self.model.start_data_reading()
            return
        self.model.get_data_reader_train().set_source(self.model.reader_params.sources[0])
        self.model.get_data_reader_eval().set_source(self.model.reader_params.eval_source)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `train`."""
        self.model.set_learning_rate(lr)

    def train(self, is_first_batch: bool = True) -> bool:
        """Train on one batch; return False at the end of the data."""
        return self.model.train(is_first_batch)

    def eval(self, eval_batch: int = -1) -> bool:
        """Evaluate one batch; return False at the end of the data."""
        return self.model.eval(eval_batch)

    def get_current_loss(self) -> float:
        """Return the loss of the last training batch."""
        return self.model.get_current_loss()

    def get_eval_metrics(self) -> list[tuple[str, float]]:
        """Return the metrics over the batches since the last call."""
        return self.model.get_eval_metrics()

    def evaluation(self, prediction_file: str = "", label_file: str = "") -> list[tuple[str, float]]:
        """Evaluate max_eval_batches batches, write predictions and labels, and return the metrics."""
        for file in (prediction_file, label_file):
            if file:
                Path(file).unlink(missing_ok=True)
        reader = self.model.get_data_reader_eval()
        if not self.model.solver.repeat_dataset and reader.is_eof():
            reader.set_source()
        for _ in range(self.model.solver.max_eval_batches):
            if not self.model.eval():
                break
            if prediction_file and label_file:
                self.model.export_predictions(prediction_file, label_file)
        return self.model.get_eval_metrics()

    def check_overflow(self) -> None:
        """Do nothing: tables grow with their keys."""

    def copy_weights_for_evaluation(self) -> None:
        """Do nothing: evaluation uses the trained weights directly."""

    def download_params_to_files(self, prefix: str, iter: int = 0) -> None:  # noqa: A002 - HugeCTR's word
        """Write weights and optimizer state."""
        self.model.save_params_to_files(prefix, iter)

    def get_params_num(self) -> int:
        """Return the number of dense weights."""
        return sum(weight.numel() for weight in self.model.viviane.trainer.stepper.parameters.values())

    def get_data_reader_train(self) -> DataReader | EarlyReader:
        """Return the reader of training data."""
        return self.model.get_data_reader_train()

    def get_data_reader_eval(self) -> DataReader | EarlyReader:
        """Return the reader of evaluation data."""
        return self.model.get_data_reader_eval()

    def get_model_oversubscriber(self) -> EmbeddingTrainingCache:
        """Return the embedding training cache."""
        return self.model.get_model_oversubscriber()

    get_model_prefetcher = get_model_oversubscriber
