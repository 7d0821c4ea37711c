"""What a block of rows sees of a block of keys, and which blocks need a visit at all.

Whatever only positions, lengths and ids decide is known per block before the loop
starts: blocks that nobody sees are never visited. Where all of it is static, so are
the lists of blocks, and they are made by numpy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .tiling import Place, Tiling, padded

__all__ = ["Hidden", "Lists", "Tile", "bounds", "key_lists", "row_lists", "tile"]

_INT = np.iinfo(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """What hides keys from rows; None hides nothing.

    Attributes:
        first: int32 `[batch | 1]`: row i sees no key before `first + i`.
        last: int32 `[batch | 1]`: row i sees no key after `last + i`.
        q_lengths: int32 `[batch]`.
        kv_lengths: int32 `[batch]`.
        q_ids: int32 `[batch, rows]`; a negative id matches nothing.
        kv_ids: int32 `[batch, kv_len]`.
        mask: bool `[batch | 1, kv_heads | 1, group | 1, rows | 1, kv_len | 1]`.

    Rows are q_len and what fills the last block.
    """

    first: Any = None
    last: Any = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    q_ids: Array | None = None
    kv_ids: Array | None = None
    mask: Array | None = None


class Lists(NamedTuple):
    """For each block of one side, the blocks of the other side that it meets.

    Attributes:
        count: int32 `[batch | 1, blocks]`.
        order: int32 `[batch | 1, blocks, other blocks]`, the first `count` of which
            are meant.
    """

    count: Any
    order: Any


class Tile(NamedTuple):
    """What is visible within one tile.

    Attributes:
        visible: bool, broadcastable to `[kv_heads, group, rows, keys]`, or None where
            every row sees every key.
        key_seen: bool, broadcastable to `[kv_heads, keys]`: which keys any of these
            rows sees; or None for all.
    """

    visible: Array | None
    key_seen: Array | None


def bounds(
    q_len: int,
    kv_len: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: Any,
) -> tuple[Any, Any]:
    """Returns `first` and `last` of `Hidden`, within `[-q_len, kv_len]`.

    Beyond that range a bound means the same, and within it nothing overflows. Offset
    and window are within a quarter of int32, as core hands them over.
    """
    left, right = window if window is not None else (None, None)
    right = 0 if causal else right
    is_static = isinstance(q_offset, int | np.integer)
    xp: Any = np if is_static else jnp
    offset = xp.asarray(q_offset, np.int32).reshape(-1)
    first = None if left is None else xp.clip(offset - left, -q_len, kv_len)
    last = None if right is None else xp.clip(offset + right, -q_len, kv_len)
    return first, last


def _meets(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Returns bool `[batch | 1, q blocks, kv blocks]`, and numpy or jax.numpy."""
    is_static = not any(
        isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(hidden)
    )
    xp: Any = np if is_static else jnp
    blocks_q, blocks_kv = tiling.blocks(q_len, kv_len)

    def starts(count: int, size: int, axis: int) -> Any:
        shape = (1, count, 1) if axis == 1 else (1, 1, count)
        return (np.arange(count, dtype=np.int32) * np.int32(size)).reshape(shape)

    def per_batch(x: Any) -> Any:
        return x.reshape(-1, 1, 1)

    row = starts(blocks_q, tiling.q, 1)
    key = starts(blocks_kv, tiling.kv, 2)
    row_end, key_end = np.int32(q_len), np.int32(kv_len)
    if hidden.q_lengths is not None:
        row_end = xp.minimum(row_end, per_batch(hidden.q_lengths))
    if hidden.kv_lengths is not None:
        key_end = xp.minimum(key_end, per_batch(hidden.kv_lengths))
    meets = (row < row_end) & (key < key_end)
    if hidden.first is not None:
        last_key = xp.minimum(key + np.int32(tiling.kv), key_end) - np.int32(1)
        meets = meets & (per_batch(hidden.first) + row <= last_key)
    if hidden.last is not None:
        last_row = xp.minimum(row + np.int32(tiling.q), row_end) - np.int32(1)
        meets = meets & (key <= per_batch(hidden.last) + last_row)
    if hidden.q_ids is not None:
        q_low, q_high = _range_of_ids(hidden.q_ids, blocks_q, tiling.q)
        kv_low, kv_high = _range_of_ids(hidden.kv_ids, blocks_kv, tiling.kv)
        meets = meets & (q_low[:, :, None] <= kv_high[:, None, :])
        meets = meets & (kv_low[:, None, :] <= q_high[:, :, None])
    if hidden.mask is not None:
        meets = meets & _any_of_mask(hidden.mask, blocks_q, blocks_kv, tiling)
    return meets, xp


