"""One call of a kind that maps arrays to arrays, and what the oracle says of it."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from switchax.capabilities import Capabilities
from switchax.kind import OperationKind
from switchax.testing.running import wide_types
from switchax.testing.suite import fields_that_differ
from switchax.testing.tolerance import allowed

__all__ = ["ArrayCall", "Arrays", "fitted", "is_floating", "moved"]

Arrays = dict[str, Any]


class ArrayCall(abc.ABC):
    """One call of a kind without its values; derive a frozen dataclass.

    Attributes:
        kind: The kind, whose `oracle` takes what a call takes.
        smaller: For a field, values from the simplest on; a failing call is made
            smaller by those before its own.
        stored: How many times something is rounded to `dtype` on the way.
        dtype: Of the floating arrays.
        seed: Of the values.
    """

    kind: ClassVar[OperationKind]
    smaller: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stored: ClassVar[int] = 1
    dtype: str
    seed: int

    @abc.abstractmethod
    def arrays(self) -> Arrays:
        """Draws the array arguments, numpy, by name; a seed changes no shape."""

    def options(self) -> dict[str, Any]:
        """Returns the other arguments, whatever the seed; none by default."""
        return {}

    @property
    def growth(self) -> float:
        """The largest number whose rounding error is one of the result; 0 by default.

        Such as a logit that goes through exp, or an angle that goes through cos: an
        error of some units of it is one of some units of the result.
        """
        return 0.0

    @property
    def output_dtype(self) -> str:
        """Dtype of the outputs; that of the call by default."""
        return self.dtype

    @property
    def features(self) -> frozenset[str]:
        """The features that the call uses, by the kind."""
        with wide_types(self.dtype):
            shapes = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
                for name, array in self.arrays().items()
            }
            return self.kind.request(**shapes, **self.options()).features

    def expected(self, **changed: Any) -> Any:
        """Returns what the oracle says of the call, in float64.

        Args:
            **changed: Arrays that take the place of those drawn.
        """
        arrays = {**self.arrays(), **changed}
        wide = {
            n: a.astype("float64") if is_floating(a) else a for n, a in arrays.items()
        }
        return self.kind.oracle(**wide, **self.options())

    def allowed(self) -> float:
        """Returns the error allowed, in units of the largest entry (or 1, if less)."""
        return allowed(self.dtype, self.growth, self.stored)

    def simpler(self) -> Iterator[ArrayCall]:
        """Yields calls with one field nearer to the simplest, by `smaller`."""
        call: Any = self
        for name, values in self.smaller.items():
            now = getattr(self, name)
            end = values.index(now) if now in values else len(values)
            for value in values[:end]:
                yield dataclasses.replace(call, **{name: value})

    def __str__(self) -> str:
        changed = fields_that_differ(self).items()
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed)})"


def moved(call: Any, dtype: str, seed: int = 0) -> Any:
    """Returns the call in a dtype, with other values for another seed."""
    return dataclasses.replace(call, dtype=dtype, seed=call.seed + 2 * seed)


def fitted(call: Any, capabilities: Capabilities) -> Any:
    """Returns the call in sizes that an operation declares.

    What is longer than it is by default stays longer than one of the multiples.

    Args:
        call: Its fields that are named as `sizes` of the kind are such.
        capabilities: Of the operation.
    """
    sizes = {}
    for field in dataclasses.fields(call):
        if field.name in call.kind.sizes:
            size = getattr(call, field.name)
            of = capabilities.multiples.get(field.name, 1)
            limit = capabilities.limits.get(field.name, math.inf)
            is_long = isinstance(field.default, int) and size > field.default
            blocks = max(-(-size // of), 2 if is_long and of > 1 else 0)
            size = min(blocks * of, limit)
            sizes[field.name] = int(size - size % of)
    return dataclasses.replace(call, **sizes)


def is_floating(array: Any) -> bool:
    """Whether an array can have a derivative."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
