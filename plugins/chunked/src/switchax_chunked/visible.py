"""What a block of rows sees of a block of keys, and which blocks need a visit at all.

Whatever only positions, lengths and ids decide is known per block before the loop
starts: blocks that nobody sees are never visited. Where all of it is static, so are
the lists of blocks, and they are made by numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .tiling import Place, Tiling, padded

__all__ = [
    "Hidden",
    "Lists",
    "Tile",
    "bounds",
    "key_lists",
    "row_lists",
    "span_lists",
    "tile",
]

_INT = np.iinfo(np.int32)
_FEW = 4
"""Tiles of a sample up to which all are treated as seen in part, if it is traced."""


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
    kv_ids: Any = None
    mask: Array | None = None


class Lists(NamedTuple):
    """For each block of one side, the blocks of the other side that it meets.

    Attributes:
        order: int32 `[batch | 1, blocks, other blocks]`: first the blocks of which
            every row sees every key, then those of which something may be seen.
        full: int32 `[batch | 1, blocks]`: how many are of the first sort.
        count: int32 `[batch | 1, blocks]`: how many are of either.
        some_full: Whether any block may be of the first sort.
        some_partial: Whether any block may be of the second.
        key: int32 `[batch | 1, blocks]`: the first key of the first block; None for 0.
    """

    order: Any
    full: Any
    count: Any
    some_full: bool
    some_partial: bool
    key: Any = None


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


class _Meetings(NamedTuple):
    """How blocks of rows and blocks of keys meet, `[batch | 1, q blocks, kv blocks]`.

    Attributes:
        some: bool: something may be seen.
        all: bool: every row sees every key.
    """

    some: Any
    all: Any


def _meetings(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> _Meetings:
    """Returns arrays of numpy where all is static, else of jax.numpy."""
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

    one = np.int32(1)
    row, key = starts(blocks_q, tiling.q, 1), starts(blocks_kv, tiling.kv, 2)
    # Rows that fill the last block are nobody's, whatever they see.
    last_row = np.minimum(row + np.int32(tiling.q), np.int32(q_len)) - one
    last_key = key + np.int32(tiling.kv) - one
    key_end = np.int32(kv_len)
    some: Any = (row < q_len) & (key < kv_len)
    # The last block of keys also holds some of the block before it.
    all_: Any = some & (last_key < kv_len)
    if hidden.q_lengths is not None:
        lengths = per_batch(hidden.q_lengths)
        some, all_ = some & (row < lengths), all_ & (last_row < lengths)
        last_row = xp.minimum(last_row, lengths - one)
    if hidden.kv_lengths is not None:
        lengths = per_batch(hidden.kv_lengths)
        some, all_ = some & (key < lengths), all_ & (last_key < lengths)
        key_end = xp.minimum(key_end, lengths)
    if hidden.first is not None:
        first = per_batch(hidden.first)
        some = some & (first + row <= xp.minimum(last_key, key_end - one))
        all_ = all_ & (first + last_row <= key)
    if hidden.last is not None:
        last = per_batch(hidden.last)
        some = some & (key <= last + last_row)
        all_ = all_ & (last_key <= last + row)
    if hidden.q_ids is not None:
        rows = _range_of_ids(hidden.q_ids, blocks_q, tiling.q)
        keys = _range_of_ids(hidden.kv_ids, blocks_kv, tiling.kv)
        (q_low, q_high, q_is_one), (kv_low, kv_high, kv_is_one) = (
            [x[:, :, None] for x in rows],
            [x[:, None, :] for x in keys],
        )
        some = some & (q_low <= kv_high) & (kv_low <= q_high)
        all_ = all_ & q_is_one & kv_is_one & (q_low == kv_low)
    if hidden.mask is not None:
        some = some & _of_mask(hidden.mask, blocks_q, blocks_kv, tiling, jnp.any)
        all_ = all_ & _of_mask(hidden.mask, blocks_q, blocks_kv, tiling, jnp.all)
    return _Meetings(*xp.broadcast_arrays(some, all_))


def _range_of_ids(ids: Any, blocks: int, size: int) -> tuple[Any, Any, Any]:
    """Returns each block's least and greatest id from 0, and whether it has but one."""
    ids = padded(ids, 1, blocks * size, -1).reshape(ids.shape[0], blocks, size)
    low = jnp.where(ids < 0, _INT.max, ids).min(axis=2)
    high = ids.max(axis=2)  # of a block of negative ids: negative
    return low, high, (ids.min(axis=2) == high) & (high >= 0)


