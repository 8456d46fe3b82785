"""The table of HugeCTR's names in the documentation names every registered layer, with its class."""

import re
from pathlib import Path

from viviane.metrics import METRICS
from viviane.nn import LAYERS
from viviane.nn.init import HUGECTR_NAMES

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def test_every_registered_layer_stands_in_the_table_with_its_class():
    rows = {}
    for line in (DOCS / "layers.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and "`" in cells[2]:
            names = [re.sub(r" \(.*", "", name) for name in cells[1].split(", ")] if cells[1] != "(none)" else [None]
            classes = re.findall(r"`(\w+)`", cells[2])
            rows |= {name or cls: cls for name, cls in zip(names[: len(classes)], classes, strict=True)}
    assert rows == {name: layer.__name__ for name, layer in LAYERS.items()}


def test_every_metric_stands_in_its_table():
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in text and f"`{name}:user`" not in text] == []


def test_hugectr_s_initializers_are_all_taken():
    assert set(HUGECTR_NAMES) == {"Default", "Uniform", "XavierNorm", "XavierUniform", "Zero"}
