"""A process of several that is told to end while it ends with an error says the error first."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from viviane.training import environment
environment._LAST_WORDS_S = float(sys.argv[1])
interrupt = environment.Interrupt(int(sys.argv[3]))
if sys.argv[2] == "own":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
for error in ("the disk has gone", "rank 1 has died"):
    try:
        with interrupt.listening():
            raise RuntimeError(error)
    except RuntimeError:
        pass
    interrupt = environment.Interrupt(int(sys.argv[3]))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["60", "default", "2"], -signal.SIGTERM, "error: rank 1 has died\n"),
        (["0", "default", "2"], -signal.SIGTERM, ""),  # long after
        (["60", "default", "1"], -signal.SIGTERM, ""),
        (["60", "own", "2"], 7, ""),  # a handler of the program's own stays
    ],
)
def test_the_error_is_said_and_the_process_ends(arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == words
    assert done.returncode == code
