"""How many bytes the kernels of a program move between HBM and vector memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

__all__ = ["Traffic", "traffic_of"]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the windows of a program's Pallas kernels move.

    Attributes:
        bytes: Of all copies of blocks, in and out.
        exact: False where the block of a step depends on an array: then each step
            counts as a copy, which is the most that it can be.
    """

    bytes: int
    exact: bool


def traffic_of(jaxpr: Any) -> Traffic:
    """Counts copies of blocks: one where a step's block is not that of the step before.

    What a kernel copies by itself (operands in `ANY` memory) is not counted.

    Args:
        jaxpr: Of the program, as `jax.make_jaxpr` returns it.
    """
    total, exact = 0, True
    for mapping in _pallas_grids(jaxpr.jaxpr):
        for window in mapping.block_mappings:
            if "any" in str(window.block_aval.memory_space).lower():
                continue
            copies = _copies(mapping, window)
            if copies is None:
                copies, exact = math.prod(mapping.grid), False
            total += copies * _block_bytes(window)
    return Traffic(total, exact)


def _pallas_grids(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["grid_mapping"]
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _pallas_grids(inner)


def _block_bytes(window: Any) -> int:
    itemsize: int = np.dtype(window.array_aval.dtype).itemsize
    shape: tuple[int, ...] = window.block_aval.shape
    return math.prod(shape) * itemsize


def _copies(mapping: Any, window: Any) -> int | None:
    """Returns how often the block changes, or None if an array decides."""
    index_map = window.index_map_jaxpr
    jaxpr = index_map.jaxpr
    grid = mapping.grid
    if any(var in _used(jaxpr) for var in jaxpr.invars[len(grid) :]):
        return None
    steps = [axis.ravel() for axis in np.indices(grid, dtype=np.int32)]
    if not steps:
        return 1
    others = len(jaxpr.invars) - len(grid)

    def block(*step: Any) -> Any:
        found = jaxpr_as_fun(index_map)(*step, *[None] * others)
        return jnp.stack([jnp.asarray(index, jnp.int32) for index in found])

    with jax.disable_jit():  # what is jitted within was traced for that TPU
        blocks = np.asarray(jax.vmap(block)(*steps))
    return 1 + int((blocks[1:] != blocks[:-1]).any(axis=1).sum())


def _used(jaxpr: Any) -> set[Any]:
    used = {id(v): v for equation in jaxpr.eqns for v in equation.invars}
    used |= {id(v): v for v in jaxpr.outvars}
    return {v for v in used.values() if type(v).__name__ == "Var"}
