"""When two values are the same to a compiled program, which is more than equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["is_same"]


def is_same(one: Any, other: Any) -> bool:
    """Whether nothing can tell two values apart.

    True is not 1, 0.0 is not -0.0, dataclasses are compared by every field, whatever
    they leave out of their `==`, and arrays are the same only if they are one object.

    Args:
        one: Any value.
        other: Another.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | jax.Array):
        return False
    if _is_compared_by_fields(one):
        names = [field.name for field in dataclasses.fields(one)]
        return one == other and all(
            is_same(getattr(one, n, None), getattr(other, n, None)) for n in names
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            is_same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, tuple | list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(is_same(*pair) for pair in pairs)
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def _is_compared_by_fields(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.eq
