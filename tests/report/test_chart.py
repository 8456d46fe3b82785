import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from viviane import report
from viviane.report.chart import Line, bar_chart, line_chart, line_picture, share_bar
from viviane.report.panels import WHOLE
from viviane.report.scale import Scale, short, span, thin


def parse(svg_with_legend: str) -> ET.Element:
    return ET.fromstring(f"<div>{svg_with_legend}</div>")


def test_linear_ticks_are_round_and_inside():
    assert Scale(0.493, 0.812, 0, 1).ticks() == [0.5, 0.6, 0.7, 0.8]


def test_log_ticks_are_powers_of_ten():
    assert Scale(0.5, 2e6, 0, 1, log=True).ticks(10) == [1, 10, 100, 1e3, 1e4, 1e5, 1e6]


def test_log_ticks_of_a_narrow_range_are_round_values_between_the_powers():
    assert Scale(10, 207, 0, 1, log=True).ticks() == [10, 20, 50, 100, 200]
    assert Scale(0.03, 0.12, 0, 1, log=True).ticks() == [0.04, 0.06, 0.08, 0.1, 0.12]
    assert Scale(42, 58, 0, 1, log=True).ticks() == [45, 50, 55]


@given(st.floats(1e-6, 1e6), st.floats(1.05, 1e9), st.integers(3, 9))
@example(379847.0, 105410970.0, 3)
def test_log_ticks_lie_in_the_range_and_there_are_enough(low, factor, count):
    ticks = Scale(low, low * factor, 0, 100, log=True).ticks(count)
    assert all(low * (1 - 1e-6) - 1e-11 <= tick <= low * factor * (1 + 1e-6) + 1e-11 for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert 1 <= len(ticks) <= max(count + 2, 8)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 9))
def test_ticks_lie_in_the_range_and_are_not_too_many(low, width, count):
    scale = Scale(low, low + width, 0, 100)
    ticks = scale.ticks(count)
    slack = 1e-6 * (abs(low) + width)  # ticks are rounded to 12 digits
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    assert len(ticks) <= count + 2


def test_span_of_nothing_one_value_and_nonfinite_values():
    assert span([]) == (0.0, 1.0)
    assert span([0.0]) == (-1.0, 1.0)
    assert span([math.nan, math.inf, 1.0, 2.0], pad=0.5) == (0.5, 2.5)
    assert span([-5.0, 0.0], log=True) == (1.0, 10.0)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3000))
def test_thinning_keeps_both_ends_and_both_extremes(values):
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin(points, limit=50)
    assert len(kept) <= 60
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert max(y for _, y in kept) == max(values)
    assert min(y for _, y in kept) == min(values)


def test_a_dot_stands_where_its_value_says():
    svg = parse(line_chart([Line("m", [(0.5, 0.5)], marks=True)], x_label="x", y_label="y", square=True))
    dot = svg.find(".//circle")
    # square: the axes run 0..1 over 64..504 and 250..14 pixels
    assert (float(dot.get("cx")), float(dot.get("cy"))) == ((64 + 504) / 2, (250 + 14) / 2)


def test_points_that_a_log_axis_cannot_show_are_left_out():
    svg = parse(
        line_chart(
            [Line("m", [(0, 1), (1, 0), (10, 5), (100, 7)], marks=True)],
            x_label="x",
            y_label="y",
            log_x=True,
            log_y=True,
        )
    )
    assert len(svg.findall(".//circle")) == 2


def test_empty_charts_say_so():
    assert "Nothing was recorded" in line_chart([], x_label="x", y_label="y")
    assert "Nothing was recorded" in line_chart([Line("a", [(1, math.nan)])], x_label="x", y_label="y")
    assert "Nothing was recorded" in bar_chart([], x_label="x")
    assert "No time" in share_bar([("a", 0.0)], unit="s")


def test_names_are_escaped():
    chart = bar_chart([("<script>", 3.0)], x_label="ids")
    assert "<script>" not in chart
    assert parse(chart).find(".//text").text == "<script>"


def test_shares_add_up_to_the_width():
    svg = parse(share_bar([("a", 1.0), ("b", 3.0)], unit="s"))
    widths = [float(rect.get("width")) for rect in svg.findall(".//rect")]
    assert widths == [1080 / 4 - 1.5, 1080 * 3 / 4 - 1.5]


@pytest.mark.parametrize(("value", "text"), [(-1500, "-1.5k"), (999, "999"), (0.1234567, "0.1235"), (2.5e9, "2.5G")])
def test_short_numbers(value, text):
    assert short(value) == text


def test_on_a_phone_wide_charts_with_text_scroll_and_bars_without_text_do_not():
    style = (Path(report.__file__).parent / "style.css").read_text()
    (start, end), *more = re.findall(r'svg\[viewBox\^="(.+)"\]:not\(\[viewBox\$="(.+)"\]\) \{ min-width', style)
    assert not more
    wide = line_chart([Line("x", [(0.0, 1.0), (1.0, 2.0)])], x_label="step", y_label="loss", width=WHOLE)
    assert f'viewBox="{start}' in wide
    assert f'{end}"' not in wide.partition(">")[0]
    bar = share_bar([("a", 1.0), ("b", 3.0)], unit="s").partition(">")[0]
    assert f'viewBox="{start}' in bar
    assert f'{end}"' in bar


def test_points_without_an_order_are_not_joined():
    dots = Line("trial", [(1, 0.5), (1, 0.7), (2, 0.6)], marks=True, joined=False)
    svg = parse(line_chart([dots], x_label="lr", y_label="AUC"))
    assert len(svg.findall(".//circle")) == 3
    assert not svg.findall(".//path[@class='line c0']")


def test_a_picture_is_a_whole_file() -> None:
    lines = [Line("a < b", [(1, 0.5), (2, 0.7)]), Line("c", [(1, 0.1), (2, 0.2)], tone=5)]
    root = ET.fromstring(line_picture(lines, x_label="x", y_label="y"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert [one.text for one in root.iter(f"{space}text")][-2:] == ["a < b", "c"]
    assert len(root.findall(f"{space}path")) == 2
    assert "Nothing" in line_picture([], x_label="x", y_label="y")


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "docs").rglob("*.svg")), ids=lambda one: one.name)
def test_pictures_of_the_documentation_are_whole_files(file: Path) -> None:
    assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
