import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from saved_models import Models, raw_rows


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="session")
def raw():
    return raw_rows


@pytest.fixture(scope="session")
def server(models):
    """A server of four models: raw rows of one and of several outputs, and encoded rows as columns and matrices."""
    from viviane.serving import ModelEntry, RepositorySettings, SessionSettings
    from viviane.serving.server import InferenceServer, ServerSettings

    cpu, encoded = SessionSettings(device="cpu"), SessionSettings(device="cpu", rows="encoded")
    matrices = SessionSettings(device="cpu", rows="matrices")
    entries = (
        ModelEntry(name="deepfm", path=str(models.path("deepfm")), session=cpu),
        ModelEntry(name="mmoe", path=str(models.path("mmoe")), session=cpu),
        ModelEntry(name="encoded", path=str(models.path("deepfm")), session=encoded),
        ModelEntry(name="matrices", path=str(models.path("deepfm")), session=matrices),
    )
    settings = ServerSettings(
        http_port=0, grpc_port=0, max_body_bytes=1 << 20, max_rows=2000, header_timeout_s=1, body_timeout_s=1,
        inference=RepositorySettings(models=entries),
    )  # fmt: skip
    with InferenceServer(settings, "1.2.3") as started:
        yield started


@pytest.fixture
def http(server):
    from clients import Http

    client = Http(server)
    yield client
    client.close()


@pytest.fixture
def grpc_client(server):
    from clients import Grpc

    client = Grpc(server)
    yield client
    client.close()
