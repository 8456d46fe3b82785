"""Programs that fork from a process with its libraries loaded end as those that an interpreter is started for."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from warm import Warm

PROGRAM = """
import atexit, json, os, sys
own = [name for name in sys.modules if name.startswith("viviane.cli")]
atexit.register(print, "the end")
print(json.dumps([sys.argv, __name__, os.getcwd(), os.environ.get("WARM"), sys.stdin.read(), own]))
print("a word", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_finds_what_an_interpreter_gives_it(kind: str, tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {"-c": ["-c", PROGRAM], "-m": ["-m", "program"], "script": [str(tmp_path / "program.py")]}[kind]
    environment = {**os.environ, "WARM": "yes"}
    truth = subprocess.run(
        [sys.executable, *words, "1", "two"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = warm.run([*words, 1, "two"], cwd=tmp_path, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (truth.returncode, truth.stdout, truth.stderr)
    assert json.loads(found.stdout.splitlines()[0])[2:] == [str(tmp_path), "yes", "", []]


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise KeyError('a key')", 1, "KeyError: 'a key'"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
)
def test_ends_are_told(program: str, code: int, words: str, tmp_path: Path, warm: Warm) -> None:
    done = warm.run(["-c", program], cwd=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert bool(words) == bool(done.stderr)


def test_a_program_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    alone = Warm(tmp_path)
    alone.libraries = []
    with pytest.raises(subprocess.TimeoutExpired):
        alone.run(["-c", "import time; time.sleep(60)"], cwd=tmp_path, timeout=1)
    assert alone.run(["-c", "print(1)"], cwd=tmp_path).stdout == "1\n"
    alone.close()


def test_several_programs_run_at_once(tmp_path: Path, warm: Warm) -> None:
    first = warm.start(["-c", "print('first'); open('here', 'w'); import time; time.sleep(60)"], cwd=tmp_path)
    second = warm.start(["-c", "while not __import__('os').path.exists('here'): pass\nprint('second')"], cwd=tmp_path)
    assert second.wait().stdout == "second\n"
    assert first.poll() is None
    assert first.kill() == -signal.SIGKILL
    assert first.poll() == -signal.SIGKILL
