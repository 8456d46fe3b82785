"""A running Triton server."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from viviane import core
from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.serving.triton.environment import TritonEnvironment, TritonError
from viviane.serving.triton.settings import TritonSettings

_log = get_logger("serving.triton")
_SHARED_MEMORY: Final = Path("/dev/shm")
_TAIL_BYTES: Final = 64 << 10


class TritonServer:
    """Triton as a child process: started when the object is made, ready when `wait_until_ready` returns.

    Args:
        repository: as `write_repository` writes it.
        settings: ports and limits.
        environment: None takes the installed one.

    Raises:
        MissingExtraError: Triton is not installed. ConfigError: a port is taken.
    """

    def __init__(
        self,
        repository: str | Path,
        settings: TritonSettings | None = None,
        environment: TritonEnvironment | None = None,
    ) -> None:
        self.settings = settings or TritonSettings()
        self._environment = environment or TritonEnvironment.find()
        self._repository = Path(repository).absolute()
        for port in (self.settings.http_port, self.settings.grpc_port, self.settings.metrics_port):
            _check_free(self.settings.host, port)
        self._folder = Path(tempfile.mkdtemp(prefix="viviane-triton-"))
        self._prefix = f"viviane_triton_{os.getpid()}_{self._folder.name[-8:]}"
        self._log_file: IO[bytes] | None = None
        try:
            self._process = self._start()
        except BaseException:
            self._clean()
            raise

    @property
    def http_url(self) -> str:
        """Where HTTP is served."""
        return f"http://{self.settings.host}:{self.settings.http_port}"

    @property
    def grpc_target(self) -> str:
        """Where gRPC is served."""
        return f"{self.settings.host}:{self.settings.grpc_port}"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def wait_until_ready(self) -> Self:
        """Wait until all models are loaded.

        Raises:
            TritonError: the server ended, or was not ready in time; the end of its log is the value.
        """
        until = time.monotonic() + self.settings.start_timeout_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                code = self.stop()
                raise self._failure(f"Triton ended with code {code} while it started")
            if self._is_ready():
                return self
            time.sleep(0.1)
        error = self._failure("Triton was not ready in time")
        self.stop()
        raise error

    def wait(self) -> int:
        """Wait until the server ends; returns its exit code."""
        return self._process.wait()

    def ask_to_stop(self) -> None:
        """Let the server answer what it accepted, and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the server, by force if it takes too long, and remove its shared memory; returns its exit code."""
        self.ask_to_stop()
        try:
            code = self._process.wait(self.settings.stop_timeout_s + 10)
        except subprocess.TimeoutExpired:
            _log.warning("Triton did not end in time and is killed")
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # processes of the Python backend that outlived a crash
            os.killpg(self._process.pid, signal.SIGKILL)
        self._clean()
        return code

    def __enter__(self) -> Self:
        return self.wait_until_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log_errors(self) -> str:
        """Return the errors in the end of the server's log, where it goes into a file."""
        if self.settings.log is None:
            return ""
        with contextlib.suppress(OSError), Path(self.settings.log).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            wrong = [line for line in lines if re.match(r"E\d{4} |.*\berror\b", line, re.IGNORECASE)]
            return "\n".join((wrong or lines)[-10:])
        return ""

    # Inside -----------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        found, settings = self._environment, self.settings
        backends = self._folder / "backends"
        shutil.copytree(found.triton / "backends", backends)  # a copy, since the stub has to lie inside
        shutil.copy2(found.stub, backends / "python" / found.stub.name)
        options = {
            "model-repository": self._repository,
            "backend-directory": backends,
            "cache-directory": found.triton / "caches",
            "http-address": settings.host,
            "grpc-address": settings.host,
            "metrics-address": settings.host,
            "http-port": settings.http_port,
            "grpc-port": settings.grpc_port,
            "metrics-port": settings.metrics_port,
            "reuse-http-port": "false",
            "reuse-grpc-port": "false",
            "exit-timeout-secs": settings.stop_timeout_s,
            "allow-gpu-metrics": str(_has_gpu()).lower(),
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        arguments += [
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
        ]
        if settings.allow_load:
            arguments += ["--model-control-mode=explicit", "--load-model=*"]
        environment = {
            **os.environ,
            "PATH": f"{found.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": found.libraries(),
            "VIRTUAL_ENV": str(found.folder),
            "VIVIANE_PACKAGES": str(self._package()),  # model.py imports from here
            "NUMBA_CACHE_DIR": str(found.folder / "numba-cache"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        environment.pop("PYTHONHOME", None)
        output: Any = None
        if settings.log is not None:
            self._log_file = Path(settings.log).open("ab")  # noqa: SIM115 - closed with the server
            output = self._log_file
        return subprocess.Popen(
            [str(found.server), *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the server in order
        )  # fmt: skip

    def _package(self) -> Path:
        """Make a folder that has this very package and nothing else to import from; returns it."""
        folder = self._folder / "packages"
        version = metadata.version("viviane")
        note = folder / f"viviane-{version}.dist-info" / "METADATA"
        note.parent.mkdir(parents=True)
        note.write_text(f"Metadata-Version: 2.1\nName: viviane\nVersion: {version}\n")
        (folder / "viviane").symlink_to(Path(core.__file__).parents[1])
        return folder

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.settings.host, self.settings.http_port, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> TritonError:
        return TritonError(what, where=str(self._repository), value=self.log_errors() or "see its log above")

    def _clean(self) -> None:
        if self._log_file is not None:
            self._log_file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the system has no such folder, or the region is another user's
            for region in _SHARED_MEMORY.glob(f"{self._prefix}*"):
                region.unlink(missing_ok=True)


def _check_free(host: str, port: int) -> None:
    """Refuse a port that is taken: Triton would share it with another server of its kind."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise ConfigError("cannot listen", where=f"{host}, port {port}", value=error.strerror,
                              fix="end the other server, or choose another port") from error  # fmt: skip


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
