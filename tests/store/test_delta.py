"""The codec of deltas, on what publishers write and on what may arrive instead."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import ConfigError, StoreError, VivianeError
from viviane.ops.crc32c import crc32c
from viviane.ops.crc32c.cpu import update_by_tables
from viviane.ops.crc32c.reference import crc32c as crc32c_bit_by_bit
from viviane.store.delta import (
    MAX_DELTA_BYTES,
    Delta,
    DeltaHeader,
    DeltaKind,
    decode_delta,
    most_rows,
    partition_of,
    split_rows,
)

HEAD = DeltaHeader("ctr", "item", generation=3, partition=1, seq=8, prev_seq=7, num_partitions=4, time_us=12)


def rows_of(count: int, width: int = 16) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, width), dtype=np.uint8)


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 3))
def test_crc32c_is_that_of_the_bit_by_bit_reference(data: bytes, cut: int, shift: int) -> None:
    part = memoryview(b"x" * shift + data)[shift:]  # any alignment
    assert crc32c(part) == crc32c_bit_by_bit(data)
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c_bit_by_bit(data)
    whole = np.frombuffer(data or b"-", np.uint8)  # processors without the instruction use tables
    assert update_by_tables(whole.ctypes.data, len(data), 0) == crc32c_bit_by_bit(data)


names = st.text(min_size=1, max_size=20).filter(lambda text: len(text.encode("utf-8", "replace")) < 255)


@settings(max_examples=60)
@given(
    names.filter(str.isprintable), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(0, 70),
    st.integers(1, 2**62), st.integers(0, 2**31),
)  # fmt: skip
def test_a_delta_comes_back_as_it_was(table: str, keys: list[int], width: int, seq: int, step: int) -> None:
    head = replace(HEAD, table=table, seq=seq, prev_seq=seq - 1, last_step=step)
    made = Delta(head, np.array(keys, np.int64), rows_of(len(keys), width))
    data = made.encode()
    found = decode_delta(data)
    assert found.header == head
    assert np.array_equal(found.keys, made.keys)
    assert np.array_equal(found.rows, made.rows)
    assert len(data) % 64 == 0


@settings(max_examples=120)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, change: int) -> None:
    data = bytearray(Delta(HEAD, np.arange(5), rows_of(5)).encode())
    data[place % len(data)] ^= change
    with pytest.raises(StoreError):
        decode_delta(bytes(data))


@settings(max_examples=40)
@given(st.integers(0, 400))
def test_any_other_length_is_refused(length: int) -> None:
    data = Delta(HEAD, np.arange(5), rows_of(5)).encode()
    if length != len(data):
        with pytest.raises(StoreError):
            decode_delta((data + bytes(200))[:length])


@settings(max_examples=100)
@given(st.binary(max_size=400))
def test_any_bytes_give_a_named_error(data: bytes) -> None:
    with pytest.raises(VivianeError):
        decode_delta(b"VVDELTA1" + data)


def resealed(data: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    struct.pack_into("<I", changed, 8, crc32c(bytes(changed[12:])))
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(16, "<I", 9), (20, "<I", 4), (28, "<H", 1), (48, "<q", 0), (56, "<q", 8), (56, "<q", -1), (96, "<I", 2**31),
     (100, "<I", 30), (100, "<I", 2**31), (104, "<H", 0), (104, "<H", 65535), (12, "<I", 64)],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused_under_a_right_checksum(at: int, form: str, value: int) -> None:
    data = Delta(HEAD, np.arange(5), rows_of(5)).encode()
    with pytest.raises(StoreError):
        decode_delta(resealed(data, at, form, value))


def test_rows_of_another_table_and_names_that_are_no_text_are_refused() -> None:
    data = Delta(HEAD, np.arange(5), rows_of(5)).encode()
    with pytest.raises(StoreError, match="contradicts"):
        decode_delta(data, row_bytes=24)
    with pytest.raises(StoreError, match="no text"):
        decode_delta(resealed(data, 128, "<B", 0xFF))


def test_what_cannot_be_a_delta_is_not_written() -> None:
    with pytest.raises(ConfigError, match="too large"):
        Delta(HEAD, np.arange(3000), rows_of(3000, 512)).encode()
    with pytest.raises(ConfigError, match="name"):
        Delta(replace(HEAD, model="m" * 256), np.arange(1), rows_of(1)).encode()
    with pytest.raises(ConfigError, match="row for each key"):
        Delta(HEAD, np.arange(2), rows_of(1)).encode()
    with pytest.raises(ConfigError, match="out of range"):
        Delta(replace(HEAD, seq=2**63), np.arange(1), rows_of(1)).encode()


@settings(max_examples=20)
@given(st.integers(0, 5000), st.sampled_from([8, 64, 512, 4096]))
def test_rows_are_cut_into_numbered_deltas(count: int, width: int) -> None:
    rows = np.zeros((count, width), np.uint8)
    deltas = list(split_rows(HEAD, np.arange(count), rows))
    assert [one.header.seq for one in deltas] == list(range(8, 8 + len(deltas)))
    assert sum(len(one.keys) for one in deltas) == count
    assert all(len(one.encode()) < 1_000_000 <= MAX_DELTA_BYTES for one in deltas)
    assert all(len(one.keys) == most_rows(width) for one in deltas[:-1])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 1000))
def test_partitions_are_in_range_and_a_function_of_the_key(keys: list[int], count: int) -> None:
    found = partition_of(np.array(keys), count)
    assert ((found >= 0) & (found < count)).all()
    assert found[0] == partition_of(np.array(keys[:1]), count)[0]


def test_erased_keys_have_no_rows() -> None:
    gone = Delta(replace(HEAD, kind=DeltaKind.ERASED), np.arange(4), np.empty((4, 0), np.uint8))
    assert decode_delta(gone.encode()).rows.shape == (4, 0)
    with pytest.raises(StoreError):
        decode_delta(Delta(replace(HEAD, kind=DeltaKind.ERASED), np.arange(4), rows_of(4)).encode())
