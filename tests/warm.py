"""Python programs in processes of their own that are forked from one which has imported the large libraries.

Each of them starts as `python ...` does, without the seconds that importing torch, our package and others takes. What a
fresh interpreter imports, and in which order, tests/house checks with `python` itself.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = [
    *("torch", "torch._dynamo", "torch.distributed", "numpy", "numba", "pyarrow.parquet", "pyarrow.dataset"),
    *("pydantic.json_schema", "pydantic.types", "safetensors.torch", "typer", "rich.table", "rich.progress", "ibis"),
    "tests.preloaded",
]
ROOT = Path(__file__).parents[1]
SERVER = """
import atexit, gc, importlib, importlib.util, json, os, runpy, sys, threading
for name in sys.argv[1:]:
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)
gc.collect()
gc.freeze()  # what is there lives on: a collection in a program would copy its pages
def start(task):
    for number, path in enumerate((os.devnull, task["out"], task["err"])):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = open(0)
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    kind, *words = task["words"]
    if kind == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.path[0], sys.argv[:] = os.getcwd(), words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv[:] = os.path.dirname(os.path.abspath(kind)), [kind, *words]
        runpy.run_path(kind, run_name="__main__")
def end(task):
    code = 0
    try:
        start(task)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # What an interpreter does at its end, but for freeing all that was loaded.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
while line := sys.stdin.readline():
    task = json.loads(line)
    if "poll" in task:
        ended, status = os.waitpid(task["poll"], 0 if task["wait"] else os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if ended else "", flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        end(task)
"""


class Warm:
    """The process that waits with its libraries loaded.

    Args:
        folder: for what programs print.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self.libraries = LIBRARIES
        self._server: subprocess.Popen[bytes] | None = None

    def run(
        self, words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Do what subprocess.run([sys.executable, *words], capture_output=True, text=True) does."""
        if sys.platform == "win32":
            words = [sys.executable, *words]
            return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        return self.start(words, cwd=cwd, env=env).wait(timeout)

    def start(self, words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None) -> "Started":
        """Start a program and return at once, as subprocess.Popen does; not on Windows."""
        if self._server is None:
            command = [sys.executable, "-c", SERVER, *self.libraries]
            pipe, single = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=single, start_new_session=True, cwd=ROOT
            )
        self._count += 1
        out, err = (self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        out.write_text("")
        err.write_text("")
        environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        task = {"words": [str(word) for word in words], "folder": str(cwd), "environment": environment}
        return Started(self, words, int(self.ask({**task, "out": str(out), "err": str(err)}, 240)), out, err)

    def ask(self, task: Mapping[str, Any], timeout: float) -> bytes:
        """Send the process a line, and return its answer; None of it within `timeout` seconds ends the process."""
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(task).encode() + b"\n")
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            self.close()
            raise subprocess.TimeoutExpired(str(task), timeout)
        answer = self._server.stdout.readline()
        assert answer, "the process that programs are forked from has ended"
        return answer.strip()

    def close(self) -> None:
        """End the process, and the programs that it runs."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            with self._server:
                self._server = None


class Started:
    """A program that runs.

    Attributes:
        pid: its process.
        code: its exit code; None while it runs, or nobody has looked.
    """

    def __init__(self, warm: Warm, words: Sequence[Any], pid: int, out: Path, err: Path) -> None:
        self._warm, self._words, self._out, self._err = warm, words, out, err
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.code is None and (answer := self._warm.ask({"poll": self.pid, "wait": False}, 60)):
            self.code = int(answer)
        return self.code

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait until the program ends; after `timeout` seconds all programs are ended, and an error is raised."""
        if self.code is None:
            try:
                self.code = int(self._warm.ask({"poll": self.pid, "wait": True}, timeout))
            except subprocess.TimeoutExpired:
                words = [str(word) for word in self._words]
                raise subprocess.TimeoutExpired(words, timeout, self._out.read_bytes()) from None
        done = subprocess.CompletedProcess(self._words, self.code, self._out.read_text(), self._err.read_text())
        self._out.unlink()
        self._err.unlink()
        return done

    def kill(self) -> int:
        """End the program where it stands, and return its exit code."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait().returncode
