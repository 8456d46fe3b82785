"""A server of the Open Inference Protocol (KServe v2) over HTTP and gRPC, with dynamic batching."""

from viviane.serving.server.batcher import BatchSettings
from viviane.serving.server.recommend_queue import RecommendSettings
from viviane.serving.server.running import InferenceServer
from viviane.serving.server.settings import ServerSettings

__all__ = ["BatchSettings", "InferenceServer", "RecommendSettings", "ServerSettings"]
