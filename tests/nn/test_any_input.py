"""A layer takes inputs of any shapes and parameters of any values, or refuses them: what it takes it computes."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from layer_examples import EXAMPLES, LOSSES, make_inputs, rows_of_batch

from viviane.core.errors import VivianeError
from viviane.nn import LAYERS, Rows, RowShape, build_layer

BATCH = 4
SHAPES = [
    (), (1,), (2,), (3,), (1, 1), (2, 3), (3, 2), (3, 3), (1, 2, 3), (2, 3, 2), (1, 2, 3, 4), (2, 2, 2, 2),
    RowShape((4,), Rows(3)), RowShape((2,), Rows(2, of_batch=False)), RowShape((3,), Rows(3, of_batch=False)),
    RowShape((2, 3), Rows(2)),
]  # fmt: skip
VALUES = [
    0, -1, 1, 2, 3, 7, 1.5, 2**31, 2**63, float("inf"), float("nan"), "x", "", None, True, [], [0], [-1], [1], [2, 2],
    [1, -1], [2**40], [2**63], [[0, 1]], [[1, 0]], [[-1, 2]], {}, "relu", "none", "mean", "Uniform", "head", "all",
]  # fmt: skip


def compute(name, parameters, shapes) -> bool:
    """Build a layer and compute it; returns whether it takes the input, and fails for an error that is not ours."""
    try:
        layer = build_layer(name, parameters, shapes).eval()
        found = layer(*make_inputs(name, shapes, BATCH, torch.float32))
    except VivianeError:
        return False
    except Exception as error:
        pytest.fail(f"{name}, {parameters}, {[(tuple(s), getattr(s, 'rows', None)) for s in shapes]}: {error!r}")
    if name not in LOSSES:
        sizes = [tuple(one.shape) for one in (found if isinstance(found, tuple) else [found])]
        assert sizes == [(rows_of_batch(shape, BATCH), *shape) for shape in layer.out_shapes]
    return True


def other_shapes(shapes) -> Iterator[list]:
    """Every one and every two shapes; then the given ones with one left out, replaced, added, or two exchanged."""
    for count in (0, 1, 2):
        yield from map(list, product(SHAPES, repeat=count))
    for i in range(len(shapes)):
        yield shapes[:i] + shapes[i + 1 :]
        for other in SHAPES:
            yield [*shapes[:i], other, *shapes[i + 1 :]]
            yield [*shapes[:i], other, *shapes[i:]]
        for j in range(i):
            yield [*shapes[:j], shapes[i], *shapes[j + 1 : i], shapes[j], *shapes[i + 1 :]]
    rng = random.Random(0)
    yield from (rng.choices(SHAPES, k=3) for _ in range(200))


@pytest.mark.parametrize("name", LAYERS)
def test_any_shapes(name):
    examples = [(parameters, shapes) for one, parameters, shapes in EXAMPLES if one == name]
    for parameters, shapes in examples:
        taken = [compute(name, parameters, other) for other in other_shapes(list(shapes))]
        assert not all(taken)


@pytest.mark.parametrize("name", LAYERS)
def test_any_parameters(name):
    for parameters, shapes in [(parameters, shapes) for one, parameters, shapes in EXAMPLES if one == name]:
        for field in LAYERS[name].Parameters.model_fields:
            for value in VALUES:
                compute(name, {**parameters, field: value}, shapes)
