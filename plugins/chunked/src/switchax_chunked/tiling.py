"""How a call is cut into tiles, each about as large as a core's cache."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = [
    "SHORT",
    "USUAL_CACHE",
    "ZERO",
    "ChunkedConfig",
    "Place",
    "Tiling",
    "cache_of_a_core",
    "padded",
    "tiling_for",
]

ZERO = np.int32(0)  # a plain 0 would be int64 under x64, beside int32 indices
SHORT = 16
"""Up to as many query rows are a step of decoding, bound by reading the cache."""
USUAL_CACHE = 2**21
"""Bytes of a core's own cache, where a machine does not say."""


@dataclasses.dataclass(frozen=True)
class ChunkedConfig:
    """Sizes of the blocks; None leaves one to a heuristic.

    Attributes:
        block_q: Query rows of a block, from 1.
        block_kv: Keys of a block, from 1.
        block_heads: Query heads of a block at most, from 1.

    Raises:
        TypeError: If a size is no int.
        ValueError: If a size is less than 1.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "block_heads"):
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

    def flat(self, x: Array) -> Array:
        """Joins the group and its rows, `[kv_heads, group, rows, ...]`.

        One kv head has no axis of its own: every array of logits then has the shape
        that the product gives it, without which XLA on a CPU holds them twice.
        """
        rows = self.group * self.q
        lead = () if self.kv_heads == 1 else (self.kv_heads,)
        return x.reshape(*lead, rows, *x.shape[3:])

    def of_head(self, x: Array) -> Array:
        """Returns `[kv_heads, ...]` likewise without the axis of one kv head."""
        return x[0] if self.kv_heads == 1 else x

    def split(self, x: Array) -> Array:
        """Undoes `flat`."""
        last = x.shape[-1]
        return x.reshape(self.kv_heads, self.group, self.q, last)

    def blocks(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """Returns how many blocks of rows and of keys there are."""
        return -(-q_len // self.q), -(-kv_len // self.kv)


class Place(NamedTuple):
    """Where a tile is: its sample, and its first of all else."""

    sample: Array
    kv_head: Array
    member: Array
    row: Array
    key: Array | np.int32

    def take(self, x: Array, axes: str, tiling: Tiling) -> Array:
        """Returns the part of an array that belongs to the tile, without its sample.

        Args:
            x: Of any size along an axis, or of 1 where it is the same for all.
            axes: A letter for each axis: b for batch, h for kv_heads, g for the group,
                q for rows, k for keys, d for one that is taken whole.
            tiling: Sizes of the tile.
        """
        size_of = dict(zip("bhgqk", (1, *tiling), strict=True))
        sizes = [
            min(whole, size_of.get(axis, whole))
            for whole, axis in zip(x.shape, axes, strict=True)
        ]
        return lax.dynamic_slice(x, self.starts(x, axes), sizes)[0]

    def put(self, x: Array, part: Array, axes: str) -> Array:
        """Returns an array with a part in its place; see `take`."""
        return lax.dynamic_update_slice(x, part[None], self.starts(x, axes))

    def starts(self, x: Array, axes: str) -> tuple[Array | np.int32, ...]:
        """Returns where the tile starts in an array as `take` has it."""
        start_of = dict(zip("bhgqk", self, strict=True))
        return tuple(
            ZERO if size == 1 else start_of.get(axis, ZERO)
            for size, axis in zip(x.shape, axes, strict=True)
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
    cache: int = USUAL_CACHE,
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
        cache: Bytes of a core's own cache.
        config: What the user says, before everything else.
    """
    config = config or ChunkedConfig()
    # Measured on a CPU (benchmarks/chunked_cpu.py): what a step costs beside its
    # logits is outweighed by about as many logits as the cache of a core has bytes.
    # Where ranges differ, more of a large tile is in vain: a quarter of that.
    logits = min(max(cache, 2**19), 2**22)
    if q_len <= SHORT:
        block_q, block_kv, logits = q_len, 256, 2**22
    elif reach is not None:
        block_q = min(max(reach // 2, 128), 512)
        block_kv, logits = min(max(reach, 128), 512), logits // 4
    elif is_banded:
        block_q = min(max(q_len // 8, 128), 512)
        block_kv, logits = max(block_q, 256), logits // 4
    else:
        block_kv = 1024
        # One head alone takes more rows, to the same size.
        block_q = max(512, logits // (min(kv_len, block_kv) * kv_heads * group))
    block_q = min(config.block_q or _even(q_len, block_q), q_len)
    block_kv = min(config.block_kv or _even(kv_len, block_kv), kv_len)
    heads = config.block_heads or max(1, logits // (block_q * block_kv))
    members = _divisor(group, heads)
    return Tiling(_divisor(kv_heads, heads // members), members, block_q, block_kv)


def cache_of_a_core() -> int:
    """Returns the bytes of a core's second-level cache on this host, or the usual."""
    try:
        found = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):
        return USUAL_CACHE
    return found if found > 0 else USUAL_CACHE


def _even(length: int, most: int) -> int:
    """Returns the size of equal blocks that waste the least at the end."""
    size = math.ceil(length / math.ceil(length / most))
    return min(length, -(-size // 8) * 8)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
