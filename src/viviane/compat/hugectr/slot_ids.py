"""The slots of keys in a table that several slots share: HugeCTR's `slot_id` of localized embeddings without sizes.

HugeCTR notes the slot when it inserts a key. Here the training data are read once more when a table is saved, until the
slot of each of its keys is found; training itself costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.compat.hugectr.columns import Slot
from viviane.compat.hugectr.enums import Embedding_t
from viviane.compat.hugectr.inputs import SparseEmbedding
from viviane.compat.hugectr.tables import Keys

_UNKNOWN: Final = -1


def records_slots(embedding: SparseEmbedding) -> bool:
    """Return whether HugeCTR writes slot_id for an embedding."""
    return embedding.embedding_type is Embedding_t.LocalizedSlotSparseEmbeddingHash


def slots_of_keys(keys: Keys, slots: Sequence[Slot], batches: Iterable[Batch]) -> NDArray[np.int64] | None:
    """Return the slot of each key, the first one in which a batch has it; None if batches lack a key.

    Args:
        keys: of a table.
        slots: that share the table.
        batches: of the training data, with the keys of the model; they are read until each key is found.
    """
    if len(slots) == 1:
        return np.zeros(len(keys), np.int64)
    order = np.argsort(keys)
    known, found = keys[order], np.full(len(keys), _UNKNOWN, np.int64)
    left = len(keys)
    for batch in batches if left else ():
        for place, slot in enumerate(slots):
            own = batch.one_hot[:, batch.layout.one_hot_index[slot.column]] if slot.one_hot else None
            values = (batch.bags[slot.column].values if own is None else own).cpu().numpy()
            at = np.minimum(np.searchsorted(known, values), len(known) - 1)
            new = at[(known[at] == values) & (found[at] == _UNKNOWN)]
            found[new] = place
        left = int((found == _UNKNOWN).sum())
        if not left:
            break
    if left:
        return None
    result = np.empty_like(found)
    result[order] = found
    return result
