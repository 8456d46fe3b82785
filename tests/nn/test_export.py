"""Every layer goes through torch.export with a batch of any size, and computes the same afterwards."""

import inspect

import pytest
import torch
from layer_examples import EXAMPLES, IDS, make_inputs

from viviane.nn import Rows, build_layer

QUICK = {"GRU", "MultiHeadAttention", "FusedReshapeConcat", "Scale", "Reshape", "MultiCrossEntropyLoss"}
CASES = [
    pytest.param(*example, id=name, marks=[] if example[0] in QUICK else [pytest.mark.slow])
    for example, name in zip(EXAMPLES, IDS, strict=True)
]


def dynamic_shapes(layer, shapes):
    """Every first dimension is a multiple of one symbol, the batch."""
    batch = torch.export.Dim("batch", min=4, max=4096)
    rows = [getattr(shape, "rows", Rows()) for shape in shapes]
    sizes = [None if not one.of_batch else {0: one.count * batch if one.count > 1 else batch} for one in rows]
    result, parameters = {}, list(inspect.signature(layer.forward).parameters.values())
    for place, parameter in enumerate(parameters):
        if parameter.kind == parameter.VAR_POSITIONAL:
            result[parameter.name] = tuple(sizes[place:])
        elif place < len(sizes):
            result[parameter.name] = sizes[place]
    return result


@pytest.mark.filterwarnings("ignore")  # torch's own exporter warns of itself
@pytest.mark.parametrize(("name", "parameters", "shapes"), CASES)
def test_an_exported_layer_takes_any_batch(name, parameters, shapes):
    layer = build_layer(name, parameters, shapes).eval()
    given = tuple(make_inputs(name, shapes, 6, torch.float32))
    program = torch.export.export(layer, given, dynamic_shapes=dynamic_shapes(layer, shapes), strict=False)
    for batch in (4, 9):
        other = make_inputs(name, shapes, batch, torch.float32, seed=1)
        expected, result = layer(*other), program.module()(*other)
        expected = expected if isinstance(expected, tuple) else (expected,)
        result = result if isinstance(result, tuple | list) else (result,)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # float32, the same kernels
