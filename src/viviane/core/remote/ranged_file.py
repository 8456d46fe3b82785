"""Ranged reads of a remote file, with retries."""

from __future__ import annotations

import io
from typing import Any

from viviane.core.errors import RemoteError
from viviane.core.remote.retry import retried


class RangedFile(io.RawIOBase):
    """Reads ranges of a remote file; an incomplete range is an error, never the end of the file.

    Args:
        system: the pyarrow file system.
        path: path in that file system.
        url: URL for messages.
        size: size in bytes, as the store reports it; None requests it.
    """

    def __init__(self, system: Any, path: str, url: str, size: int | None = None) -> None:
        self._system, self._path, self._url = system, path, url
        self._handle: Any = None
        self._at = 0
        self.size: int = retried(self._open_size, url, "opening") if size is None else size

    def _open(self) -> Any:
        if self._handle is None:
            self._handle = self._system.open_input_file(self._path)
        return self._handle

    def _open_size(self) -> int:
        return int(self._open().size())

    def read_at(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count), up to the end of the file.

        Raises:
            RemoteError: the store does not respond, or the file has become shorter.
        """
        count = max(0, min(count, self.size - start))
        if count == 0:
            return b""

        def request() -> bytes:
            try:
                data: bytes = self._open().read_at(count, start)
            except FileNotFoundError:
                raise RemoteError("a file was removed while it was read", where=self._url) from None
            except BaseException:
                self._drop()
                raise
            if len(data) != count:
                self._drop()
                raise OSError(f"{len(data)} of {count} bytes from byte {start} on received")
            return data

        return retried(request, self._url, "reading")

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.close()
            except OSError:
                return  # a broken connection; the next attempt opens a new one

    # io.RawIOBase -----------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the current position."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes from the current position on."""
        data = self.read_at(self._at, self.size - self._at if size is None or size < 0 else size)
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        """Return the remaining bytes."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current position on."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Release the connection."""
        if not self.closed:
            self._drop()
        super().close()
