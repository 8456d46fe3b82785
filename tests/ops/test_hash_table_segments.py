"""Full segments of the index, and how many keys each segment is said to have, against homes that are counted from 0."""

import pytest
import torch

from viviane.ops.hash_table import make_index, stamp_of
from viviane.ops.hash_table.cpu_slots import BASE, LINE_BIT, SEGMENT_BIT, SEGMENT_KEYS, SPLIT
from viviane.ops.key_rows import mix

LINES = 4  # of a segment; five keys each


def keys_at(segment, line, count, *, bits=8):
    """Return keys whose segment has these lowest bits, however often segments are split, and whose home is `line`."""
    some = torch.arange(60_000)
    mixed = mix(some)
    here = (mixed >> SEGMENT_BIT) & ((1 << bits) - 1) == segment
    return some[here & ((mixed >> LINE_BIT) & (LINES - 1) == line)][:count]


def insert(index, keys):
    rows = index.find(keys)
    return index.insert(keys, rows, (rows < 0).nonzero().squeeze(1), stamp_of(0, 1))


def counted(index, keys):
    """Return how many of the keys belong to each segment, by the formula in the module's text."""
    base, split = int(index._head[BASE]), int(index._head[SPLIT])
    segment = (mix(keys) >> SEGMENT_BIT) & (2 * base - 1)
    segment -= base * (segment >= base + split)
    return torch.bincount(segment, minlength=base + split).tolist()


@pytest.mark.parametrize("line", range(LINES))
def test_a_search_reaches_the_last_line_of_a_full_segment(line):
    """All keys have one home: they fill the segment round its end, and the last five lie in the line before it."""
    keys = keys_at(0, line, 21)
    assert len(keys) == 21
    index = make_index(21, segment_lines=LINES)
    assert insert(index, keys[:20]).complete
    assert torch.equal(index.find(keys[:20]), torch.arange(20))
    assert index.find(keys[20:]).tolist() == [-1]
    index.erase(keys[15:16])
    assert index.find(keys[:20]).tolist() == [*range(15), -1, *range(16, 20)]


@pytest.mark.parametrize("order", ["near", "far", "mixed"])
def test_segments_know_how_many_keys_they_have(order):
    """After each key and each split; keys that leave go to line 0 of the new segment, or to any."""
    stay, leave = (torch.cat([keys_at(segment, line, 4, bits=6) for line in range(LINES)]) for segment in (0, 1))
    some = torch.arange(60) * 7919
    keys = {"near": torch.cat([stay[:9], leave]), "far": torch.cat([leave, stay]), "mixed": some}[order]
    index = make_index(100, segment_lines=LINES)
    for n, key in enumerate(keys, 1):
        insert(index, key.view(1))
        found = index._memory[SEGMENT_KEYS][: index.num_slots // (5 * LINES)].tolist()
        assert found == counted(index, keys[:n])
    assert index.num_slots > 5 * LINES
    assert torch.equal(index.find(keys), torch.arange(len(keys)))
    index.erase(keys[::2])
    found = index._memory[SEGMENT_KEYS][: index.num_slots // (5 * LINES)].tolist()
    assert found == counted(index, keys[1::2])
