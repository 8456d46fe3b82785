"""A drawing of a model's graph as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from viviane.core.graph_drawing import Box, draw_graph
from viviane.embedding import DynamicTableConfig, TableConfig
from viviane.model.graph import GraphPlan, plan_graph
from viviane.model.losses import loss_options
from viviane.model.nodes import DenseLayer, Input, SparseEmbedding
from viviane.model.saving import ModelFile
from viviane.nn.rows import Shape, show_shape
from viviane.schema import Schema


def graph_svg(graph: Mapping[str, Any], schema: Schema) -> str:
    """Draw a model's graph.

    Args:
        graph: the content of model.json.
        schema: the data's columns.

    Returns:
        an <svg> element that works on its own or inside a page; "" for a torch module, which has no graph.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
        >>> graph_svg({"format": "viviane-model", "version": 1, "module": "Tower"}, schema)
        ''
    """
    content = ModelFile.from_dict(dict(graph))
    if not content.nodes:
        return ""
    plan = plan_graph(content.nodes, schema)
    boxes = _boxes(plan)
    return draw_graph(boxes, _edges(plan), f"graph of the model {content.name}")


def _boxes(plan: GraphPlan) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    used = {bottom for node in plan.nodes for bottom in _bottoms(node)}
    for name, columns in {**plan.label, **plan.dense, **plan.sparse}.items():
        if name in used:
            kind = "label" if name in plan.label else "dense" if name in plan.dense else "categorical"
            boxes[name] = Box("input", (name, f"{len(columns)} {kind} column" + "s" * (len(columns) != 1)))
    for node in plan.nodes:
        if isinstance(node, SparseEmbedding):
            tables = plan.tables[node.name].tables
            rows = sum(table.num_rows for table in tables if isinstance(table, TableConfig))
            dynamic = sum(isinstance(table, DynamicTableConfig) for table in tables)
            parts = [f"{len(tables)} table(s)"]
            parts += [f"{rows:,} rows"] if rows else []
            parts += [f"{dynamic} dynamic"] if dynamic else []
            lines = (f"SparseEmbedding · {node.combiner}", ", ".join(parts))
            boxes[node.name] = Box("table", (node.name, *lines, _show([plan.shapes[top] for top in node.top])))
        elif isinstance(node, DenseLayer) and node.name in plan.layers:
            shapes = [plan.shapes[top] for top in node.top]
            boxes[node.name] = Box("layer", (node.name, _short(node), _show(shapes)))
        elif isinstance(node, DenseLayer):
            boxes[node.name] = Box("loss", (node.name, node.type, *loss_options(node)))
    return boxes


def _edges(plan: GraphPlan) -> list[tuple[str, str]]:
    makers = {top: node.name for node in plan.nodes if not isinstance(node, Input) for top in node.top}
    pairs = [
        (makers.get(bottom, bottom), node.name)
        for node in plan.nodes
        if not isinstance(node, Input)
        for bottom in _bottoms(node)
    ]
    return list(dict.fromkeys(pairs))


def _bottoms(node: Input | SparseEmbedding | DenseLayer) -> tuple[str, ...]:
    if isinstance(node, Input):
        return ()
    return (node.bottom,) if isinstance(node, SparseEmbedding) else node.bottom


def _short(node: DenseLayer) -> str:
    """Describe a layer by its type and its widths, if it has any."""
    params = node.params
    if "num_outputs" in params:
        return f"{node.type} · " + ", ".join(map(str, params["num_outputs"]))
    for key in ("num_output", "num_layers", "dropout_rate", "axis"):
        if key in params:
            return f"{node.type} · {key} {params[key]}"
    return node.type


def _show(shapes: Sequence[Shape]) -> str:
    return "  ".join(show_shape(shape) for shape in shapes)
