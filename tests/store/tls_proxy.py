"""Encryption in front of a real server that has none: certificates, and a proxy that decrypts."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self


class Authority:
    """Signs certificates, which are written as PEM files."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed("authority", self._key.public_key(), [], is_authority=True)
        self.file = self._written("authority", self._certificate)

    def issue(self, name: str, *hosts: str) -> tuple[str, str]:
        """Return the files of a certificate for host names and addresses, and of its key."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        file = self._written(name, self._signed(name, key.public_key(), hosts, is_authority=False))
        place = self._folder / f"{name}.key"
        plain = serialization.NoEncryption()
        place.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return file, str(place)

    def _written(self, name, certificate) -> str:
        from cryptography.hazmat.primitives import serialization

        place = self._folder / f"{name}.pem"
        place.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(place)

    def _signed(self, name, public, hosts, *, is_authority):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        title = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder(issuer, title, public, x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        if is_authority:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            made = made.add_extension(usage, critical=True).add_extension(own, critical=False)
        else:
            found = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
            made = made.add_extension(found, critical=False)
        if hosts:
            names = [
                x509.IPAddress(ipaddress.ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in hosts
            ]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self._key, hashes.SHA256())


class TlsProxy:
    """Accepts encrypted connections and passes on to a port what they say.

    Args:
        target: the server's port.
        certificate: the proxy's certificate and key.
        clients: the file of the authority whose certificates clients must have; None: they need none.
    """

    def __init__(self, target: int, certificate: tuple[str, str], clients: str | None = None) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        if clients is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(clients)
        self.num_encrypted = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # refused certificates are what tests look for
        start = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self._server = self._loop.run_until_complete(start)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_encrypted += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._pass_on(reader, ours), self._pass_on(theirs, writer))
        finally:
            for one in (ours, writer):
                one.transport.abort()

    @staticmethod
    async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        with suppress(OSError, NotImplementedError):
            target.write_eof()  # encrypted streams have none: their end follows

    async def _end(self) -> None:
        self._server.close()
        own = asyncio.current_task()
        others = [one for one in asyncio.all_tasks() if one is not own]
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in the next rounds of the loop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
