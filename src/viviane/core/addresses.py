"""Addresses of servers: hosts, ports and URLs are checked before a library tries to connect with them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from viviane.core.errors import ConfigError

_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MOST_CHARACTERS: Final = 253  # of a name in the DNS
_ALLOWED_HOST: Final = "a host name such as localhost, or an address such as 127.0.0.1 or ::1"


@dataclass(frozen=True)
class ServerAddress:
    """Scheme, host and port of a server.

    Args:
        scheme: "http", or the default where the text has none.
        host: without brackets.
        port: None where the text has none.
    """

    scheme: str
    host: str
    port: int | None


def check_host(host: str, *, where: str | None = None) -> str:
    """Return a host name or IP address if it has a valid form; it need not exist.

    Raises:
        ConfigError: the form is invalid.

    Example:
        >>> check_host("::1")
        '::1'
        >>> check_host("a..b")
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: not a valid host
          value:   'a..b'
          allowed: a host name such as localhost, or an address such as 127.0.0.1 or ::1
    """
    if not _is_host(host):
        raise ConfigError("not a valid host", where=where, value=host, allowed=_ALLOWED_HOST)
    return host


def server_address(
    text: str,
    *,
    where: str | None = None,
    schemes: tuple[str, ...] = ("http", "https"),
    default_scheme: str | None = None,
) -> ServerAddress:
    """Read the address of a server.

    Args:
        text: scheme://host:port, the port being optional.
        where: location for errors.
        schemes: allowed schemes.
        default_scheme: of a text without one; None refuses such a text.

    Raises:
        ConfigError: scheme, host or port is invalid.

    Example:
        >>> server_address("http://[::1]:8000")
        ServerAddress(scheme='http', host='::1', port=8000)
        >>> server_address("127.0.0.1:8001", default_scheme="http").port
        8001
    """
    full = text if "://" in text or default_scheme is None else f"{default_scheme}://{text}"
    allowed = " or ".join(f"{scheme}://host:port" for scheme in schemes)
    try:
        parts = urlsplit(full)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError("not the address of a server", where=where, value=text, allowed=allowed,
                          fix=f"correct it: {error}"[:200]) from None  # fmt: skip
    if parts.scheme not in schemes or not host:
        raise ConfigError("not the address of a server", where=where, value=text, allowed=allowed)
    if port == 0:
        raise ConfigError("not the port of a server", where=where, value=text, allowed="1 to 65535")
    return ServerAddress(parts.scheme, check_host(host, where=where or text), port)


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            return ipaddress.ip_address(host).version == 6
        except ValueError:
            return False
    try:
        name = host.encode("idna").decode("ascii").removesuffix(".")
    except UnicodeError:
        return False
    return len(name) <= _MOST_CHARACTERS and all(_LABEL.fullmatch(label) for label in name.split("."))
