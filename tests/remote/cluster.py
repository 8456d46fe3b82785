"""HDFS of this machine for tests: a real NameNode and a real DataNode, of the Hadoop 2.7 jars in PySpark's 2.4 source.

pip download --no-deps --no-binary=:all: --no-build-isolation pyspark==2.4.8
tar xzf pyspark-2.4.8.tar.gz --wildcards '*/deps/jars/*'
export VIVIANE_HDFS_JARS=$PWD/pyspark-2.4.8/deps/jars

WebHDFS needs a library besides, Jersey 1, which Debian has; VIVIANE_JERSEY_JARS is its folder, else /usr/share/java:
apt-get install libjersey1-server-java libjersey1-servlet-java libjsr311-api-java
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from store import free_port

JARS_VARIABLE = "VIVIANE_HDFS_JARS"
JERSEY_VARIABLE = "VIVIANE_JERSEY_JARS"
_JERSEY = ("jsr311-api.jar", "jersey1-core.jar", "jersey1-server.jar", "jersey1-servlet.jar")
_OPENED = ("java.lang", "java.nio", "sun.nio.ch", "java.net", "java.util")


class Cluster:
    """One NameNode and one DataNode on the loopback, with their files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, rest = free_port(), [free_port() for _ in range(5)]
        conf = folder / "conf"
        for name in ("hdfs", "datanode", "secondary"):
            (conf / "webapps" / name).mkdir(parents=True)
        site = {
            "fs.defaultFS": f"hdfs://127.0.0.1:{self.port}",
            "hadoop.tmp.dir": str(folder / "tmp"),
            "dfs.replication": "1",
            "dfs.webhdfs.enabled": "false" if missing_web_parts() else "true",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.http-address": f"127.0.0.1:{rest[0]}",
            "dfs.datanode.address": f"127.0.0.1:{rest[1]}",
            "dfs.datanode.http.address": f"127.0.0.1:{rest[2]}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{rest[3]}",
            "dfs.namenode.safemode.extension": "0",
        }
        rows = "".join(f"<property><name>{n}</name><value>{v}</value></property>" for n, v in site.items())
        for name in ("core-site.xml", "hdfs-site.xml"):
            (conf / name).write_text(f"<configuration>{rows}</configuration>")
        self.web_url = f"webhdfs://127.0.0.1:{rest[0]}"
        # Jersey's jars first: the others have a later javax.ws.rs, which Jersey 1 does not fit.
        web = [] if missing_web_parts() else [str(jersey_folder() / name) for name in _JERSEY]
        path = ":".join([str(conf), *web, f"{os.environ[JARS_VARIABLE]}/*"])
        opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
        exported = "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED"
        self._java = ["java", "-Xmx256m", exported, *opened, "-cp", path]
        self._run("namenode.NameNode", "-format", "-force", "-nonInteractive").wait(60)
        self.name_node, self.data_node = self._run("namenode.NameNode"), self._run("datanode.DataNode")
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self._java, f"org.apache.hadoop.hdfs.server.{name}", *words], stdout=log, stderr=log, cwd=self.folder
            )

    def _wait(self) -> None:
        from hdfs_native import Client

        for attempt in range(120):
            try:
                with Client(f"hdfs://127.0.0.1:{self.port}").create(f"/ready-{attempt}") as file:
                    file.write(b"yes")
                return
            except Exception:  # the client raises RuntimeError and OSError until both are up
                assert self.name_node.poll() is None, "the NameNode did not start"
                assert self.data_node.poll() is None, "the DataNode did not start"
                time.sleep(0.5)
        raise AssertionError("HDFS did not come up within a minute")

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def kill(self) -> None:
        for process in (self.data_node, self.name_node):
            process.kill()
            process.wait()

    def stop_data(self) -> None:
        self.data_node.kill()
        self.data_node.wait()

    def start_data(self) -> None:
        self.data_node = self._run("datanode.DataNode")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


def jersey_folder() -> Path:
    return Path(os.environ.get(JERSEY_VARIABLE, "/usr/share/java"))


def missing_web_parts() -> str:
    """Say what WebHDFS needs and is absent."""
    absent = [name for name in _JERSEY if not (jersey_folder() / name).exists()]
    return f"{jersey_folder()} has no {absent[0]}: see the head of cluster.py" if absent else ""


def missing_parts() -> str:
    """Say what is needed and absent; empty where all is there."""
    if shutil.which("java") is None:
        return "HDFS needs java"
    return "" if os.environ.get(JARS_VARIABLE) else f"{JARS_VARIABLE} names no jars: see the head of cluster.py"