def _of_mask(
    mask: Array, blocks_q: int, blocks_kv: int, tiling: Tiling, what: Any
) -> Any:
    """Reduces a mask to blocks, by `jnp.any` or `jnp.all`; what fills one is False."""
    mask = what(mask, axis=(1, 2))
    for axis, blocks, size in ((1, blocks_q, tiling.q), (2, blocks_kv, tiling.kv)):
        if mask.shape[axis] > 1:
            mask = padded(mask, axis, blocks * size)
            shape = (*mask.shape[:axis], blocks, size, *mask.shape[axis + 1 :])
            mask = what(mask.reshape(shape), axis=axis + 1)
    return mask


def _lists(some: Any, all_: Any) -> Lists:
    is_static = isinstance(some, np.ndarray)
    xp: Any = np if is_static else jnp
    if not is_static and math.prod(some.shape[1:]) <= _FEW:
        all_ = np.zeros(some.shape, bool)  # two loops are not worth compiling
    blocks = np.int32(some.shape[2])
    number = np.arange(blocks, dtype=np.int32).reshape(1, 1, -1)
    sort = xp.where(all_, np.int32(0), xp.where(some, np.int32(1), np.int32(2)))
    order = xp.sort(sort * blocks + number, axis=2) % blocks
    full, count = (x.sum(axis=2).astype(np.int32) for x in (all_, some))
    return Lists(
        order,
        full,
        count,
        bool(full.any()) if isinstance(full, np.ndarray) else True,
        bool((full < count).any()) if is_static else True,
    )


def row_lists(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> Lists:
    """For each block of rows, the blocks of keys of which it may see something."""
    return _lists(*_meetings(hidden, tiling, q_len, kv_len))


def span_lists(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> Lists:
    """As `row_lists`, of blocks that start with the first key that the rows see."""
    xp: Any = np if isinstance(hidden.first, np.ndarray) else jnp
    blocks_q, _ = tiling.blocks(q_len, kv_len)
    row = np.arange(blocks_q, dtype=np.int32)[None] * np.int32(tiling.q)
    last_row = np.minimum(row + np.int32(tiling.q), np.int32(q_len)) - np.int32(1)
    key = xp.clip(hidden.first[:, None] + row, 0, kv_len)
    end = xp.clip(hidden.last[:, None] + last_row + np.int32(1), 0, kv_len)
    if hidden.kv_lengths is not None:  # of any int32, below which nothing wraps
        end = jnp.minimum(end, jnp.maximum(hidden.kv_lengths[:, None], 0))
    count = (jnp if isinstance(end, jax.Array) else xp).maximum(
        -((key - end) // np.int32(tiling.kv)), 0
    )
    if hidden.q_lengths is not None:
        count = jnp.where(row < hidden.q_lengths[:, None], count, 0)
    most = -(-kv_len // tiling.kv)
    order = np.arange(most, dtype=np.int32).reshape(1, 1, -1)
    shape = (*count.shape, most)
    order = np.broadcast_to(order, shape)
    key = xp.broadcast_to(key, count.shape)
    return Lists(order, np.zeros(count.shape, np.int32), count, False, True, key)


def key_lists(hidden: Hidden, tiling: Tiling, q_len: int, kv_len: int) -> Lists:
    """For each block of keys, the blocks of rows that may see something of it."""
    meetings = _meetings(hidden, tiling, q_len, kv_len)
    return _lists(*(x.swapaxes(1, 2) for x in meetings))


def tile(
    hidden: Hidden,
    at: Place,
    tiling: Tiling,
    owned_from: Array | None,
    q_len: int,
) -> Tile:
    """Returns what is visible within one tile.

    Args:
        hidden: What hides keys from rows.
        at: Where the tile is.
        tiling: Its sizes.
        owned_from: Keys before this one belong to another tile; None if none does.
        q_len: Rows from this one on are nobody's, and see nothing.
    """
    row = at.row + lax.iota(jnp.int32, tiling.q)
    key = at.key + lax.iota(jnp.int32, tiling.kv)
    # Of each key: whether it counts at all, and whether one of the rows sees it. A
    # row sees a range of keys, and the ranges of following rows overlap.
    counts, by_row, both = [], [], []
    row_end = at.row + tiling.q
    if q_len % tiling.q:
        by_row.append(row < q_len)
        row_end = jnp.minimum(row_end, np.int32(q_len))
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
        parts.append(at.take(hidden.mask, "bhgqk", tiling))
    if not parts:
        return Tile(None, None)
    visible = functools.reduce(jnp.logical_and, parts)
    if hidden.mask is not None or hidden.q_ids is not None:  # no ranges: look
        return Tile(visible, visible.any(axis=(1, 2)))
    return Tile(visible, functools.reduce(jnp.logical_and, key_seen)[None])


def _of(x: Any, sample: Array) -> Any:
    return x[0] if x.shape[0] == 1 else x[sample]
