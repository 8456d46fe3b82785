"""Lets the tests of this folder import `tiers`, every kind of tier that they share, and the servers that they start."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "remote")]
