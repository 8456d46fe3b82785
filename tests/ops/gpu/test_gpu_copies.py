"""Copies on a GPU: the same bits as torch's, of any size, type and address, and again from other tensors."""

import pytest
import torch

from viviane.ops.copies import gpu

SIZES = [0, 1, 3, 4, 5, 4095, 4096, 4097, 9001]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_cast(device, given, wanted):
    for size in SIZES:
        rng = torch.Generator().manual_seed(size)
        source = (100 * torch.randn(size + 1, generator=rng)).to(given)
        source[: size // 2 : 2] = torch.inf
        source = source.to(device)[1:]  # not at a multiple of 16 bytes
        target = torch.zeros(size, dtype=wanted, device=device)
        gpu.cast(target, source)
        if device.type == "cuda" or wanted != torch.bfloat16:
            assert torch.equal(target, source.to(wanted)), size
        else:  # Triton's interpreter cuts digits off in place of rounding
            torch.testing.assert_close(target.float(), source, rtol=2**-7, atol=0)


def draw(device, seed, apart):
    """Tensors of several types and sizes, each a view of a larger one from its element `apart` on."""
    rng = torch.Generator().manual_seed(seed)
    kinds = [torch.int32, torch.float32, torch.int64]
    wholes = [torch.randint(-(2**31), 2**31, (size + 8,), generator=rng) for size in SIZES]
    return [one.to(kinds[i % 3]).to(device)[apart : apart + size] for i, (one, size) in enumerate(zip(wholes, SIZES))]  # noqa: B905


@pytest.mark.parametrize("apart", [0, 1, 4])
def test_targets_are_filled_from_one_set_of_tensors_after_another(device, apart):
    targets = [torch.zeros_like(one) for one in draw(device, 0, 0)]
    beyond = torch.full((8,), 7, dtype=torch.int32, device=device)
    refill = gpu.Launch([*targets, beyond[:5]])
    assert refill.width == len(targets) + 1
    for seed in range(5):
        sources = [*draw(device, seed, apart), torch.full((5,), seed, dtype=torch.int32, device=device)]
        words = refill.words(sources)
        refill(torch.tensor(words, dtype=torch.int64, device=device))
        assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=False))
        assert beyond.tolist() == [seed] * 5 + [7] * 3
        lies_well = [not one.data_ptr() % 16 for one in sources]
        assert [word == one.data_ptr() for word, one in zip(words, sources, strict=True)] == lies_well


def test_what_does_not_lie_as_needed_is_copied_before(device):
    whole = torch.zeros(9, dtype=torch.int32, device=device)
    targets = [
        torch.zeros(6, dtype=torch.int32, device=device), torch.zeros(2, 3, device=device), whole[1:],
        torch.zeros(3, dtype=torch.float16, device=device),
    ]  # fmt: skip
    refill = gpu.Launch(targets)
    assert refill.width == 2
    sources = [
        torch.arange(6, dtype=torch.int32, device=device), torch.arange(6.0, device=device).view(3, 2).t(),
        torch.arange(8, dtype=torch.int32, device=device), torch.arange(3.0, device=device).half(),
    ]  # fmt: skip
    words = refill.words(sources)
    assert whole.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert not targets[0].any()
    assert not targets[1].any()
    refill(torch.tensor(words, dtype=torch.int64, device=device))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    sources = [one + 1 for one in sources]
    refill(torch.tensor(refill.words(sources), dtype=torch.int64, device=device))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
