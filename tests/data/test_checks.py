"""Values against the schema: whatever the width of a float, the first row that is wrong is named."""

import numpy as np
import pytest

from viviane.core.errors import DataError
from viviane.data.checks import CellLocation, check_finite, check_labels, check_weights
from viviane.schema import LabelColumn

PLACE = CellLocation("part-00000.parquet", 2, 100, "x")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(kind: type, value: float) -> None:
    numbers = np.array([0.0, 1.0, value, 2.0], kind)
    with pytest.raises(DataError, match=r"not finite\n.*row group 2, column 'x', row 102"):
        check_finite(numbers, PLACE)
    with pytest.raises(DataError, match="not finite"):
        check_weights(numbers.astype(kind), PLACE)
    with pytest.raises(DataError, match="not finite"):
        check_labels(numbers, LabelColumn(name="x", task="regression"), PLACE)
    with pytest.raises(DataError, match="row 101"):
        check_finite(numbers, PLACE, np.array([0, 1, 4]))
    check_finite(np.array([0.0, 1e300 if kind == np.float64 else 1.0], kind), PLACE)
    check_finite(np.array([], kind), PLACE)
