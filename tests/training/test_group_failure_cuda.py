"""A process that dies or stalls while another's GPU waits in a kernel for its memory: the job ends and names it."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_fixed_sizes_of_fit as fixed
from test_group_failure import finish, start

SCRIPT = Path(__file__).with_name("recorded_group.py")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kill", r"rank 1 \(process \d+ on .+\) has died; it was last seen at step \d+, and rank 0 is at step \d+"),
        ("stop", r"rank 1 \(process .+\) has stalled: no sign of life for \d+ s; .* rank 0 is at step \d+"),
    ],
)
def test_trouble_of_a_peer_ends_the_job_by_name(what, words, tmp_path):
    fixed.make_data(tmp_path)
    began = time.monotonic()
    code, output = finish(start([tmp_path, what, 1, 13], script=SCRIPT))
    assert code != 0
    assert "rank 0 writes to its peer" in output, output
    assert "the fit has ended" not in output, output
    assert re.search(words, output), output
    assert time.monotonic() - began < 80  # the start of two processes with a GPU each, and 6 s of silence
