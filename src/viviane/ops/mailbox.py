"""Deprecated: the former name of `viviane.ops.host_control_block`."""

from __future__ import annotations

import warnings

from viviane.ops.host_control_block import read_row
from viviane.ops.host_control_block import write_back as answer

__all__ = ["answer", "read_row"]

warnings.warn("viviane.ops.mailbox is now viviane.ops.host_control_block", DeprecationWarning, stacklevel=2)
