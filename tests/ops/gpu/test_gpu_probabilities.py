"""Probabilities and the flag beside them, by one launch."""

import pytest
import torch

from viviane.ops.dispatch import use_implementation
from viviane.ops.probabilities import probabilities, reason, write_probabilities
from viviane.ops.probabilities.reference import write_probabilities as plain

TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1500, 1), (33, 3)])
def test_probabilities(device, shape, dtype):
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 8).to(dtype).to(device)
    logits[0, 0] = -1000.0
    for shift in (0.0, 1.5):
        truth = torch.empty(shape, dtype=torch.float32, device=device)
        plain(logits, truth, shift, (), None)
        with use_implementation("gpu"):
            assert reason(logits) is None
            found = probabilities(logits, shift)
            columns = probabilities(logits.t(), shift).t()
        torch.testing.assert_close(found, truth, atol=0, rtol=2e-5)  # of e^-50 and its like
        assert torch.equal(columns, found)


def test_a_record_that_is_set(device):
    out, flag = torch.empty(2, device=device), torch.full((1,), 9, device=device)
    records = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(3)]
    with use_implementation("gpu"):
        write_probabilities(torch.zeros(2, device=device), out, records=records, flag=flag)
        assert (out.tolist(), flag.item()) == ([0.5, 0.5], 0)
        records[1][0] = 1 << 40
        write_probabilities(torch.zeros(2, device=device), out, records=records, flag=flag)
        assert flag.item()
        write_probabilities(torch.zeros(2, device=device), out, flag=flag)
        assert not flag.item()
    assert "gradient" in reason_with_gradient(device)


def reason_with_gradient(device):
    with use_implementation("gpu"):
        return reason(torch.zeros(2, device=device, requires_grad=True))
