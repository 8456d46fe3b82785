"""Load for servers of the Open Inference Protocol: closed loops and arrivals at a rate, measured honestly."""

from viviane.serving.load.generator import LoadResult, run_load
from viviane.serving.load.requests import RequestSource
from viviane.serving.load.settings import LoadSettings

__all__ = ["LoadResult", "LoadSettings", "RequestSource", "run_load"]
