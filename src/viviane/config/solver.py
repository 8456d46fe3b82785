"""Training settings: batch size, learning rate, length, precision, guards."""

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
    """Rows of a training batch; with several processes, of the global batch."""
    eval_batch_size: int | None = Field(default=None, ge=1)
    """Rows in an evaluation or prediction batch; None: max(batch_size, 8192)."""
    drop_last: bool = False
    """Drop a training batch that is shorter than batch_size."""
    shuffle: bool = True
    """Shuffle training rows within the reader's buffer, and row groups over the complete set."""
    shuffle_on: Literal["auto", "host", "device"] = "auto"
    """Where rows are shuffled: "auto" on the GPU, which then keeps three shuffle windows in its memory, if they take at
    most 1/32 of it and bags have constant hotness; "device" raises an error if this is impossible; "host" in the
    reader's threads. The batches are the same."""
    init_output_bias: bool = True
    """In the first fit of a graph, set the bias before each binary label's loss to ln(p / (1 - p)), where p is the mean
    of the label over up to 65,536 training rows. Without it, training on rare clicks starts from p = 1/2."""
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
    """Stop after this many steps, regardless of epochs; a resumed fit counts from its original start."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; None evaluates at the end of each epoch."""
    max_eval_batches: int | None = Field(default=None, ge=1)
    """Maximum batches per evaluation in `fit`; None: the complete validation set."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; None writes one at the end of each epoch."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; the best one by the first metric is kept in addition."""
    incremental_checkpoints: int = Field(default=0, ge=0, le=1000)
    """How many checkpoints after a whole one hold only the rows of tables that changed since the one before; they are
    smaller and faster to write, and loading reads the whole one and all after it. Tables with ema_decay and optimizers
    with update="global" are whole in every checkpoint."""
    async_checkpoint: bool | Literal["auto"] = "auto"
    """Write checkpoints in a thread while training continues, with the same content; "auto" does so if tables are
    larger than 16 MiB. At most one is in progress; its error ends training at one of the next steps."""

    target: dict[str, float] = Field(default_factory=dict)
    """Stop when every named validation metric reaches its target, such as {"auc": 0.8025}."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better first metric."""
    restore_best: bool = False
    """At the end of `fit`, restore the weights of the best evaluation; each improvement writes a checkpoint."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = "fp32"
    """Precision of dense layers: "tf32", on GPUs, rounds the inputs of float32 products; "bf16" and "fp16" compute in
    16 bits; "auto" times fp32 and bf16 on the first batches and uses the faster one."""
    loss_scale: float | Literal["dynamic"] = "dynamic"
    """For fp16: factor of the loss in backward, such as 1024. "dynamic" begins at 65536, halves it if gradients
    overflow, in a step that then updates nothing, and doubles it after 2000 steps without overflow."""
    clip_grad_norm: float | None = Field(default=None, gt=0)
    """Scale gradients, dense and embedding together, so that their joint L2 norm does not exceed this value."""
    class_weights: tuple[float, float] | None = None
    """Weights of negative and positive samples in the loss, such as (1.0, 3.0)."""
    correct_class_weights: bool = False
    """Correct evaluation and predictions for class_weights: p c0 / (p c0 + (1 - p) c1) for a predicted p. Otherwise
    predictions are probabilities of the weighted data: (1.0, 50.0) makes their odds 50 times those of the data."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Smooth binary labels y to y (1 - s) + s / 2 in the training loss."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Evaluate, predict and save with a running mean of the weights, a = d a + (1 - d) w after each step, where
    d = min(ema_decay, t / (t + 10)) at step t. Reduces noise on small data sets; needs one more copy of the weights.
    Evaluations and checkpoints round the mean of rows that rest, so its last bits depend on the steps of both."""
    nan_guard: bool = True
    """Raise an error for a NaN or infinite loss or gradient before the update; it names batch and feature."""
    deterministic: bool = True
    """Bit-identical results for the same seed, machine and library versions."""
    device: str = "auto"
    """"auto" (first GPU, else CPU), "cpu", "cuda", "cuda:1"."""
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads for torch; None: torch's default."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Capture the complete training step in a CUDA graph and replay it: "auto" does so on a GPU after a few batches of
    one shape, if the step can be captured; True raises an error if it cannot; False never captures. On a CPU,
    False also keeps small steps from being recorded and replayed, which does not change results."""

    embedding_memory: int | str | dict[str, int | str] | None = None
    """Memory for embedding tables with their optimizer state, per process, of the GPU if training runs on one: bytes,
    or text such as "8 GiB"; or by table, such as {"item": "2 GiB"}, with all other tables completely in memory. Rows
    that do not fit are stored on disk, with a GPU in host memory, and read when a batch needs them; results are the
    same as for tables in memory. None: tables that do not fit into the free memory get half of it."""
    embedding_host_memory: int | str | None = None
    """With a GPU and embedding_memory: host memory per process for rows that are not on the GPU, such as "64 GiB"; rows
    that do not fit there either are stored on disk. None: as much as they need, at most half of the free memory."""
    embedding_folder: str | None = None
    """Folder of the rows that do not fit in memory during training; None: the folder of temporary files. Checkpoints do
    not refer to it."""

    embedding_passes: int | None = Field(default=None, ge=1)
    """Cut the training data into this many sub-data-sets of neighbouring row groups, which an epoch trains on one after
    another; before each, the rows that its keys need come into the memory of tables in tiers, in the order of the disk.
    Rows are shuffled within a pass. None: rows come as batches need them."""

    plan: Literal["auto"] | dict[str, Any] = "auto"
    """Sharding of tables over several processes: "auto", the plan with the least estimated step time on this machine;
    sharding types by table, such as {"item": "row"}, with "auto" for the others; or a complete ShardingPlan."""
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of embedding vectors and their gradients between processes."""
    fixed_sizes: bool | Literal["auto"] = "auto"
    """Whether full batches have static shapes, so that processes do not exchange sizes: "auto" on GPUs, if batch_size
    is divisible by the number of processes and bags have constant hotness; True also on CPUs, where sums are then
    rounded differently, and raises an error if shapes cannot be static; False never, so that a group captures no CUDA
    graph."""
    peer_memory: bool | Literal["auto"] = "auto"
    """Whether captured steps write ids, vectors and gradients directly to the memory of the other GPUs: "auto" if all
    processes run on one machine whose GPUs can access each other; True raises an error if they cannot; False exchanges
    over NCCL, as eager steps do. The weights are the same."""
    deduplicate_ids: bool = False
    """Whether processes send each distinct row of a batch only once and pool vectors after the exchange: fewer bytes if
    ids repeat or bags are short, but ids are sorted in each step, and sizes are always exchanged."""
    dense_wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which gradients of float32 dense weights are summed over processes: 16 bits halve the bytes, and each
    process's gradient and the sum are rounded. The loss and the norm for `clip_grad_norm` are computed in float32."""
    peer_timeout_s: float = Field(default=600.0, ge=1)
    """Seconds without a heartbeat from a process, or without progress of a process that others wait for, after which
    the job is aborted."""

    @field_validator("plan", mode="before")
    @classmethod
    def _plan_as_data(cls, value: Any) -> Any:
        """Convert a ShardingPlan to plain data, as in a file."""
        if value is None:  # written by runs of earlier versions
            return "auto"
        return value.to_dict() if isinstance(value, Settings) else dict(value) if isinstance(value, Mapping) else value

    @field_validator("embedding_host_memory")
    @classmethod
    def _check_host_memory(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            num_bytes(value, "embedding_host_memory")
        return value

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
                raise ValueError(f"loss_scale needs precision 'fp16', but precision is {self.precision!r}")
        return self
