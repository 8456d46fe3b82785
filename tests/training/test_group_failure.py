"""Processes that die, stall, fail or are told to end: the job ends in time and says who it was."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from group_model import make_data

SCRIPT = Path(__file__).with_name("group_model.py")


def start(arguments, *, processes=2, restarts=0, script=SCRIPT):
    """Start torchrun in a session of its own, so that what stalls can be ended with it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
        "--max-restarts", str(restarts), str(script), *map(str, arguments),
    ]  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process, limit_s=90):
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("the job hangs") from None
    return process.returncode, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("group")
    make_data(made)
    return made


def trouble_of_two(warm, tmp_path, *arguments):
    """Start two ranks without torchrun, whose start takes longer than the test; return what rank 0 ended with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in (0, 1):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        ranks.append(warm.start([SCRIPT, *arguments], cwd=tmp_path, env=environment))
    try:
        done = ranks[0].wait(90)
    finally:
        if ranks[1].poll() is None:
            ranks[1].kill()
    return done.returncode, done.stdout + done.stderr


def test_a_killed_process_ends_the_job_by_name(folder, tmp_path, warm):
    code, output = trouble_of_two(warm, tmp_path, folder, tmp_path / "run", "kill", 1, 23)
    assert code != 0
    assert re.search(
        r"rank 1 \(process \d+ on .+\) has died; it was last seen at step \d+, and rank 0 is at step 24", output
    ), output


@pytest.mark.slow
def test_a_restarted_job_ends_in_the_same_bits(folder, tmp_path):
    code, output = finish(start([folder, tmp_path / "again", "kill", 0, 23], restarts=1))
    assert code == 0, output
    assert output.count("resuming at step ") == 1, output
    code, output = finish(start([folder, tmp_path / "whole"]))
    assert code == 0, output
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("again", "whole")]
    assert all(torch.equal(ends[0][name], part) for name, part in ends[1].items())


def test_a_stalled_process_ends_the_job_by_name(folder, tmp_path, warm):
    began = time.monotonic()
    code, output = trouble_of_two(warm, tmp_path, folder, tmp_path / "run", "stop", 1, 9)
    assert code != 0
    assert re.search(
        r"rank 1 \(process .+\) has stalled: no sign of life for \d+ s; .* rank 0 is at step 10", output
    ), output
    assert time.monotonic() - began < 60  # 6 s of silence, and the start on a busy machine


@pytest.mark.slow
def test_an_error_of_one_process_is_told_by_all(folder, tmp_path):
    code, output = finish(start([folder, tmp_path / "run", "error", 1, 12]))
    assert code != 0
    assert "rank 1 failed at step 12: the disk has gone" in output, output


@pytest.mark.slow
def test_a_process_that_is_told_to_end_ends_all_with_a_checkpoint(folder, tmp_path):
    code, output = finish(start([folder, tmp_path / "run", "term", 1, 12]))
    assert code == 0, output
    assert torch.load(tmp_path / "run" / "history.pt")["stopped"] == "interrupted"
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps[-1] in (13, 14)
