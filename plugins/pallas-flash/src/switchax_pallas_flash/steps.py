"""Which tiles a kernel visits, and in which order: nothing is done where nobody sees.

A kernel's innermost loop is a list of steps, each a tile of rows and keys, read from
scalar memory. What positions, lengths, ids and masks decide is known per tile before
the kernel starts; where all of it is static, so is the list, and it is as short as can
be.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from switchax import MaskPattern

from .patterns import sees_of

__all__ = ["Hidden", "Steps", "bounds", "key_steps", "row_steps"]

_INT = np.iinfo(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """What hides keys from rows; None hides nothing.

    Rows and keys are padded to whole blocks; rows that fill a block are nobody's.

    Attributes:
        first: int32 `[batch | 1, q_len]`: the first key that a row may see, from 0;
            None is 0 for all.
        end: int32 `[batch | 1, q_len]`: the first key after them, at most kv_len.
        q_ids: int32 `[batch, q_len]`; -1 matches nothing.
        kv_ids: int32 `[batch, kv_len]`; -2 matches nothing.
        mask: bool `[batch | 1, heads | 1, q_len, kv_len]`, True takes part.
    """

    first: Any = None
    end: Any = None
    q_ids: Array | None = None
    kv_ids: Array | None = None
    mask: Array | None = None

    @property
    def lower(self) -> Any:
        """`first` of a call that has an `end`, as an array."""
        if self.first is not None:
            return self.first
        return (np if isinstance(self.end, np.ndarray) else jnp).zeros_like(self.end)


class Steps(NamedTuple):
    """A list of steps, each a block of one side and a span of the other; int32.

    A span is as many chunks as a kernel holds at once.

    Attributes:
        block: `[batch | 1, steps]`: which block.
        span: `[batch | 1, steps]`: which span of the other side.
        ends: `[batch | 1, steps]`: FIRST at the first step of a block, plus LAST at its
            last.
        whole: `[batch | 1, steps]`: how many chunks are seen whole by all of the block.
        count: `[batch | 1, steps]`: how many are visited, those first.
        chunk: `[batch | 1, steps, chunks]`: which, by their number in the span.
        tile: `[batch | 1, steps]`: which tile of a table it has; None without one.
    """

    block: Any
    span: Any
    ends: Any
    whole: Any
    count: Any
    chunk: Any
    tile: Any = None


NOTHING, PARTLY, WHOLLY = 0, 1, 2
FIRST, LAST = 1, 2


def bounds(
    q_len: int,
    kv_len: int,
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: Any,
    q_lengths: Array | None,
    kv_lengths: Array | None,
) -> tuple[Any, Any]:
    """Returns `first` and `end` of `Hidden`; None where they hide nothing.

    A row past its length sees nothing: its end is its first. Offset and window are
    within a quarter of int32, as core hands them over.
    """
    left, right = window if window is not None else (None, None)
    right = 0 if causal else right
    is_static = isinstance(q_offset, int | np.integer)
    if left is None and right is None and q_lengths is None and kv_lengths is None:
        return None, None
    lengths = q_lengths is not None or kv_lengths is not None
    xp: Any = np if is_static and not lengths else jnp
    row = np.arange(q_len, dtype=np.int32)[None]
    offset = xp.asarray(q_offset, np.int32).reshape(-1, 1)
    first = xp.zeros((1, q_len), np.int32)
    end = xp.full((1, q_len), kv_len, np.int32)
    # Beyond these a bound means the same to every row, and within them none wraps.
    if left is not None:
        low = xp.clip(offset - np.int32(left), -q_len, kv_len)
        first = xp.clip(low + row, 0, kv_len)
    if right is not None:
        high = xp.clip(offset + np.int32(right), -q_len, kv_len)
        end = xp.clip(high + row + np.int32(1), 0, kv_len)
    if kv_lengths is not None:
        end = xp.minimum(end, xp.clip(kv_lengths, 0, kv_len).reshape(-1, 1))
    if q_lengths is not None:
        end = xp.where(row < q_lengths.reshape(-1, 1), end, np.int32(0))
    first, end = xp.broadcast_arrays(first.astype(np.int32), end.astype(np.int32))
    return first if left is not None else None, end


def _sorts(
    hidden: Hidden,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
    pattern: MaskPattern | None,
) -> Any:
    """Returns NOTHING, PARTLY or WHOLLY of each tile, `[batch | 1, rows, keys]`.

    Args:
        hidden: Padded to at least whole blocks, but for first and end.
        q_len: Rows that are somebody's.
        kv_len: Keys that are.
        block_q: Rows of a block.
        block_kv: Keys of a block.
        pattern: Of q_len and kv_len, or None.
    """
    leaves = jax.tree.leaves(hidden)
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in leaves) else np
    blocks_q, blocks_kv = -(-q_len // block_q), -(-kv_len // block_kv)
    key = np.arange(blocks_kv, dtype=np.int32).reshape(1, 1, -1) * np.int32(block_kv)
    key_end = key + np.int32(block_kv)
    some: Any = np.ones((1, blocks_q, blocks_kv), bool)
    all_: Any = some & (key_end <= kv_len)
    if pattern is not None:
        sees_some, sees_all = sees_of(pattern, block_q, block_kv)
        some, all_ = some & sees_some, all_ & sees_all
    if hidden.end is not None:
        given = hidden.lower, hidden.end
        first, end = (_by_block(xp, x, blocks_q, block_q) for x in given)
        # A row that sees nothing has no say in what the others see.
        sees = end > first
        low = xp.where(sees, first, _INT.max).min(axis=2)[..., None]
        high = xp.where(sees, end, 0).max(axis=2)[..., None]
        some = some & (low < key_end) & (high > key)
        all_ = all_ & (first.max(axis=2)[..., None] <= key)
        all_ = all_ & (end.min(axis=2)[..., None] >= key_end)
    if hidden.q_ids is not None:
        q_low, q_high, q_one = _ids(hidden.q_ids, blocks_q, block_q, axis=2)
        kv_low, kv_high, kv_one = _ids(hidden.kv_ids, blocks_kv, block_kv, axis=1)
        some = some & (q_low <= kv_high) & (kv_low <= q_high)
        all_ = all_ & q_one & kv_one & (q_low == kv_low)
    if hidden.mask is not None:
        shape = (hidden.mask.shape[0], -1, blocks_q, block_q, blocks_kv, block_kv)
        # What is copied at once may reach beyond the last block.
        rows, keys = blocks_q * block_q, blocks_kv * block_kv
        tiles = hidden.mask[:, :, :rows, :keys].reshape(shape)
        some = some & tiles.any(axis=(1, 3, 5))
        all_ = all_ & tiles.all(axis=(1, 3, 5))
    some, all_ = xp.broadcast_arrays(some, all_)
    return xp.where(some, xp.where(all_, WHOLLY, PARTLY), NOTHING).astype(np.int32)


def _by_block(xp: Any, x: Any, number: int, size: int) -> Any:
    """Splits rows into blocks; the last row fills the last block."""
    missing = max(number * size - x.shape[1], 0)
    x = xp.pad(x, ((0, 0), (0, missing)), mode="edge")
    return x[:, : number * size].reshape(x.shape[0], number, size)


def _ids(ids: Any, number: int, size: int, axis: int) -> tuple[Any, Any, Any]:
    """Returns each block's least and greatest id from 0, and whether it has but one."""
    blocks = ids[:, : number * size].reshape(ids.shape[0], number, size)
    low = jnp.where(blocks < 0, _INT.max, blocks).min(axis=2)
    high = blocks.max(axis=2)
    is_one = (blocks.min(axis=2) == high) & (high >= 0)
    low, high, is_one = (jnp.expand_dims(x, axis) for x in (low, high, is_one))
    return low, high, is_one


