"""HugeCTR's Python API and JSON, run by `viviane hugectr`."""

from viviane.compat.hugectr.module_install import run_script
from viviane.compat.hugectr.train_json import train_from_json

__all__ = ["run_script", "train_from_json"]
