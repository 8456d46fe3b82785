"""Conversion of dense layers between HugeCTR's arguments and its JSON."""

from __future__ import annotations

from typing import Any, Final

from viviane.compat.hugectr.arguments import note
from viviane.compat.hugectr.json_files import check_keys
from viviane.compat.hugectr.layers import PARAMETERS, DenseLayer
from viviane.compat.hugectr.names import script_name

_INITS: Final = {"weight_init_type": "weight_init", "bias_init_type": "bias_init"}
_NORM: Final = {"eps": "eps", "gamma_init_type": "gamma_init", "beta_init_type": "beta_init"}
_SECTIONS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "InnerProduct": ("fc_param", {"num_output": "num_output", **_INITS}),
    "FusedInnerProduct": ("fc_param", {"num_output": "num_output", **_INITS}),
    "GroupFusedInnerProduct": ("fc_param", {"num_outputs": "num_outputs"}),
    "MLP": ("mlp_param", {"num_outputs": "num_outputs", "act_type": "activation", "activations": "activations",
                          "use_bias": "use_bias", "biases": "biases", **_INITS}),
    "MultiCross": ("mc_param", {"num_layers": "num_layers", "projection_dim": "projection_dim", **_INITS}),
    "BatchNorm": ("bn_param", {"factor": "factor", **_NORM}),
    "LayerNorm": ("ln_param", _NORM),
    "ELU": ("elu_param", {"elu_alpha": "alpha"}),
    "GRU": ("gru_param", {"num_output": "num_output", "batchsize": "batchsize", "SeqLength": "SeqLength",
                          "vector_size": "vector_size", **_INITS}),
    "PReLU_Dice": ("prelu_dice_param", {"elu_alpha": "alpha", "eps": "eps"}),
    "Scale": ("scale_param", {"axis": "axis", "factor": "factor"}),
}  # fmt: skip
"""Layers whose parameters are in a separate section."""
_PLAIN: Final = {
    "dropout_rate": "rate", "pos_type": "position", "act_type": "activation", "last_act_type": "activation",
    "target_weight_vec": "target_weight", "regularizer_type": "regularizer",
}  # fmt: skip
"""Names of arguments that differ in JSON."""
_OTHER_WORDS: Final = {"elu_alpha": "alpha"}
"""Alternative keys of a section in some versions."""
_WITHOUT_EFFECT: Final = frozenset(
    {"is_training", "compute_config", "dense_layer_switches", "activation", "position", "weight_init", "bias_init",
     "num_output", "leading_dim"}
)  # fmt: skip
"""Keys that occur in layers that do not use them."""


def _split(kind: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the name of the layer's section, the keys inside it, and the keys next to it."""
    section, inside = _SECTIONS.get(kind, ("", {}))
    beside = {name: _PLAIN.get(name, name) for name in PARAMETERS.get(kind, ()) if name not in inside}
    return section, inside, beside


def layer_to_json(layer: DenseLayer) -> dict[str, Any]:
    """Return a layer as JSON.

    Example:
        >>> layer_to_json(DenseLayer(layer_type="Dropout", bottom_names=["a"], top_names=["b"], dropout_rate=0.25))
        {'name': 'b', 'type': 'Dropout', 'bottom': 'a', 'top': 'b', 'rate': 0.25}
    """
    section, inside, beside = _split(layer.kind)
    values = layer.parameters()
    result: dict[str, Any] = {
        "name": script_name(layer.top_names[0]),
        "type": layer.kind,
        "bottom": _one_or_list(script_name(layer.bottom_names)),
        "top": _one_or_list(script_name(layer.top_names)),
    }
    if section:
        result[section] = {key: _json_word(values[name]) for name, key in inside.items() if values[name] != []}
    for name, key in beside.items():
        if values[name] != []:
            result[key] = _json_word(values[name])
    if layer.is_loss and not result.pop("use_regularizer"):
        result.pop("regularizer")
        result.pop("lambda")
    if layer.kind == "Reshape":
        _reshape_to_json(result)
    if not result.get("max_sequence_len"):
        result.pop("max_sequence_len", None)
    return result


def _json_word(value: Any) -> Any:
    """Return a value as HugeCTR's JSON has it: "None" where Python's members are called Non."""
    if isinstance(value, list):
        return [_json_word(one) for one in value]
    return "None" if value == "Non" else value


def _reshape_to_json(result: dict[str, Any]) -> None:
    slots, selected = result.pop("selected_slots", None), result.pop("selected", False)
    if selected:
        result["selected"] = selected if isinstance(selected, list) else slots
    for name in ("leading_dim", "time_step"):
        if not result.get(name):
            result.pop(name, None)


def layer_from_json(given: dict[str, Any]) -> DenseLayer:
    """Return the layer of a JSON object.

    Example:
        >>> layer_from_json({"type": "Dropout", "bottom": "a", "top": "b", "rate": 0.25}).dropout_rate
        0.25
    """
    data = dict(given)
    name, kind = data.pop("name", data.get("top", "")), data.pop("type")
    where = f"layer {name or data.get('top')!r} ({kind})"
    section, inside, beside = _split(kind)
    values: dict[str, Any] = {}
    for group, names in ((data.pop(section, {}) if section else {}, inside), (data, beside)):
        back = {key: argument for argument, key in names.items()}
        for given_key in [key for key in group if key not in ("bottom", "top")]:
            key = given_key if given_key in back else _OTHER_WORDS.get(given_key, given_key)
            if key not in back:
                if key in _WITHOUT_EFFECT:
                    note(kind, key)
                    continue
                check_keys([key], [*back, *([section] if section else [])], where)
                continue
            values[back[key]] = group[given_key]
    if isinstance(values.get("selected"), list):
        values |= {"selected": True, "selected_slots": values["selected"]}
    if values.get("regularizer_type"):
        values["use_regularizer"] = True
    return DenseLayer(layer_type=kind, bottom_names=_listed(data["bottom"]), top_names=_listed(data["top"]), **values)


def _one_or_list(names: list[str]) -> Any:
    return names[0] if len(names) == 1 else list(names)


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
