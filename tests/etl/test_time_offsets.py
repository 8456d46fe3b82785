"""Texts of times with an offset from UTC, beside times without one."""

from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.etl import EtlConfig, run
from viviane.etl.cells import convert
from viviane.etl.columns import InputColumn

TIME = InputColumn(name="t", type="timestamp")


def found(texts, column=TIME):
    values, bad = convert(pa.array(texts, pa.string()), column, ("",))
    return values.to_pylist(), [cell.row for cell in bad]


@given(
    moments=st.lists(
        st.tuples(
            st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),
            st.integers(-12 * 60, 14 * 60),
            st.sampled_from(["+hh:mm", "+hhmm", "none", "Z", " UTC", "missing"]),
            st.sampled_from("T "),
        ),
        max_size=8,
    )
)
@settings(deadline=None, max_examples=80)
def test_offsets_become_utc_and_other_times_stay(moments):
    texts, expected = [], []
    for moment, minutes, form, between in moments:
        text = moment.isoformat(between)
        if form == "missing":
            texts.append(None)
            expected.append(None)
        elif form.startswith("+"):
            zoned = moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))
            written = zoned.isoformat(between)
            texts.append(written if form == "+hh:mm" else written[:-3] + written[-2:])
            expected.append(zoned.astimezone(UTC).replace(tzinfo=None))
        else:
            texts.append(text if form == "none" else text + form)
            expected.append(moment)
    assert found(texts) == (expected, [])


def test_hours_alone_are_an_offset_and_a_date_has_none():
    texts = ["2024-01-01T05:00:00.25+02", "2024-01-01 05:00-01:00", "2024-05-31", "2024-01-01"]
    assert found(texts)[0] == [
        datetime(2024, 1, 1, 3, 0, 0, 250_000), datetime(2024, 1, 1, 6), datetime(2024, 5, 31), datetime(2024, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["2024-01-01T05:00:00+99:00", "2024-13-01 05:00:00+01:00", "2024-01-01 05:00:00+1", "05:00+01:00", "+01:00"]
)
def test_what_is_no_time_is_a_bad_cell(text):
    good = "2024-01-01T05:00:00+01:00"
    assert found([good, text, None, good]) == ([datetime(2024, 1, 1, 4), None, None, datetime(2024, 1, 1, 4)], [1])


def test_a_file_with_both_forms(tmp_path):
    rows = ["1,2024-01-01T00:30:00+01:00", "0,2023-12-31 23:30:00", "1,2023-12-31T18:00:00-05:30"]
    (tmp_path / "in.csv").write_text("y,t\n" + "".join(f"{row}\n" for row in rows))
    config = EtlConfig.model_validate(
        {
            "input": {"columns": [{"name": "y", "type": "int"}, {"name": "t", "type": "timestamp"}]},
            "derived": [{"type": "date_part", "name": "hour", "source": "t", "part": "hour"}],
            "labels": [{"name": "y"}],
            "categorical": [{"name": "hour", "encoding": {"type": "raw"}}],
        }
    )
    run(config, tmp_path / "in.csv", tmp_path / "out")
    (part,) = (tmp_path / "out" / "train").glob("*.parquet")
    assert pq.read_table(part)["hour"].to_pylist() == [23, 23, 23]
