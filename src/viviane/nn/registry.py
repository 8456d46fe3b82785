"""Layers by name, with checked parameters and shapes: what a model's graph is built from.

A layer is an `nn.Module` whose first argument is the list of its inputs' shapes without the batch
dimension, and whose second is its parameters, a `Settings` object. It returns the shapes of its outputs in
`out_shapes`. Every layer can also be used by hand in any PyTorch program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from viviane.config.base import Settings
from viviane.core.errors import ConfigError, SchemaError
from viviane.core.registry import Registry
from viviane.nn.init import Initializer
from viviane.nn.rows import Rows, RowShape, Shape, rows_of, show_shape, with_rows

__all__ = ["LAYERS", "Layer", "NoParameters", "Shape", "build_layer"]


class NoParameters(Settings):
    """The parameters of a layer that has none."""


class Layer(nn.Module):
    """Base of all registered layers.

    Args:
        in_shapes: shapes of the inputs without the batch dimension.
        settings: the layer's parameters, an object of its class's `Parameters`.
        init: source of initial values; None seeds one with 0.
        name: the layer's name, for messages.
        parameters: the fields of `settings`, instead of it.

    Example:
        >>> from viviane import nn
        >>> nn.MLP([(13,)], num_outputs=[64, 16]).out_shapes
        [(16,)]
    """

    Parameters: ClassVar[type[Settings]] = NoParameters
    changes_rows: ClassVar[bool] = False
    """Whether the outputs may have other rows than the inputs; such a layer's `build` returns them."""
    id_inputs: ClassVar[tuple[int, ...]] = ()
    """Places of the inputs that are ids, (B, S), int64; in a graph, groups of categorical columns."""
    process_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of buffers that follow the batches of this process alone, so that a checkpoint has those of each."""
    out_shapes: list[Shape]

    def __init__(
        self,
        in_shapes: Sequence[Shape],
        settings: Any = None,
        *,
        init: Initializer | None = None,
        name: str | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        if settings is not None and parameters:
            fix = "leave the settings object out"
            raise ConfigError("give parameters once", where=self.name, value=", ".join(parameters), fix=fix)
        self.in_shapes = [shape if isinstance(shape, RowShape) else tuple(shape) for shape in in_shapes]
        self.settings = self.Parameters(**parameters) if settings is None else settings
        if self.changes_rows:
            self.out_shapes = self.build(init or Initializer(0, self.name))
        else:
            rows = self.same_rows()
            self.out_shapes = [with_rows(shape, rows) for shape in self.build(init or Initializer(0, self.name))]

    def build(self, init: Initializer) -> list[Shape]:
        """Create the weights and return the outputs' shapes."""
        raise TypeError(f"{type(self).__name__} does not define build")

    def weights_to_pack(self) -> list[Tensor]:
        """Return what `viviane.ops.packing_ahead` may bring to 16 bits before the layer is called, in its order."""
        return []

    def refuse(self, allowed: str) -> SchemaError:
        """Return the error that lists the input shapes of the layer."""
        return SchemaError(
            "a layer cannot take these inputs",
            where=f"layer {self.name!r} ({type(self).__name__})",
            value=", ".join(show_shape(shape) for shape in self.in_shapes) or "no inputs",
            allowed=allowed,
        )

    def same_rows(self) -> Rows:
        """Return the rows that all inputs have, or refuse."""
        rows = {rows_of(shape) for shape in self.in_shapes}
        if len(rows) > 1:
            raise self.refuse("inputs with the same number of rows")
        return next(iter(rows), Rows())

    def one_input(self, *ranks: int) -> Shape:
        """Return the only input's shape, or refuse; `ranks` counts dimensions without the batch."""
        if len(self.in_shapes) != 1 or (ranks and len(self.in_shapes[0]) not in ranks):
            wanted = " or ".join(show_shape(["n"] * rank) for rank in ranks) or "any shape"
            raise self.refuse(f"one input of shape {wanted}")
        return self.in_shapes[0]

    def extra_repr(self) -> str:
        """Show the parameters that differ from their defaults, as torch prints modules."""
        given = self.settings.model_dump(exclude_defaults=True)
        return ", ".join(f"{key}={value}" for key, value in given.items())


LAYERS: Registry[type[Layer]] = Registry("layer")


def build_layer(
    kind: str,
    parameters: Mapping[str, Any],
    in_shapes: Sequence[Shape],
    *,
    seed: int = 0,
    name: str | None = None,
    most_bytes: int | None = None,
) -> Layer:
    """Build a layer from its registered name and plain parameters.

    Args:
        kind: a name in `LAYERS`, such as "MLP".
        parameters: the layer's parameters; unknown ones are refused with the nearest name.
        in_shapes: shapes of the inputs without the batch dimension.
        seed: seed of the initial values; each weight draws from (seed, name, weight).
        name: the layer's name in the graph.
        most_bytes: of one weight; None: no limit.

    Raises:
        ConfigError: unknown layer or parameter, or a weight would be larger than `most_bytes`.
        SchemaError: shapes that do not fit.

    Example:
        >>> build_layer("MLP", {"num_outputs": [8, 4]}, [(13,)]).out_shapes
        [(4,)]
    """
    layer = LAYERS[kind]
    try:
        settings = layer.Parameters(**parameters)
    except TypeError as error:
        raise ConfigError("layer parameters must have text keys", where=f"layer {name!r}", value=parameters) from error
    return layer(in_shapes, settings, init=Initializer(seed, name or kind, most_bytes), name=name or kind)