def _range_of_ids(ids: Any, blocks: int, size: int) -> tuple[Any, Any]:
    """Returns the least and greatest id of each block that is not negative."""
    ids = padded(ids, 1, blocks * size, -1).reshape(ids.shape[0], blocks, size)
    low = jnp.where(ids < 0, _INT.max, ids).min(axis=2)
    return low, ids.max(axis=2)  # a block of negative ids: high is negative


def _any_of_mask(mask: Array, blocks_q: int, blocks_kv: int, tiling: Tiling) -> Any:
    mask = mask.any(axis=(1, 2))
    for axis, blocks, size in ((1, blocks_q, tiling.q), (2, blocks_kv, tiling.kv)):
        if mask.shape[axis] > 1:
            mask = padded(mask, axis, blocks * size)
            shape = (*mask.shape[:axis], blocks, size, *mask.shape[axis + 1 :])
            mask = mask.reshape(shape).any(axis=axis + 1)
    return mask


def _lists(meets: Any, xp: Any) -> Lists:
    number = np.arange(meets.shape[2], dtype=np.int32)
    order = xp.sort(xp.where(meets, number, np.int32(meets.shape[2])), axis=2)
    return Lists(meets.sum(axis=2).astype(np.int32), order)


def row_lists(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> Lists:
    """For each block of rows, the blocks of keys of which it may see something."""
    return _lists(*_meets(hidden, tiling, q_len, kv_len))


def key_lists(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> Lists:
    """For each block of keys, the blocks of rows that may see something of it."""
    meets, xp = _meets(hidden, tiling, q_len, kv_len)
    return _lists(xp.swapaxes(meets, 1, 2), xp)


def tile(
    hidden: Hidden,
    at: Place,
    tiling: Tiling,
    owned_from: Array | None,
) -> Tile:
    """Returns what is visible within one tile.

    Args:
        hidden: What hides keys from rows.
        at: Where the tile is.
        tiling: Its sizes.
        owned_from: Keys before this one belong to another tile; None if none does.
    """
    row = at.row + lax.iota(jnp.int32, tiling.q)
    key = at.key + lax.iota(jnp.int32, tiling.kv)
    # Of each key: whether it counts at all, and whether one of the rows sees it. A
    # row sees a range of keys, and the ranges of following rows overlap.
    counts, by_row, both = [], [], []
    row_end = at.row + tiling.q
    if owned_from is not None:
        counts.append(key >= owned_from)
    if hidden.kv_lengths is not None:
        counts.append(key < hidden.kv_lengths[at.sample])
    key_seen = list(counts)
    if hidden.q_lengths is not None:
        length = hidden.q_lengths[at.sample]
        by_row.append(row < length)
        row_end = jnp.minimum(row_end, length)
        key_seen.append(jnp.broadcast_to(at.row < length, key.shape))
    if hidden.first is not None:
        first = _of(hidden.first, at.sample)
        both.append(key[None, :] >= first + row[:, None])
        key_seen.append(key >= first + at.row)
    if hidden.last is not None:
        last = _of(hidden.last, at.sample)
        both.append(key[None, :] <= last + row[:, None])
        key_seen.append(key < last + row_end)
    parts = [x[None, :] for x in counts] + [x[:, None] for x in by_row] + both
    if hidden.q_ids is not None:
        q_ids = lax.dynamic_slice(hidden.q_ids, (at.sample, at.row), (1, tiling.q))[0]
        kv_ids = lax.dynamic_slice(hidden.kv_ids, (at.sample, at.key), (1, tiling.kv))
        parts.append((q_ids[:, None] == kv_ids) & (q_ids >= 0)[:, None])
    parts = [part[None, None] for part in parts]
    if hidden.mask is not None:
        parts.append(at.of(hidden.mask, tiling))
    if not parts:
        return Tile(None, None)
    visible = functools.reduce(jnp.logical_and, parts)
    if hidden.mask is not None or hidden.q_ids is not None:  # no ranges: look
        return Tile(visible, visible.any(axis=(1, 2)))
    return Tile(visible, functools.reduce(jnp.logical_and, key_seen)[None])


def _of(x: Any, sample: Array) -> Any:
    return x[0] if x.shape[0] == 1 else x[sample]
