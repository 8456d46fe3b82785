"""How a run trains: batch size, learning rate, length, precision, guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from viviane.config.base import Settings
from viviane.config.memory_sizes import num_bytes


class Solver(Settings):
    """Settings of a training run.

    The learning rate of step n (from 1) is

        n < warmup_steps                            lr n / warmup_steps
        decay_start == 0 or n < decay_start         lr
        n < decay_start + decay_steps               max(end_lr, lr (left / decay_steps)^decay_power),
                                                    left = decay_start + decay_steps - n
        afterwards                                  end_lr

    Example:
        >>> Solver(batch_size=4096, lr=1e-3).batch_size
        4096
    """

    batch_size: int = Field(default=2048, ge=1)
    """Rows in a training batch; of several processes, rows of all their shares together."""
    eval_batch_size: int | None = Field(default=None, ge=1)
    """Rows in an evaluation or prediction batch; None takes max(batch_size, 8192)."""
    drop_last: bool = False
    """Drop a training batch that is shorter than batch_size."""
    shuffle: bool = True
    """Shuffle training rows within the reader's buffer, row groups over the whole set."""
    shuffle_on: Literal["auto", "host", "device"] = "auto"
    """Where shuffled rows are put in order: "auto" on the GPU, which then has three buffers of rows in memory, where
    that is 1/32 of it at most and bags have one number of ids; "device" refuses what prevents it; "host" by the
    reader's threads. The batches are the same."""
    init_output_bias: bool = True
    """At the first fit of a graph, set the bias behind each binary label's loss to ln(p / (1 - p)), p the label's mean
    over up to 65,536 training rows. Rare clicks are else learned from p = 1/2 downwards."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial values, dropout and shuffling."""

    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=1, ge=1)
    decay_start: int = Field(default=0, ge=0)
    decay_steps: int = Field(default=1, ge=1)
    decay_power: float = Field(default=2.0, gt=0)
    end_lr: float = Field(default=0.0, ge=0)

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps of a fit, whatever the epochs; a resumed fit counts from its first beginning."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; None evaluates at the end of each epoch."""
    max_eval_batches: int | None = Field(default=None, ge=1)
    """Batches of an evaluation during fit; None takes the whole validation set."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; None writes one at the end of each epoch."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay; the best one by the first metric stays besides."""
    async_checkpoint: bool | Literal["auto"] = "auto"
    """Write checkpoints in a thread while training continues, with the same content; "auto" does where tables are
    larger than 16 MiB. At most one is in progress; an error of it ends training at one of the next steps."""

    target: dict[str, float] = Field(default_factory=dict)
    """Stop when every named validation metric reaches its value, such as {"auc": 0.8025}."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better first metric."""
    restore_best: bool = False
    """At the end of fit, go back to the weights of the best evaluation; each better one writes a checkpoint."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """Precision of dense layers: "tf32", on GPUs, rounds what float32 products read; "bf16" and "fp16" compute in 16
    bits; "auto" times fp32 and bf16 on the first batches and keeps the faster."""
    loss_scale: float | Literal["dynamic"] = "dynamic"
    """Of fp16: what the loss is multiplied by before backward, such as 1024; "dynamic" begins at 65536, halves it where
    gradients overflow, in a step that then moves nothing, and doubles it after 2000 steps without."""
    clip_grad_norm: float | None = Field(default=None, gt=0)
    """Scale gradients, dense and embedding together, so that their joint L2 norm stays below this."""
    class_weights: tuple[float, float] | None = None
    """Weights of negative and positive samples in the loss, such as (1.0, 3.0)."""
    correct_class_weights: bool = False
    """Take class_weights back out of evaluation and predictions: p c0 / (p c0 + (1 - p) c1) for a predicted p. Without
    it predictions are probabilities of the weighted data: (1.0, 50.0) makes their odds 50 times those of the data."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Move binary labels y to y (1 - s) + s / 2 in the training loss."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Evaluate, predict and save with a running mean of the weights, a = d a + (1 - d) w after each step, where
    d = min(ema_decay, t / (t + 10)) at step t. Steadies small data sets; takes one more copy of the weights."""
    nan_guard: bool = True
    """Refuse a NaN or infinite loss or gradient before it reaches the weights; names batch and feature."""
    deterministic: bool = True
    """The same seed gives the same bits, run after run, on the same machine and library versions."""
    device: str = "auto"
    """"auto" (first GPU, else CPU), "cpu", "cuda", "cuda:1"."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; None leaves torch's own choice."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Record the whole training step in a CUDA graph and replay it: "auto" does on a GPU, after a few batches of one
    shape, where nothing prevents it; True refuses what prevents it; False never does."""

    embedding_memory: int | str | dict[str, int | str] | None = None
    """Memory for embedding tables with their optimizer state, in each process: bytes, or text such as "8 GiB"; of
    single tables by name, such as {"item": "2 GiB"}, and the others whole in memory. Rows that do not fit lie on disk,
    and come when a batch needs them; the numbers are those of tables in memory. None: tables that do not fit into the
    free memory get half of it."""
    embedding_folder: str | None = None
    """Where rows that do not fit lie while a process trains; None: the folder of temporary files. Checkpoints do not
    refer to it."""

    plan: Literal["auto"] | dict[str, Any] = "auto"
    """Where tables are when several processes train: "auto", the plan with the least expected time on this machine;
    the kind of some tables by name, such as {"item": "row"}, and the others as with "auto"; or a whole ShardingPlan."""
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of embedding vectors and their gradients between processes."""
    fixed_sizes: bool | Literal["auto"] = "auto"
    """Whether the processes of a fit take sizes of whole batches for known and do not tell each other: "auto" on GPUs,
    where batch_size divides by the processes and bags have one number of ids; True on CPUs too, where sums are then
    rounded otherwise, and what prevents it is refused; False never, so that a group records no step in a CUDA graph."""
    peer_memory: bool | Literal["auto"] = "auto"
    """Whether recorded steps write ids, vectors and gradients straight into the memory of the other GPUs: "auto" does
    where all processes are on one machine and their GPUs reach each other; True refuses what prevents it; False leaves
    the exchange to NCCL, as steps from Python do. Weights are the same."""
    deduplicate_ids: bool = False
    """Whether processes send each distinct row of a batch once, and pool vectors at home: less on the wire where ids
    repeat or bags are short, but a sort of the ids in each step, and sizes are always exchanged."""
    dense_wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients of float32 dense weights are summed over processes: 16 bits send half as much, and each
    process's gradient and the sum are rounded. The loss and `clip_grad_norm`'s norm are taken in float32."""
    peer_timeout_s: float = Field(default=600.0, ge=1)
    """Seconds without a sign of life from a process, or without progress of one that others wait for, that end the
    whole job."""

    @field_validator("plan", mode="before")
    @classmethod
    def _plan_as_data(cls, value: Any) -> Any:
        """Take a ShardingPlan as the plain data that a file would hold."""
        if value is None:  # as runs of earlier versions wrote it
            return "auto"
        return value.to_dict() if isinstance(value, Settings) else dict(value) if isinstance(value, Mapping) else value

    @field_validator("embedding_memory")
    @classmethod
    def _memory_is_a_size(cls, value: Any) -> Any:
        for table, size in (value if isinstance(value, dict) else {"": value}).items():
            if size is not None:
                num_bytes(size, f"embedding_memory of {table!r}" if table else "embedding_memory")
        return value

    @model_validator(mode="after")
    def _check(self) -> Solver:
        if self.class_weights is not None and min(self.class_weights) < 0:
            raise ValueError("class_weights must not be negative")
        if self.correct_class_weights and (self.class_weights is None or min(self.class_weights) == 0):
            raise ValueError("correct_class_weights needs class_weights above 0")
        if self.end_lr > self.lr:
            raise ValueError(f"end_lr ({self.end_lr}) must not exceed lr ({self.lr})")
        if self.loss_scale != "dynamic":
            if not 0 < self.loss_scale < float("inf"):
                raise ValueError(f"loss_scale must be 'dynamic' or a positive number, not {self.loss_scale}")
            if self.precision != "fp16":
                raise ValueError(f"loss_scale is for precision 'fp16' alone, and precision is {self.precision!r}")
        return self