def row_steps(
    hidden: Hidden,
    q_len: int,
    kv_len: int,
    block: int,
    chunk: int,
    chunks: int,
    pattern: MaskPattern | None = None,
) -> Steps:
    """Lists steps by blocks of rows: the spans of keys that they see.

    Args:
        hidden: What hides keys from rows.
        q_len: Rows that are somebody's.
        kv_len: Keys that are.
        block: Rows of a block.
        chunk: Keys of a chunk.
        chunks: Chunks of a span.
        pattern: Hides keys too.
    """
    return _steps(_sorts(hidden, q_len, kv_len, block, chunk, pattern), chunks)


def key_steps(
    hidden: Hidden,
    q_len: int,
    kv_len: int,
    block: int,
    chunk: int,
    chunks: int,
    pattern: MaskPattern | None = None,
) -> Steps:
    """Lists steps by blocks of keys: the spans of rows that see them; see above."""
    sorts = _sorts(hidden, q_len, kv_len, chunk, block, pattern)
    return _steps(sorts.swapaxes(1, 2), chunks)


def _steps(sorts: Any, chunks: int) -> Steps:
    is_static = isinstance(sorts, np.ndarray)
    xp: Any = np if is_static else jnp
    batch, blocks, number = sorts.shape
    spans = -(-number // chunks)
    sorts = xp.pad(sorts, ((0, 0), (0, 0), (0, spans * chunks - number)))
    sorts = sorts.reshape(batch, blocks * spans, chunks)
    # Those that are seen whole come first, those that nobody sees last.
    index = np.arange(chunks, dtype=np.int32)[None, None]
    chunk = xp.sort((WHOLLY - sorts) * np.int32(chunks) + index, axis=2)
    chunk = (chunk % np.int32(chunks)).astype(np.int32)
    whole = (sorts == WHOLLY).sum(axis=2).astype(np.int32)
    count = (sorts > NOTHING).sum(axis=2).astype(np.int32)
    each = np.arange(blocks * spans, dtype=np.int32)
    block, span = (x[None] for x in (each // np.int32(spans), each % np.int32(spans)))
    if is_static:
        return _listed(block, span, whole, count, chunk, blocks)
    ends = FIRST * (span == 0) + LAST * (span == spans - 1)
    # What is not visited is not copied: it is the span that was visited before.
    last = xp.where(count > 0, each, np.int32(-1))
    last = jax.lax.cummax(last, axis=1)
    span = xp.where(last < 0, np.int32(0), last % np.int32(spans))
    shape = (batch, blocks * spans)
    block, ends = (jnp.broadcast_to(x, shape) for x in (block, ends.astype(np.int32)))
    return Steps(block, span.astype(np.int32), ends, whole, count, chunk)


def _listed(
    block: Any, span: Any, whole: Any, count: Any, chunk: Any, blocks: int
) -> Steps:
    """Lists what is visited alone; a block that sees nothing has one step all the same.

    All of it is of numpy, and the same for all samples.
    """
    kept = count[0] > 0
    empty = np.setdiff1d(np.arange(blocks), block[0][kept])
    kept[np.searchsorted(block[0], empty)] = True
    block, span, whole, count = (x[:, kept] for x in (block, span, whole, count))
    is_first = np.diff(block[0], prepend=-1) > 0
    is_last = np.diff(block[0], append=blocks) > 0
    ends = (FIRST * is_first + LAST * is_last).astype(np.int32)[None]
    return Steps(block, span, ends, whole, count, chunk[:, kept])
