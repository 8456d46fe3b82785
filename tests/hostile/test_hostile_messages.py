"""Malformed messages of a stream are decoded, or refused with their position; they do not end the process."""

import io
import random

import pyarrow as pa
import pytest

from viviane.core.errors import DataError
from viviane.data.streaming.messages import BadMessageError, MessageDecoder
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "y"}], dense=[{"name": "x"}, {"name": "X"}],
    categorical=[{"name": "c", "num_ids": 9}, {"name": "b", "num_ids": 9, "kind": "sequence", "max_length": 3}],
)  # fmt: skip
GOOD = b'{"y": 1, "x": 0.5, "X": 0.25, "c": 3, "b": [3, 4]}'
REFUSED = {
    "null": b"null",  # Arrow's parser ended the process
    "a number": b"1",
    "a list": b"[" + GOOD + b"]",
    "blank": b" \n",
    "two objects": GOOD + GOOD,
    "half an object": GOOD[:-1],
    "the rest of one": b"}",
    "brackets in lists": b'{"z": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "brackets in objects": b'{"z":' * 100_000 + b"1" + b"}" * 100_000,
    "a key twice": GOOD.replace(b'"x"', b'"X"'),
    "a fraction": GOOD.replace(b"3,", b"3.5,"),
}


def stream(table: pa.Table) -> bytes:
    content = io.BytesIO()
    with pa.ipc.new_stream(content, table.schema) as writer:
        writer.write_table(table)
    return content.getvalue()


def columns() -> pa.Table:
    return pa.table({
        "y": pa.array([1.0], pa.float32()), "x": pa.array([0.5], pa.float32()), "X": pa.array([0.25], pa.float32()),
        "c": pa.array([3], pa.int32()), "b": pa.array([[3, 4]], pa.list_(pa.int32())),
    })  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_json_that_is_no_row_is_refused_with_its_place(kind: str) -> None:
    decoder = MessageDecoder("json", SCHEMA)
    with pytest.raises(BadMessageError) as error:
        decoder.decode([GOOD, REFUSED[kind], GOOD])
    assert error.value.index == 1


def test_an_object_more_and_a_blank_message_are_not_two_rows() -> None:
    """The second row was taken for that of the blank message, and no message was refused."""
    decoder = MessageDecoder("json", SCHEMA)
    for values, index in (([GOOD + GOOD, b" "], 0), ([b" ", GOOD + GOOD], 0), ([GOOD[:9], GOOD[9:]], 0)):
        with pytest.raises(BadMessageError) as error:
            decoder.decode(values)
        assert error.value.index == index


def test_names_that_differ_by_case_stay_apart() -> None:
    for kind, message in (("json", GOOD), ("arrow", stream(columns()))):
        view, _ = MessageDecoder(kind, SCHEMA).decode([message])
        assert view.dense[0][1].tolist() == [[0.5, 0.25]]


def test_arrow_without_a_column_or_with_one_twice() -> None:
    decoder, table = MessageDecoder("arrow", SCHEMA), columns()
    twice = pa.table([*table.columns, table["x"]], names=[*table.column_names, "x"])
    for bad, what in ((table.drop(["x"]), "missing"), (twice, "twice")):
        with pytest.raises(BadMessageError, match=what) as error:
            decoder.decode([stream(table), stream(bad)])
        assert error.value.index == 1


def test_arrow_messages_of_several_forms_are_decoded_together() -> None:
    """They ended the job with a raw error of Arrow's, which named no message."""
    table = columns()
    others = [table.append_column("z", pa.array([1])), table.select(table.column_names[::-1]), table.slice(0, 0)]
    view, counts = MessageDecoder("arrow", SCHEMA).decode([stream(one) for one in (table, *others, table)])
    assert counts.tolist() == [1, 1, 1, 0, 1]
    assert view.dense[0][1].tolist() == [[0.5, 0.25]] * 4


def test_damaged_arrow_is_refused() -> None:
    decoder, whole = MessageDecoder("arrow", SCHEMA), stream(columns())
    rng, refused = random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decoder.decode([bytes(data)])
        except DataError:
            refused += 1
    assert refused > 200
