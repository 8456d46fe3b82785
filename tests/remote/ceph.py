"""Ceph's S3 gateway on this machine for tests: a monitor, a store of objects in one file, and the gateway before them.

apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from store import KEYS, free_port

_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "monmaptool")
_STORE_GB = 4


class Gateway:
    """The three servers on the loopback, without passwords among themselves, and a user of the gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        monitor = free_port()
        settings = {
            "fsid": str(uuid4()), "mon host": f"v2:127.0.0.1:{monitor}/0",
            "run dir": folder, "log file": folder / "$name.log",
            "admin socket": folder / "$name.asok", "auth cluster required": "none", "auth service required": "none",
            "auth client required": "none", "auth supported": "none", "ms mon client mode": "crc",
            "mon data": folder / "mon", "osd data": folder / "osd",
            "osd objectstore": "bluestore", "bluestore block size": _STORE_GB << 30, "bluestore cache size": 64 << 20,
            "osd memory target": 939_524_096, "osd pool default size": 1, "osd pool default min size": 1,
            "osd pool default pg num": 4, "osd crush chooseleaf type": 0, "mon allow pool size one": "true",
            "mon max pg per osd": 1000, "ms bind ipv4": "true", "public addr": "127.0.0.1", "cluster addr": "127.0.0.1",
            "osd heartbeat grace": 120, "rgw frontends": f"beast endpoint=127.0.0.1:{self.port}",
            "rgw data": folder / "gateway", "rgw thread pool size": 16, "rgw enable usage log": "false",
            "rgw run sync thread": "false", "keyring": folder / "keyring", "mon warn on pool no redundancy": "false",
        }  # fmt: skip
        self.conf = folder / "ceph.conf"
        self.conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        (folder / "keyring").write_text("")
        for name in ("mon", "osd", "gateway"):
            (folder / name).mkdir()
        try:
            self._start(monitor, settings["fsid"])
        except BaseException:
            self.kill()
            raise

    def _start(self, monitor: int, fsid: Any) -> None:
        map_ = self.folder / "monmap"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}]", map_)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_)
        self._serve("ceph-mon", "-i", "a")
        self._ceph("status")
        own = uuid4()  # the monitor ignores a store of another id
        number = self._ceph("osd", "new", str(own)).strip()
        self._run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", own)
        self._serve("ceph-osd", "-i", number)
        self._until(lambda: "1 up" in self._ceph("osd", "stat"), "the store of objects")
        self._serve("radosgw", "-n", "client.admin")
        self._until(self._answers, "the gateway")
        self._run(
            "radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests",
            f"--access-key={KEYS['AWS_ACCESS_KEY_ID']}", f"--secret={KEYS['AWS_SECRET_ACCESS_KEY']}",
        )  # fmt: skip

    def _run(self, program: str, *words: Any) -> str:
        command = [program, "-c", str(self.conf), *(str(word) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90, cwd=self.folder)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout} {done.stderr}"
        return done.stdout

    def _ceph(self, *words: str) -> str:
        return self._run("ceph", "--connect-timeout", "30", *words)

    def _serve(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}.out").open("ab") as out:
            command = [program, "-c", str(self.conf), "-f", *words]
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=self.folder))

    def _until(self, ready: Any, what: str) -> None:
        for _ in range(120):
            assert all(one.poll() is None for one in self._processes), f"{what} did not start: see {self.folder}"
            if ready():
                return
            time.sleep(0.5)
        raise AssertionError(f"{what} did not respond within a minute")

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.5).close()
        except OSError:
            return False
        return True

    @property
    def environment(self) -> dict[str, str]:
        return {
            **KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required", "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }  # fmt: skip

    def client(self) -> Any:
        """A client of its own, to look at what stands there."""
        from pyarrow.fs import S3FileSystem

        return S3FileSystem(
            access_key=KEYS["AWS_ACCESS_KEY_ID"], secret_key=KEYS["AWS_SECRET_ACCESS_KEY"], region="us-east-1",
            endpoint_override=self.environment["AWS_ENDPOINT_URL"], allow_bucket_creation=True,
        )  # fmt: skip

    def kill(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


def missing_parts() -> str:
    """Say what is needed and absent; empty where all is there."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Ceph's gateway needs {absent[0]}: see the head of ceph.py"
    return "" if os.geteuid() == 0 else "Ceph's servers are started as root here"
