"""Which part of each array a step of a kernel reads or writes.

Arrays of rows lie `[batch, heads, q_len, ...]`, or with rows last where a kernel wants
them along the lanes; a dimension of 1 is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

__all__ = ["Window", "of_bias", "of_hidden", "window"]

Window = tuple[Any, pl.BlockSpec]
"""An array, or its shape and dtype, and where its blocks are."""

Place = Callable[..., tuple[Any, Any, Any, Any]]
"""From a step of the grid to its sample, head, block of rows and block of keys."""


def window(x: Any, axes: str, blocks: dict[str, int], place: Place) -> Window:
    """Returns an array with the window that a step has on it.

    Args:
        x: The array, or its shape and dtype.
        axes: A letter for each axis: b for batch, h for heads, g for kv heads, q for
            rows, k for keys, d for one that is taken whole.
        blocks: Sizes by letter: of a block of rows and of keys, and the number of query
            heads of a kv head.
        place: Where a step is.
    """
    shape: list[int | None] = []
    for axis, size in zip(axes, x.shape, strict=True):
        if axis in "bhg":
            shape.append(None)
        else:
            shape.append(min(size, blocks.get(axis, size)))

    def index(*step: Any) -> tuple[Any, ...]:
        b, h, q, k = place(*step)
        of = {"b": b, "h": h, "g": h // blocks["g"], "q": q, "k": k, "d": 0}
        sizes = zip(axes, x.shape, strict=True)
        return tuple(0 if size == 1 else of[axis] for axis, size in sizes)

    return x, pl.BlockSpec(tuple(shape), index)


def of_hidden(hidden: Any, blocks: dict[str, int], place: Place) -> dict[str, Window]:
    """Returns the windows of what hides keys, by name."""
    windows = {}
    for name, axis in (("first", "q"), ("end", "q"), ("q_ids", "q"), ("kv_ids", "k")):
        x = getattr(hidden, name)
        if x is not None:
            windows[name] = window(x[:, None, :], f"bd{axis}", blocks, place)
    if hidden.mask is not None:
        windows["mask"] = window(hidden.mask.astype("int8"), "bhqk", blocks, place)
    return windows


def of_bias(
    bias: Array | None, blocks: dict[str, int], place: Place
) -> dict[str, Window]:
    """Returns the window of a bias, under the name that says what it is the same for.

    One that is the same for all keys is turned, so that its rows lie along the lanes.
    """
    if bias is None:
        return {}
    if bias.shape[3] == 1:
        turned = bias.swapaxes(2, 3)
        return {"row_bias": window(turned, "bhdq", blocks, place)}
    name = "key_bias" if bias.shape[2] == 1 else "bias"
    return {name: window(bias, "bhqk", blocks, place)}
