"""Tests of this room share raw_files.py, which importlib mode does not put on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
