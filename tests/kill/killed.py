"""Run a program that kills itself before its n-th write: argv is n, then code, then the code's own words.

A write is what changes what other processes find under the working directory: a file opened for writing, a name made,
renamed, exchanged or removed, a flush, and what pyarrow and DuckDB write without Python's knowledge. With n = 0 the
program runs to its end and prints its writes as the last line, JSON.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq

from viviane.core import exchange
from viviane.etl.engine import DuckDbEngine

_NAMES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class Writes:
    """Counts writes under a folder, and ends the process before number `limit`."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit, self.seen = str(root.resolve()), limit, list[str]()
        self._guard = threading.RLock()

    def note(self, kind: str, path: object = "") -> None:
        text = os.path.abspath(os.fsdecode(path)) if path else self.root  # noqa: PTH100
        if not text.startswith(self.root):
            return
        with self._guard:
            self.seen.append(f"{kind} {os.path.relpath(text, self.root)}")
            if len(self.seen) == self.limit:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, words: tuple) -> None:
        if event == "open":
            opened = isinstance(words[0], str | bytes | os.PathLike)
            if opened and words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.note("open", words[0])
        elif event in _NAMES:
            self.note(event[3:], words[1] if event == "os.rename" else words[0])

    def around(self, holder: object, name: str) -> None:
        """Count the beginning and the end of a call that writes without Python's knowledge."""
        original = getattr(holder, name)

        def call(*words, **named):
            self.note(f"{name} begins")
            done = original(*words, **named)
            self.note(f"{name} ends")
            return done

        setattr(holder, name, call)


def main() -> None:
    writes = Writes(Path(), int(sys.argv[1]))
    code = sys.argv[2]
    writes.around(os, "fsync")
    writes.around(exchange, "exchange")
    writes.around(DuckDbEngine, "write")
    for method in ("__init__", "write_table", "close"):
        writes.around(pq.ParquetWriter, method)
    sys.addaudithook(writes.hook)
    sys.argv = ["viviane", *sys.argv[3:]]
    status = 0
    try:
        exec(compile(code, "<killed>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    print("\n" + json.dumps(writes.seen))
    sys.exit(status)


if __name__ == "__main__":
    main()
