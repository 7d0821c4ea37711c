"""How a call is cut into tiles, each small enough to stay in a core's cache."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = ["ZERO", "ChunkedConfig", "Place", "Tiling", "padded", "tiling_for"]

ZERO = np.int32(0)  # a plain 0 would be int64 under x64, beside int32 indices
ROWS = 1024
"""Rows of a tile, over all of its heads: below, products lose throughput on a CPU."""


@dataclasses.dataclass(frozen=True)
class ChunkedConfig:
    """Sizes of the blocks; None leaves one to a heuristic.

    Attributes:
        block_q: Query rows of a block, from 1.
        block_kv: Keys of a block, from 1.

    Raises:
        TypeError: If a size is no int.
        ValueError: If a size is less than 1.
    """

    block_q: int | None = None
    block_kv: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size is None:
                continue
            if type(size) is not int:
                raise TypeError(
                    f"ChunkedConfig: expected {name} to be an int or None, got "
                    f"{name}={size!r}; a power of two such as 256 fits caches"
                )
            if size < 1:
                raise ValueError(
                    f"ChunkedConfig: expected {name} >= 1, got {name}={size}; a power "
                    "of two such as 256 fits caches"
                )


class Tiling(NamedTuple):
    """Sizes of one tile: kv heads, query heads of each, rows and keys."""

    kv_heads: int
    group: int
    q: int
    kv: int

    def blocks(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """Returns how many blocks of rows and of keys there are."""
        return -(-q_len // self.q), -(-kv_len // self.kv)


class Place(NamedTuple):
    """Where a tile is: its sample, and its first of all else."""

    sample: Array
    kv_head: Array
    member: Array
    row: Array
    key: Array

    def of(self, x: Array, tiling: Tiling) -> Array:
        """Returns the tile of an array, `[kv_heads, group, rows, keys]`, each or 1.

        Args:
            x: `[batch | 1, kv_heads | 1, group | 1, rows | 1, keys | 1]`.
            tiling: Sizes of the tile.
        """
        sizes = (1, *tiling)
        starts = self.starts(x)
        sizes = tuple(
            1 if whole == 1 else size
            for whole, size in zip(x.shape, sizes, strict=True)
        )
        return lax.dynamic_slice(x, starts, sizes)[0]

    def starts(self, x: Array) -> tuple[Array | np.int32, ...]:
        """Returns where the tile starts in an array as `of` takes it."""
        return tuple(
            ZERO if size == 1 else start
            for size, start in zip(x.shape, self, strict=True)
        )


def padded(x: Array, axis: int, length: int, value: float = 0) -> Array:
    """Returns x with an axis grown to a length by a value."""
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def tiling_for(
    q_len: int,
    kv_len: int,
    kv_heads: int,
    group: int,
    *,
    is_banded: bool = False,
    reach: int | None = None,
    config: ChunkedConfig | None = None,
) -> Tiling:
    """Returns the tile for a call.

    Args:
        q_len: Query rows, from 1.
        kv_len: Keys, from 1.
        kv_heads: Heads of key and value, from 1.
        group: Query heads for each of them, from 1.
        is_banded: Whether rows see different ranges of keys: what a block visits in
            vain grows with its size.
        reach: Of how many keys a row sees some at most, or None.
        config: What the user says, before everything else.
    """
    config = config or ChunkedConfig()
    block_q, block_kv = 512, 512
    if is_banded:
        block_q = min(block_q, max(128, q_len // 16))
        block_kv = min(block_kv, max(128, q_len // 8))
    if reach is not None:
        block_q = min(block_q, max(64, reach // 2))
        block_kv = min(block_kv, max(64, reach // 2))
    block_q = config.block_q or _even(q_len, block_q)
    block_kv = config.block_kv or min(kv_len, block_kv)
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len)
    together = max(1, ROWS // block_q)
    if group > 1:
        return Tiling(1, _divisor(group, together), block_q, block_kv)
    return Tiling(_divisor(kv_heads, together), 1, block_q, block_kv)


def _even(length: int, most: int) -> int:
    """Returns the size of equal blocks that waste the least at the end."""
    size = math.ceil(length / math.ceil(length / most))
    return min(length, -(-size // 8) * 8)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
