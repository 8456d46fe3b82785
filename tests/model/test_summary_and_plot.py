"""What a model says of itself: counts by hand, and a drawing in which nothing overlaps."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import ConfigError
from viviane.core.graph_drawing import Box, draw_graph
from viviane.core.graph_layout import lay_out
from viviane.model import SparseEmbedding, graph_svg
from viviane.schema import Schema
from viviane.zoo import ZOO


def test_counts_and_bytes(model) -> None:
    model.compile(Adam())
    summary = model.describe()
    # emb: user 30 rows and item 20 (seen shares it), of 4; deep: (12 + 3) x 16 + 16; logit: 16 + 1
    assert summary.table_parameters == (30 + 20) * 4
    assert summary.dense_parameters == 15 * 16 + 16 + 17
    assert summary.weight_bytes == 4 * (200 + 273)
    assert summary.state_bytes == 2 * 4 * 200
    assert {line.name: line.features for line in summary.tables}["emb.item"] == ("item", "seen")
    assert summary.notes == ()


@pytest.mark.parametrize("optimizer", [SGD(), AdaGrad(), Adam()])
def test_a_summary_without_tables_says_what_the_tables_say(build, optimizer) -> None:
    model = build()
    model.nodes[1] = SparseEmbedding("emb", "cats", 4, tables={"item": {"trainable": False}})
    model.compile(optimizer)
    planned = [line.__dict__ | {"name": line.name.removeprefix("emb.")} for line in model.describe().tables]
    assert planned == [line.__dict__ for line in model.module._modules["emb"].summary()]


def test_print(build, capsys) -> None:
    model = build()
    model.nodes.insert(2, SparseEmbedding("spare", "cats", 2))
    model.compile(AdaGrad())
    model.summary()
    text = capsys.readouterr().out
    for part in (
        "Model small",
        "(B, 3, 4)",
        "(B, 15)",
        "emb.user",
        "adagrad",
        "573 parameters: 273 dense, 300 in tables",
    ):
        assert part in text
    assert "note: nothing reads the tensor(s) 'spare'" in text


def test_a_drawing_is_well_formed_and_names_everything(model, tmp_path) -> None:
    text = model.plot(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == text
    words = " ".join(element.text or "" for element in ET.fromstring(text).iter())
    for part in ("cats", "emb", "(B, 3, 4)", "MLP · 16", "BinaryCrossEntropyLoss", "2 table(s), 50 rows"):
        assert part in words
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_a_drawing_needs_only_json(model) -> None:
    import json

    graph = json.loads(model.to_json())
    assert graph_svg(graph, model.schema) == model.plot()
    with pytest.raises(ConfigError, match="did you mean 'nodes'"):
        graph_svg({**graph, "nods": []}, model.schema)


SCHEMA = Schema(
    labels=[{"name": "y"}], dense=[{"name": "x"}],
    categorical=[{"name": "a", "num_ids": 5}, {"name": "b", "num_ids": 5}],
)  # fmt: skip


HISTORY = {"name": "h", "num_ids": 5, "kind": "sequence", "max_length": 3, "vocabulary": "a"}


@pytest.mark.parametrize("name", ZOO)
def test_drawings_of_the_zoo_are_well_formed(name) -> None:
    labels = 2 if name in ("shared_bottom", "mmoe", "ple") else 1
    schema = Schema(
        labels=[{"name": f"y{i}"} for i in range(labels)], dense=SCHEMA.dense,
        categorical=[*(one.to_dict() for one in SCHEMA.categorical), HISTORY],
    )  # fmt: skip
    roles = {"user": "b", "item": "a"} if name in ("ncf", "two_tower") else {}
    nodes = [node.to_dict() for node in ZOO[name](**roles).nodes(schema)]
    ET.fromstring(graph_svg({"name": name, "nodes": nodes}, schema))


@st.composite
def graphs(draw) -> tuple[dict, list]:
    count = draw(st.integers(1, 12))
    sizes = {f"n{i}": (draw(st.integers(10, 200)), draw(st.integers(10, 60))) for i in range(count)}
    pairs = [(f"n{i}", f"n{j}") for i in range(count) for j in range(i + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return sizes, edges


@given(graphs())
def test_boxes_and_wires_never_overlap_and_edges_point_down(graph) -> None:
    sizes, edges = graph
    layout = lay_out(sizes, edges)
    for (a, b), stations in layout.wires.items():
        assert stations[0] is layout.boxes[a]
        assert stations[-1] is layout.boxes[b]
        assert all(upper.bottom < lower.y for upper, lower in itertools.pairwise(stations))
    passing = [one for stations in layout.wires.values() for one in stations[1:-1]]
    for one, other in itertools.combinations([*layout.boxes.values(), *passing], 2):
        apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart_x or one.bottom < other.y or other.bottom < one.y
    for one in layout.boxes.values():
        assert 0 <= one.x <= one.x + one.width <= layout.width
        assert 0 <= one.y <= one.bottom <= layout.height


def test_a_small_drawing_fits_a_phone_and_a_wide_one_keeps_letters_that_can_be_read() -> None:
    boxes = {f"layer{n}": Box("layer", (f"layer{n}", "a rather long line of text")) for n in range(12)}
    found = {}
    for number in (1, 12):
        some = dict(list(boxes.items())[:number])
        least, most = re.search(r"min-width: (\d+)px; max-width: (\d+)px", draw_graph(some, [], "layers")).groups()
        found[number] = int(least), int(most)
    assert found[1][0] == round(0.7 * found[1][1]) < 320
    assert found[12][0] == 640 < found[12][1]
