"""What torch.compile traces of a collection: Python that takes a batch apart and calls one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError
from viviane.embedding.jagged import is_keyed_jagged, read_keyed_jagged
from viviane.embedding.lookup_spec import LookupSpec
from viviane.embedding.operators import collection_of

# Without an input that requires grad, autograd would not call backward. Of one element: torch.compile computes
# nothing for an empty tensor. On the CPU wherever the tables are: its gradient is a zero for the host.
_ANCHOR = torch.zeros(1, device="cpu", requires_grad=True)


def compiled_lookup(
    collection: int, batch: Any, features: Sequence[str], training: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Look a batch up from inside torch.compile; return the flat output and the masks.

    Args:
        collection: its number.
        batch: as `EmbeddingCollection.forward` takes it.
        features: names, in the collection's order.
        training: whether gradients are kept.
    """
    tensors: list[Tensor] = []
    forms: list[tuple[str, str]] = []
    one_hot = jagged = None
    if isinstance(batch, Batch):
        one_hot = batch.layout.one_hot
        tensors.append(batch.one_hot)
        given: Mapping[str, Bag | Tensor] = batch.bags
    elif is_keyed_jagged(batch):
        whole = read_keyed_jagged(batch, starts=False)
        jagged, given, features = whole.names, {"": Bag(whole.values, whole.offsets, whole.weights)}, ("",)
    else:
        given = batch
    for name in features:
        if name in given:
            keys = given[name]
            if isinstance(keys, Bag):
                tensors += (
                    [keys.values, keys.offsets] if keys.weights is None else [keys.values, keys.offsets, keys.weights]
                )
                forms.append((name, "bag" if keys.weights is None else "weighted"))
            else:
                tensors.append(keys)
                forms.append((name, "ids"))
    spec, masks = _describe(collection, one_hot, tuple(forms), jagged, training)
    out = torch.ops.viviane.lookup(_ANCHOR if training else None, tensors, collection, spec)
    return out[0], {name: out[1 + i] for i, name in enumerate(masks)}


def _describe(
    collection: int,
    one_hot: tuple[str, ...] | None,
    forms: tuple[tuple[str, str], ...],
    jagged: tuple[str, ...] | None,
    training: bool,
) -> tuple[str, tuple[str, ...]]:
    own = collection_of(collection)
    if not forms and one_hot is None:
        raise DataError("the batch lacks every feature", value=", ".join(own.features))
    masks = tuple((f.name, f.num_places) for f in own.features.values() if f.combiner == "concat")
    dtype = str(own.output_dtype).removeprefix("torch.")
    spec = LookupSpec(one_hot, forms, jagged, own.width, dtype, masks, training)
    return spec.text(), tuple(name for name, _ in masks)


# What torch.compiler.assume_constant_result does, which would load the compiler with `import viviane`.
_describe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_step(collection: int, lr: float, scale: float | Tensor, factor: float) -> None:
    """Update from inside torch.compile."""
    number, tensor = (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
    torch.ops.viviane.step(collection, lr, factor, number, tensor)


def compiled_norm_squared(collection: int, device: torch.device) -> Tensor:
    """Return the norm of the waiting gradients, squared, from inside torch.compile."""
    squared: Tensor = torch.ops.viviane.norm_squared(collection, device)
    return squared


def compiled_call(collection: int, method: str) -> None:
    """Call a method without arguments from inside torch.compile."""
    torch.ops.viviane.call(collection, method)


def compiled_limit_norms(collection: int, table: str, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Limit the norms of looked-up rows from inside torch.compile."""
    torch.ops.viviane.limit_norms(collection, table, ids, max_norm, norm_type)
