from __future__ import annotations

import numpy as np
import plain_norm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.ops.norm_records import NormLayout, NormRecords, Problem, norm_records, pack_records, skip_records

LAYOUTS = st.builds(
    NormLayout,
    num_numbers=st.integers(0, 3),
    num_slots=st.integers(0, 3),
    key_bytes=st.sampled_from([4, 8]),
    check_sum=st.booleans(),
)


@st.composite
def records(draw: st.DrawFn) -> tuple[NormLayout, int, np.ndarray, np.ndarray, np.ndarray]:
    layout, count = draw(LAYOUTS), draw(st.integers(0, 6))
    flat = draw(st.lists(st.integers(0, 3), min_size=count * layout.num_slots, max_size=count * layout.num_slots))
    lengths = np.array(flat, np.int32).reshape(layout.num_slots, count)
    largest = 2**32 - 1 if layout.key_bytes == 4 else 2**63 - 1
    nnz = int(lengths.sum())
    keys = np.array(draw(st.lists(st.integers(0, largest), min_size=nnz, max_size=nnz)), np.int64)
    numbers = np.random.default_rng(nnz).normal(size=(count, layout.num_numbers)).astype(np.float32)
    return layout, count, numbers, lengths, keys


@settings(max_examples=80, deadline=None)
@given(drawn=records(), before=st.integers(0, 5))
def test_records_come_apart_as_they_were_put_together(drawn: tuple, before: int) -> None:
    layout, count, numbers, lengths, keys = drawn
    packed = pack_records(numbers, lengths, keys, layout)
    data = np.concatenate([np.full(before, 255, np.uint8), packed])
    found = norm_records(data, before, count, layout)
    plain = plain_norm.norm_records(data, before, count, layout)
    assert isinstance(found, NormRecords)
    assert isinstance(plain, NormRecords)
    assert found.end == plain.end == skip_records(data, before, count, layout) == len(data)
    for one, other, truth in (
        (found.numbers, plain.numbers, numbers),
        (found.lengths, plain.lengths, lengths),
        (found.keys, plain.keys, keys),
    ):
        assert one.tobytes() == other.tobytes() == truth.tobytes()


@settings(max_examples=200, deadline=None)
@given(drawn=records(), damage=st.data())
def test_damage_is_found_where_the_plain_reader_finds_it(drawn: tuple, damage: st.DataObject) -> None:
    layout, count, numbers, lengths, keys = drawn
    data = pack_records(numbers, lengths, keys, layout)
    for _ in range(damage.draw(st.integers(0, 2))):
        if len(data):
            data[damage.draw(st.integers(0, len(data) - 1))] = damage.draw(st.integers(0, 255))
    data = data[: damage.draw(st.integers(0, len(data)))]
    found, plain = (read(data, 0, count, layout) for read in (norm_records, plain_norm.norm_records))
    skipped = skip_records(data, 0, count, layout)
    if isinstance(plain, Problem):
        assert isinstance(found, Problem)
        assert isinstance(skipped, Problem)
        assert (found.code, found.record) == (skipped.code, skipped.record)
        assert found.record == plain.record
    else:
        assert isinstance(found, NormRecords)
        assert skipped == plain.end
        assert found.keys.tolist() == plain.keys.tolist()


@pytest.mark.parametrize("size", [0, 1, 7, 63, 200])
def test_random_bytes_never_crash(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(300):
        data = random.integers(0, 256, size).astype(np.uint8)
        layout = NormLayout(1, 2, 8, bool(random.integers(0, 2)))
        found = norm_records(data, 0, 3, layout)
        assert isinstance(found, Problem) or found.end <= size
