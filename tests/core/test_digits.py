"""Texts of digits that Python makes no number of are refused where numbers stand in texts."""

import pytest

from viviane.cli.train_config import change_settings
from viviane.core.digits import number_in
from viviane.core.errors import ConfigError
from viviane.etl.splits import parse_split
from viviane.metrics.registry import MetricName

# A superscript and an Arabic digit; more digits than `int` takes; a sign too many.
NO_NUMBERS = ["\u00b2", "\u0661", "9" * 5000, "--5", "-", "+5", "1_0", "5 ", ""]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_no_numbers(text: str) -> None:
    assert number_in(text) is None
    assert number_in(text.encode()) is None
    with pytest.raises(ConfigError, match="not a valid metric name"):
        MetricName.parse(f"recall@{text}")
    with pytest.raises(ConfigError, match="no such element of the list"):
        change_settings({"layers": [1, 2]}, f"layers.{text}=3")


def test_numbers() -> None:
    assert number_in("007") == 7
    assert number_in(b"999999999999999999") == 10**18 - 1
    assert MetricName.parse("recall@20").k == 20
    assert parse_split("time:when:valid@-5,test@7").starts == {"valid": -5, "test": 7}
    assert parse_split("time:when:test@--5").starts == {"test": "--5"}  # a text, of which no number was made
