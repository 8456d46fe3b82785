"""Run a program that kills itself before its n-th write: argv is n, then code, then the code's own words.

Where n is `interrupt:n`, the process receives SIGINT before its n-th write and again before the next one, which may be
of the handling of the first. Where n is `record:FOLDER` the program is not killed. Before each write it copies what the
working directory holds to FOLDER, which is what a kill at that moment would leave: one run shows the outcome of all
kills. See `States`.

A write is what changes what other processes find under the working directory: a file opened for writing, a name made,
renamed, exchanged or removed, a flush, and what pyarrow, DuckDB and RocksDB write without Python's knowledge. With
n = 0 the program runs to its end and prints its writes as the last line, JSON.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq

from viviane.core import exchange
from viviane.etl.engine import DuckDbEngine
from viviane.store.rocks_database import RocksDatabase

_NAMES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class States:
    """What a folder held at each of many moments; equal contents and equal states are kept once.

    `states.json` is a list of states, each a list of [path, kind, mode, mtime in ns, content], and the number of the
    state before each write.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._states: dict[str, int] = {}
        self._moments: list[int] = []
        (folder / "contents").mkdir(parents=True)

    def take(self) -> None:
        """Keep the present state, after the last one."""
        while (entries := self._entries()) is None:
            pass
        # When a folder changed is no part of a state: nothing reads it, and it differs after each write.
        self._moments.append(self._states.setdefault(json.dumps(entries), len(self._states)))

    def _entries(self) -> list[tuple[str, str, int, int, str]] | None:
        """Return what the folder holds; None where another thread, which noted its write before, did it meanwhile."""
        try:
            return [self._entry(one) for one in sorted(self._root.rglob("*"))]
        except FileNotFoundError:
            return None

    def _entry(self, path: Path) -> tuple[str, str, int, int, str]:
        found = path.lstat()
        name = str(path.relative_to(self._root))
        if path.is_symlink():
            return name, "link", 0, 0, str(path.readlink())
        if path.is_dir():
            return name, "folder", found.st_mode & 0o777, 0, ""
        data = path.read_bytes()
        content = hashlib.sha256(data).hexdigest()
        if not (kept := self._folder / "contents" / content).exists():
            kept.write_bytes(data)
        return name, "file", found.st_mode & 0o777, found.st_mtime_ns, content

    def save(self) -> None:
        """Write states.json."""
        states = [json.loads(one) for one in self._states]
        (self._folder / "states.json").write_text(json.dumps({"states": states, "moments": self._moments}))


def restore(recorded: Path, entries: list[list], root: Path) -> None:
    """Make a folder that holds a recorded state."""
    root.mkdir()
    for name, kind, mode, mtime, content in entries:
        path = root / name
        if kind == "link":
            path.symlink_to(content)
        elif kind == "folder":
            path.mkdir()
        else:
            path.write_bytes((recorded / "contents" / content).read_bytes())
            os.utime(path, ns=(mtime, mtime))
        if kind != "link":
            path.chmod(mode)


class Writes:
    """Counts writes under a folder, and ends the process before number `limit` or keeps the state before each."""

    def __init__(self, root: Path, limit: int, states: States | None = None, *, interrupt: bool = False) -> None:
        self.root, self.limit, self.seen = str(root.resolve()), limit, list[str]()
        self.interrupt = interrupt
        self.states = states
        self._guard = threading.RLock()
        self._own = threading.local()

    def note(self, kind: str, path: object = "") -> None:
        if getattr(self._own, "busy", False):
            return
        if isinstance(path, int):  # of an open file, as newer releases of filelock give it
            path = os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115
        text = os.path.abspath(os.fsdecode(path)) if path else self.root  # noqa: PTH100
        if not text.startswith(self.root):
            return
        with self._guard:
            self.seen.append(f"{kind} {os.path.relpath(text, self.root)}")
            if self.interrupt and len(self.seen) in (self.limit, self.limit + 1):
                os.kill(os.getpid(), signal.SIGINT)
            elif len(self.seen) == self.limit:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.states is not None:
                self._own.busy = True
                self.states.take()
                self._own.busy = False

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
    kind, _, word = sys.argv[1].partition(":")
    states = States(Path().resolve(), Path(word)) if kind == "record" else None
    limit = 0 if states else int(word or kind)
    writes = Writes(Path(), limit, states, interrupt=kind == "interrupt")
    code = sys.argv[2]
    writes.around(os, "fsync")
    writes.around(exchange, "exchange")
    writes.around(DuckDbEngine, "write")
    writes.around(os, "write")
    writes.around(os, "ftruncate")
    for method in ("__init__", "write_table", "close"):
        writes.around(pq.ParquetWriter, method)
    for method in ("__init__", "family", "write", "flush", "close"):
        writes.around(RocksDatabase, method)
    sys.addaudithook(writes.hook)
    sys.argv = ["viviane", *sys.argv[3:]]
    status = 0
    try:
        exec(compile(code, "<killed>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if states is not None:
        states.save()
    print("\n" + json.dumps(writes.seen))
    sys.exit(status)


if __name__ == "__main__":
    main()
