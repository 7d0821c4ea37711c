"""Types inside `jax.shard_map`: over which axes of the mesh what an array holds varies.

A loop must return what it was given, so what it starts with is made to vary as the
operands do; and the operands alike, so that the gradient of one that does not vary is
summed over the mesh outside of the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

__all__ = ["made_varying", "varying_alike", "varying_axes"]


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the axes over which any of the arrays varies; outside shard_map none."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, Array)]
    found = {axis for x in leaves for axis in jax.typeof(x).manual_axis_type.varying}
    return tuple(sorted(found))


def made_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns the arrays, varying over some axes too; values unchanged."""

    def cast(x: Any) -> Any:
        if not isinstance(x, Array):
            return x
        known = jax.typeof(x).manual_axis_type.varying
        lacking = tuple(axis for axis in axes if axis not in known)
        return jax.lax.pcast(x, lacking, to="varying") if lacking else x

    return jax.tree.map(cast, tree) if axes else tree


def varying_alike(tree: Any) -> Any:
    """Returns the arrays, each varying over all axes over which any does."""
    return made_varying(tree, varying_axes(tree))
