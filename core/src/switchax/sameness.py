"""When two values are the same to a compiled program, which is more than equal."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import types
from typing import Any

import jax
import numpy as np

__all__ = ["is_same"]

# What == says of these, nothing can tell apart.
_EXACT = (bool, int, str, bytes, type(None))
_EQUAL = (
    type,
    enum.Enum,
    np.dtype,
    pathlib.PurePath,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
)


def is_same(one: Any, other: Any) -> bool:
    """Whether nothing can tell two values apart, as far as that is known.

    True is not 1, 0.0 is not -0.0, containers are compared in order, and dataclasses
    by every attribute, whatever they leave out of their `==`. Arrays, functions and
    objects of a class of one's own are the same only if they are one object, unless
    the class has a method `is_same_as`.

    Args:
        one: Any value.
        other: Another.
    """
    try:
        return _is_same(one, other, set())
    except RecursionError:  # objects that hold themselves
        return False


def _is_same(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _EXACT or isinstance(one, _EQUAL):
        return bool(one == other)
    if kind in (float, complex):
        return repr(one) == repr(other)
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if callable(getattr(kind, "is_same_as", None)):
        return bool(one.is_same_as(other))
    mine, theirs = _parts(one), _parts(other)
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    if (id(one), id(other)) in seen:  # they hold themselves
        return True
    seen.add((id(one), id(other)))
    return all(_is_same(*pair, seen) for pair in zip(mine, theirs, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """What a value consists of, or None if that is not known."""
    kind = type(value)
    if kind in (tuple, list):
        return list(value)
    if kind in (dict, types.MappingProxyType):
        return [part for item in value.items() for part in item]
    if kind in (set, frozenset):
        return sorted(value, key=lambda part: (type(part).__qualname__, repr(part)))
    if kind is functools.partial:
        return [value.func, value.args, value.keywords]
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.eq:
        names = [field.name for field in dataclasses.fields(value)]
        fields = [getattr(value, name, None) for name in names]
        return [*fields, dict(getattr(value, "__dict__", {}))]
    return None
