"""NVIDIA's Triton server: model repositories for it, its installation, and its process."""

from viviane.serving.triton.environment import TritonEnvironment, install_triton
from viviane.serving.triton.process import TritonServer
from viviane.serving.triton.repository import PythonModel, write_repository
from viviane.serving.triton.settings import TritonSettings

__all__ = ["PythonModel", "TritonEnvironment", "TritonServer", "TritonSettings", "install_triton", "write_repository"]
