"""Conversion of HugeCTR's dense layers to nodes of a graph."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from viviane.compat.hugectr.arguments import REQUIRED, Arguments, Signature, note
from viviane.compat.hugectr.enums import Activation_t, FcPosition_t, GroupLayer_t, Initializer_t, Regularizer_t, plain
from viviane.compat.hugectr.names import graph_names
from viviane.core.errors import ConfigError, suggest
from viviane.model import DenseLayer as Node
from viviane.nn import LAYERS, Loss

_INITS: Final = ("weight_init_type", "bias_init_type")
_NORM: Final = ("eps", "gamma_init_type", "beta_init_type")
PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "BatchNorm": ("factor", *_NORM),
    "Concat": ("axis",),
    "Dropout": ("dropout_rate",),
    "ELU": ("elu_alpha",),
    "FmOrder2": ("out_dim",),
    "FusedInnerProduct": ("num_output", "pos_type", "act_type", *_INITS),
    "GRU": ("num_output", "batchsize", "SeqLength", "vector_size", *_INITS),
    "Gather": ("indices",),
    "GroupFusedInnerProduct": ("num_outputs", "last_act_type"),
    "InnerProduct": ("num_output", *_INITS),
    "LayerNorm": _NORM,
    "MLP": ("num_outputs", "act_type", "activations", "use_bias", "biases", *_INITS),
    "MultiCross": ("num_layers", "projection_dim", *_INITS),
    "MultiHeadAttention": ("num_attention_heads", "transpose_b"),
    "Multiply": ("weight_dims", "weight_init_type"),
    "PReLU_Dice": ("elu_alpha", "eps"),
    "ReduceMean": ("axis",),
    "ReduceSum": ("axis",),
    "Reshape": ("leading_dim", "time_step", "selected", "selected_slots", "shape"),
    "Scale": ("axis", "factor"),
    "Select": ("dim", "index"),
    "SequenceMask": ("max_sequence_len_from", "max_sequence_len_to", "max_sequence_len"),
    "Slice": ("ranges",),
    "Softmax": ("factor",),
    "WeightMultiply": ("weight_dims", "weight_init_type"),
    "BinaryCrossEntropyLoss": ("use_regularizer", "regularizer_type", "lambda"),
    "CrossEntropyLoss": ("use_regularizer", "regularizer_type", "lambda"),
    "MultiCrossEntropyLoss": ("target_weight_vec", "use_regularizer", "regularizer_type", "lambda"),
}
"""The arguments of DenseLayer that each layer uses; other layers have no parameters."""
_SEVERAL_TOPS: Final = ("Slice", "FusedReshapeConcat")
_OMITTED_AT: Final[dict[str, Any]] = {
    "time_step": 0, "selected": False, "selected_slots": [], "shape": [], "activations": [], "biases": [],
    "target_weight_vec": [], "projection_dim": 0, "lambda": 0, "max_sequence_len": 0,
}  # fmt: skip
"""Values that mean "not set" in HugeCTR."""
_OUR_WORDS: Final = {"Relu": "relu", "Head": "head", "Body": "body", "Tail": "tail", "Isolated": "isolated"}


class DenseLayer(Arguments):
    """One layer: its type, bottoms, tops and parameters."""

    signature: ClassVar[Signature] = Signature(
        "DenseLayer",
        {
            "layer_type": REQUIRED, "bottom_names": REQUIRED, "top_names": REQUIRED, "factor": 1.0, "eps": 1e-5,
            "gamma_init_type": Initializer_t.Default, "beta_init_type": Initializer_t.Default, "dropout_rate": 0.5,
            "elu_alpha": 1.0, "num_output": 1, "weight_init_type": Initializer_t.Default,
            "bias_init_type": Initializer_t.Default, "num_layers": 0, "leading_dim": 0, "time_step": 0,
            "batchsize": 1, "SeqLength": 1, "vector_size": 1, "selected": False, "selected_slots": [], "ranges": [],
            "indices": [], "weight_dims": [], "projection_dim": 0, "out_dim": 0, "axis": 1,
            "max_sequence_len_from": 1, "max_sequence_len_to": 1, "num_attention_heads": 1, "transpose_b": False,
            "target_weight_vec": [], "use_regularizer": False, "regularizer_type": Regularizer_t.L1, "lambda": 0,
            "pos_type": FcPosition_t.Non, "act_type": Activation_t.Relu, "num_outputs": [], "use_bias": True,
            "activations": [], "biases": [], "compute_config": None, "shape": [], "dim": 0, "index": [],
            "dense_layer_switches": None, "last_act_type": Activation_t.Relu, "max_sequence_len": 0,
        },
        speed=frozenset({"compute_config", "dense_layer_switches"}),
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.kind = plain(self.layer_type)
        self.bottom_names: list[str] = graph_names(_listed(vars(self)["bottom_names"]))
        self.top_names: list[str] = graph_names(_listed(vars(self)["top_names"]))
        self.given = tuple(name for name in given if name not in ("layer_type", "bottom_names", "top_names"))
        for name in ("bottom_names", "top_names"):
            if not vars(self)[name]:
                raise ConfigError(
                    "a layer needs at least one tensor", where=f"DenseLayer {self.kind}, {name}", value=[]
                )
        if self.kind not in LAYERS:
            raise ConfigError("unknown layer", where="DenseLayer", value=self.kind, fix=suggest(self.kind, LAYERS))

    @property
    def is_loss(self) -> bool:
        """Whether this is a loss."""
        return issubclass(LAYERS[self.kind], Loss)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of this kind of layer by HugeCTR's names, as plain values."""
        return {name: plain(getattr(self, name)) for name in PARAMETERS.get(self.kind, ())}

    def to_node(self, left_out: set[str]) -> Node:
        """Return the node, named after its first top.

        Args:
            left_out: tops that exist only in HugeCTR (masks, gradients); bottoms with these names are dropped, and
                such tops of this layer are added.
        """
        where = f"DenseLayer {self.top_names[0]!r} ({self.kind})"
        for name in self.given:
            if name not in (*PARAMETERS.get(self.kind, ()), *self.signature.speed):
                note(where, name)
        tops = list(self.top_names)
        if self.kind not in _SEVERAL_TOPS and not self._gives_scores:
            left_out.update(tops[1:])
            tops = tops[:1]
        bottoms = [name for name in self.bottom_names if name not in left_out]
        return Node(tops[0], self.kind, bottoms, tops, self._viviane_parameters())

    @property
    def _gives_scores(self) -> bool:
        """Whether this is the attention of 4.2, which returns raw scores and the values by head."""
        return self.kind == "MultiHeadAttention" and len(self.bottom_names) == 3 and len(self.top_names) == 2

    def _viviane_parameters(self) -> dict[str, Any]:
        values = {
            name: value
            for name, value in self.parameters().items()
            if name not in _OMITTED_AT or value != _OMITTED_AT[name]
        }
        if self.kind == "Reshape" and (values.get("selected") or values.get("shape")):
            values.pop("leading_dim", None)
        if self.kind == "Reshape":
            _merge_leading_dimensions(values)
        if self.kind == "SequenceMask":
            _mask_length(values, len(self.bottom_names))
        if self._gives_scores:
            values["scores"] = True
        if self.kind == "GRU":
            values.pop("batchsize", None)  # batches here may have any size
        if self.kind == "Scale":
            values["factor"] = int(values["factor"])
        if isinstance(values.get("selected"), list):
            values.pop("selected_slots", None)
        for name in ("act_type", "last_act_type", "pos_type"):
            if name in values:
                values[name] = _OUR_WORDS.get(values[name], "none")
        if "activations" in values:
            values["activations"] = [_OUR_WORDS.get(one, "none") for one in values["activations"]]
        if not values.get("use_regularizer", True):
            for name in ("use_regularizer", "regularizer_type", "lambda"):
                values.pop(name, None)
        return values


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _merge_leading_dimensions(values: dict[str, Any]) -> None:
    """Convert HugeCTR's shape, which includes the batch, to leading_dim and time_step if its first entry is -1.

    The first dimension of the result is then inferred: (B, 26, 11) with [-1, 11] is (26 B, 11).
    """
    shape = list(values.get("shape", ()))
    if len(shape) < 2 or shape[0] != -1:
        return
    if len(shape) > 3:
        values["shape"] = shape[1:]
        return
    del values["shape"]
    values["leading_dim"] = shape[-1]
    if len(shape) == 3:
        values["time_step"] = shape[1]


