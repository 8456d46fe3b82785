"""Records of keys out of range that a recorded CUDA graph continues writing: reported once, then empty for the next."""

import pytest
import torch

from viviane.core.errors import KeyRangeError
from viviane.embedding import TableConfig
from viviane.embedding.keys import KeyOutOfRange, Violations

TABLE = TableConfig(name="x", num_rows=4, dim=1)


def found(value, origin="a batch"):
    """A violation by a key in row 2; without a value a record of none."""
    record = torch.zeros(3, dtype=torch.int64) if value is None else torch.tensor([1, 2, value])
    return KeyOutOfRange(record, origin, ("f",), (TABLE,), None)


def test_a_lasting_record_is_reported_once_and_reports_again():
    violations, lasting = Violations(), found(None, "a replay")
    violations.keep(("key", "f"), lasting)
    violations.check()
    for value in (9, -5):
        lasting.record.copy_(torch.tensor([1, 2, value]))
        with pytest.raises(KeyRangeError, match=rf"row 2 of the batch, a replay[\s\S]*{value}"):
            violations.check()
        assert lasting.record.tolist() == [0, 0, 0]
        violations.check()


def test_an_error_of_a_single_batch_empties_the_lasting_records_too():
    """What replays found before the error was raised belongs to the same failed steps, not to those after it."""
    violations, lasting = Violations(), found(7, "a replay")
    violations.keep(("key", "f"), lasting)
    violations.append(found(6))
    violations.append(found(None))
    with pytest.raises(KeyRangeError, match=r"a batch[\s\S]*6"):
        violations.check()
    assert violations.num_lookups == 0
    assert lasting.record.tolist() == [0, 0, 0]
    violations.check()


def test_a_record_stays_by_name_and_is_written_in_place():
    violations = Violations()
    room = violations.words_for(("key", "f"), torch.device("cpu"))
    assert violations.words_for(("key", "f"), torch.device("cpu")) is room
    assert violations.words_for(("key", "g"), torch.device("cpu")) is not room
    for value in (4, 5):
        violations.keep(("key", "f"), found(value))
    assert [one.tolist() for one in violations.lasting_records()] == [[1, 2, 5]]
