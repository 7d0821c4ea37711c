"""A frozen, hashable description of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import house_message

__all__ = ["ArraySpec", "Request"]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array argument.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
    """

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(array: Any) -> ArraySpec:
        """Describes anything with `shape` and `dtype`; else raises a TypeError."""
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            rule, got = "something with shape and dtype", f"{array!r}"
            todo = "pass an array or a jax.ShapeDtypeStruct"
            raise TypeError(house_message("ArraySpec.of", rule, got, todo))
        return ArraySpec(tuple(array.shape), np.dtype(array.dtype).name)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Request:
    """What every kind's request has; a kind derives its own from it.

    Attributes:
        kind: Name of the operation kind.
        features: Everything the call uses that an operation may not honour.
        dtype: Name of the operands' common dtype.
        layout: Layout of the arrays.
        mode: Runtime mode, such as "__train__".
    """

    kind: str
    features: frozenset[str]
    dtype: str
    layout: str
    mode: str

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes by name, which `Capabilities.multiples` and `limits` speak of."""
        raise NotImplementedError

    def value_of(self, feature: str) -> str:
        """What makes the call use a feature, for messages; a field of its name."""
        value = getattr(self, feature, None)
        return "used" if value is None else str(value)

    @property
    def key(self) -> str:
        """The whole request as text that is the same in every process."""
        values = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, frozenset):
                value = sorted(value)
            if field.name == "arrays":
                value = [f"{name}:{spec}" for name, spec in value]
            values.append(f"{field.name}={value}")
        return " ".join(values)

    def describe(self) -> str:
        """One line for messages and tables."""
        return f"{self.kind} {self.dtype} {dict(self.sizes)}"