def _mask_length(values: dict[str, Any], bottoms: int) -> None:
    """Set one maximum length for a mask with one length, the form up to 4.3.0, and two otherwise."""
    length = values.pop("max_sequence_len", None)
    if bottoms == 1:
        both = (values.pop("max_sequence_len_from"), values.pop("max_sequence_len_to"))
        values["max_sequence_len"] = length or both[1]
    elif length:
        values |= {"max_sequence_len_from": length, "max_sequence_len_to": length}


class GroupDenseLayer(Arguments):
    """A chain of fully connected layers with ReLU."""

    signature: ClassVar[Signature] = Signature(
        "GroupDenseLayer",
        {
            "group_layer_type": REQUIRED, "bottom_name_list": REQUIRED, "top_name_list": REQUIRED,
            "num_outputs": REQUIRED, "last_act_type": Activation_t.Relu,
        },
    )  # fmt: skip

    def to_layer(self) -> DenseLayer:
        """Return the chain as one layer, named after its last top.

        Raises:
            ConfigError: the group type is unknown, or the numbers of outputs and tops differ.
        """
        if self.group_layer_type is not GroupLayer_t.GroupFusedInnerProduct:
            raise ConfigError("unknown group of layers", where="GroupDenseLayer", value=self.group_layer_type)
        if not self.num_outputs or len(self.top_name_list) != len(self.num_outputs):
            raise ConfigError("one top per output size is needed", where="GroupDenseLayer", value=self.top_name_list)
        return DenseLayer(
            layer_type="GroupFusedInnerProduct", bottom_names=_listed(self.bottom_name_list)[:1],
            top_names=self.top_name_list[-1:], num_outputs=self.num_outputs, last_act_type=self.last_act_type,
        )  # fmt: skip
