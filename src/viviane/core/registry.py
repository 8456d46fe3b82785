"""Registries of named objects: layers, models, metrics. Errors for unknown names suggest the nearest one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from viviane.core.errors import ConfigError, suggest

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to objects, filled by a decorator.

    Example:
        >>> shapes: Registry[int] = Registry("shape")
        >>> _ = shapes.register("square")(4)
        >>> shapes["square"]
        4
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under `name`."""

        def store(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.kind} {name!r} is registered twice", fix="choose another name")
            self._items[name] = item
            return item

        return store

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise ConfigError(f"unknown {self.kind}", value=name, fix=suggest(str(name), self._items)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._items
