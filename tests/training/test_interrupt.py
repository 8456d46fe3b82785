"""What a run says to signals: that it heard; and of several processes, one that ends with an error says that first."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from warm import Warm

LAST_WORDS = """
import io, os, signal, sys, time
from viviane.training import environment
environment._LAST_ERROR_S = float(sys.argv[1])
interrupt = environment.Interrupt(0, int(sys.argv[3]))
if sys.argv[2] == "own":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
for error in ("the disk has gone", "rank 1 has died"):
    try:
        with interrupt.listening():
            raise RuntimeError(error)
    except RuntimeError:
        pass
    interrupt = environment.Interrupt(0, int(sys.argv[3]))
sys.stderr = io.StringIO()  # as torch has it while it prints an error
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
def test_the_error_is_said_and_the_process_ends(
    arguments: list[str], code: int, words: str, warm: Warm, tmp_path: Path
) -> None:
    done = warm.run(["-c", LAST_WORDS, *arguments], cwd=tmp_path)
    assert done.stderr == words
    assert done.returncode == code


HEARD = """
import os, signal, sys
from viviane.training.environment import Interrupt
with Interrupt(int(sys.argv[1]), 2).listening() as interrupt:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    print(interrupt.asked)
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_a_program_without_logging_of_its_own_hears_once_that_it_was_asked_to_end(
    rank: int, times: int, warm: Warm, tmp_path: Path
) -> None:
    done = warm.run(["-c", HEARD, str(rank)], cwd=tmp_path)
    assert done.stdout == "True\n"
    words = "interrupted: ending after this step; press Ctrl-C again to stop at once\n"
    assert done.stderr.count(words) == times
    assert "KeyboardInterrupt" in done.stderr  # the second Ctrl-C, or the first after SIGTERM, ends it at once
