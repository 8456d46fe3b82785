"""Conversion of HugeCTR 2.0's JSON to that of 2.1.

2.0                                         2.1
data {source, label_dim, slot_num, ...}     layers[0] of type Data
embedding without bottom                    its bottom is the data's sparse parameter
Concat of one embedding, slot_mask          Reshape, whose `selected` are the slots of the mask
loss of one bottom                          loss of the bottom and the label
"""

from __future__ import annotations

from typing import Any, Final

from viviane.core.errors import ConfigError

_SPARSE: Final = "data"
_LABEL: Final = "label"


def layers_of_2_0(data: Any, layers: Any, where: str) -> list[dict[str, Any]]:
    """Return the layers of a JSON of 2.0 as those of 2.1, the Data layer first.

    Raises:
        ConfigError: a key is missing in the data clause, or a value is not an object.
    """
    if not isinstance(data, dict) or not isinstance(layers, list) or not all(isinstance(one, dict) for one in layers):
        raise ConfigError("data must be an object, and layers a list of objects", where=where)
    for key in ("label_dim", "slot_num"):
        if key not in data:
            raise ConfigError("a key is missing", where=f"{where}, data", value=key)
    label = {"top": data.get("label_name", _LABEL), "label_dim": data["label_dim"]}
    sparse = {**data, "top": data.get("top", _SPARSE), "type": "DistributedSlot"}
    dense = {"top": "dense", "dense_dim": data.get("dense_dim", 0)}
    first = {**data, "type": "Data", "label": label, "dense": dense, "sparse": [sparse]}
    widths: dict[str, int] = {}
    found = []
    for one in layers:
        layer = dict(one)
        hparam = layer.get("sparse_embedding_hparam")
        if isinstance(hparam, dict):
            layer.setdefault("bottom", sparse["top"])
            widths[str(layer.get("top", layer.get("name", "")))] = int(hparam.get("embedding_vec_size", 1))
        elif str(layer.get("type")) == "Concat":
            layer = _reshaped(layer, widths, int(data["slot_num"]))
        elif str(layer.get("type")).endswith("Loss"):
            bottom = layer.get("bottom", [])
            names = [bottom] if isinstance(bottom, str) else list(bottom)
            layer["bottom"] = [*names, label["top"]] if len(names) == 1 else names
        layer.setdefault("top", layer.get("name", ""))
        found.append(layer)
    return [first, *found]


def _reshaped(layer: dict[str, Any], widths: dict[str, int], slots: int) -> dict[str, Any]:
    """Return a Concat of one embedding as the Reshape that concatenates its slots; any other Concat unchanged."""
    bottom = layer.get("bottom", [])
    names = [bottom] if isinstance(bottom, str) else list(bottom)
    if len(names) != 1 or names[0] not in widths:
        return layer
    rest = {key: value for key, value in layer.items() if key not in ("slot_mask", "concat_param")}
    given = layer.get("concat_param")
    mask = layer.get("slot_mask", given.get("slot_mask") if isinstance(given, dict) else None)
    if mask:
        return {**rest, "type": "Reshape", "selected": list(mask)}
    return {**rest, "type": "Reshape", "leading_dim": slots * widths[names[0]]}
