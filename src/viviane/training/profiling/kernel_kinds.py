"""The purpose of GPU kernels, derived from their names: kernels of a CUDA graph have no Python ranges."""

from __future__ import annotations

from typing import Final

KINDS: Final = ("matrix products", "lookups", "updates", "sorts", "exchanges", "copies", "others")

_OWN: Final = {
    "matrix products": (
        "cross_forward cross_backward cross_last interaction_forward interaction_backward input_gradient "
        "narrow_forward narrow_backward tile_product forward query key_value bias sum row candidate few_rows"
    ),
    "lookups": (
        "gather pool join key record bag_key bag_record entry_sources bag_sources find find_request take put settle "
        "erase draw latest assign check_bags switch count_bits count_ages choose_ages report count_slots take_slots "
        "list_places give_slots resolve"
    ),
    "updates": "move span join_spans rest numbers",
    "copies": "address swap take_rows copy cast pack cut widen read_row write_back write",
    "others": "check check_columns mark update_status update_scaled_status logistic_loss gate"
    " column_sums difference difference_record probabilities",
}
OWN_KERNELS: Final = {f"{name}_kernel": kind for kind, names in _OWN.items() for name in names.split()}
"""Kernels of this package, by the names of their functions."""
_PARTS: Final = (
    ("exchanges", ("nccl", "nvshmem", "symmetric_memory")),
    ("copies", ("memcpy",)),
    ("sorts", ("sort", "onesweep", "bitonic")),
    ("matrix products", ("gemm", "gemv", "cutlass", "xmma", "nvjet", "cublas", "splitkreduce")),
    ("updates", ("multi_tensor_apply", "optimizer", "adam", "fused_sgd")),
    ("lookups", ("gather", "index", "embedding", "scatter")),
    ("copies", ("copy", "catarray")),
)
"""Substrings of the kernel names of other libraries, in the order of the search."""


def kind_of(name: str) -> str:
    """Return which of `KINDS` a kernel or copy belongs to.

    Args:
        name: as the profiler writes it.

    Example:
        >>> kind_of("span_kernel"), kind_of("ncclDevKernel_AllReduce_Sum_f32"), kind_of("Memcpy DtoD")
        ('updates', 'exchanges', 'copies')
        >>> kind_of("void at::native::elementwise_kernel<128, 2>")
        'others'
    """
    own = OWN_KERNELS.get(name)
    if own is not None:
        return own
    small = name.lower()
    return next((kind for kind, parts in _PARTS if any(part in small for part in parts)), "others")


def is_of_the_host(name: str) -> bool:
    """Return whether this is a copy from or to the host, which runs on a copy engine.

    Example:
        >>> is_of_the_host("Memcpy HtoD (Pinned -> Device)"), is_of_the_host("Memcpy DtoD (Device -> Device)")
        (True, False)
    """
    return name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
