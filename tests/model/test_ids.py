"""Ids of a bag side by side: what does not fit is left out and moves nothing else."""

from viviane.batch import Batch
from viviane.model.ids import Ids
from viviane.nn import EMPTY_ID
from viviane.schema import Schema


def test_a_bag_that_is_too_long_does_not_reach_into_the_next_row():
    schema = Schema(categorical=[{"name": "h", "num_ids": 9, "kind": "sequence", "max_length": 2}])
    batch = Batch.from_columns(schema, {"h": [[5, 6, 7, 8], [], [4], [3, 3, 8]]})
    found = Ids([("h", 2)])(batch).tolist()
    assert found == [[5, 6], [EMPTY_ID, EMPTY_ID], [4, EMPTY_ID], [3, 3]]
