"""The host control block on a GPU: every row is read and answered in order, in host memory."""

import pytest
import torch

from viviane.ops.host_control_block import gpu, read_row, write_back


def of_host(rows, device):
    return rows.pin_memory() if device.type == "cuda" else rows


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 1000])
def test_the_row_of_the_next_step_is_read(device, width):
    rows = of_host(torch.arange(3 * width).view(3, width) - 2**40, device)
    words = torch.full((width + 1,), 7, device=device)
    for step in (0, 1, 2, 3, 2**33 + 1):
        gpu.read_row(rows, torch.tensor([step], device=device), words[:width])
        assert torch.equal(words[:width].cpu(), rows[step % 3])
        assert words[width] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_answers_in_its_row_and_where_it_was_told(device, dtype):
    losses = torch.zeros(3, dtype=dtype, device=device)
    rows = of_host(torch.zeros(2, 6, dtype=torch.int64), device)
    held = torch.arange(5, device=device) - 2**40
    truth = torch.zeros_like(rows)
    for step in range(1, 5):
        words = torch.tensor([losses[1:].data_ptr(), 3], device=device)
        loss, count = torch.tensor(step / 4, dtype=dtype, device=device), torch.tensor([step], device=device)
        signal = torch.tensor([10.0 * step], device=device) if step != 3 else None
        gpu.write_back(words, loss, held, rows, count, signal)
        truth[(step - 1) % 2, :5] = held.cpu()
        truth[(step - 1) % 2, 5] = 10 * step if step != 3 else 10
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(rows, truth)
        assert losses.tolist() == [0, step / 4, 0]
        held += 1


def test_in_a_graph_the_device_reads_what_the_host_has_written_since(device):
    if device.type != "cuda":
        pytest.skip("a graph is of a GPU")
    rows, told = (torch.zeros(3, width, dtype=torch.int64, pin_memory=True) for width in (300, 301))
    count, words, loss = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(300).long().to(device), None
    read_row(rows, count, words)
    target = torch.zeros((), device=device)
    rows[:, 0] = target.data_ptr()
    graph = torch.cuda.CUDAGraph()
    read_row(rows, count, words)
    write_back(words, words[1].float(), words, told, count + 1)
    with torch.cuda.graph(graph):
        read_row(rows, count, words)
        count += 1
        loss = words[1].float()
        write_back(words, loss, words, told, count)
    losses, ends = [], []
    for step in range(200):
        if step >= 3:
            ends[step - 3].synchronize()
            assert told[step % 3, 1:].tolist() == [step - 3] * 299 + [0]
        loss = torch.empty((), device=device)
        rows[step % 3, 0] = loss.data_ptr()
        rows[step % 3, 1:] = step
        graph.replay()
        losses.append(loss)
        ends.append(torch.cuda.Event())
        ends[-1].record()
    assert torch.stack(losses).tolist() == list(range(200))
