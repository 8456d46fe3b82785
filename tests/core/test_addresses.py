"""Addresses of servers: what a library would refuse with an error of its own is refused before."""

import pytest

from viviane.core.addresses import check_host, server_address
from viviane.core.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "http://a..b:80", f"http://{'x' * 5000}:80", f"http://{'x.' * 200}y", "http://127.0.0.1:99999", "http://[::1",
        "http://[x]:3", "http://", "http://:8000", "ftp://a", "a:80", "", "http://a b", "http://a:b", "http://a:0",
        "http://é..x", "http://-a", "http://a-", "http://[127.0.0.1]:3", "http://a:-1", "http://\ud800:3",
    ],
)  # fmt: skip
def test_what_cannot_be_an_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        server_address(text)
    assert len(str(refused.value)) < 2000


def test_addresses_are_read() -> None:
    assert server_address("https://[::1]:8000/v2").host == "::1"
    assert server_address("127.0.0.1:8001", default_scheme="http").port == 8001
    assert server_address("http://triton_1.example.com.").port is None
    assert server_address("http://münchen.example").host == "münchen.example"


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ":::", "", "a b", "a\0", "é..x", "http://a", "127.0.0.1:80"])
def test_what_cannot_be_a_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="not a valid host"):
        check_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "a-b.c_d", "192.168.0.1", "xn--mnchen-3ya.de"])
def test_hosts_are_taken(host: str) -> None:
    assert check_host(host) == host
