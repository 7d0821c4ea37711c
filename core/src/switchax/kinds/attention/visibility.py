"""Which key is visible to which query row (R3), as boolean arrays.

Shared by core's adaptation and by plain operations. Axes are always
`[batch, heads, q_len, kv_len]`, each possibly of size 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from .pattern import MaskPattern

__all__ = ["position_mask", "seen", "sees_everything", "visibility"]


def visibility(
    *,
    q_len: int,
    kv_len: int,
    mask: Any = None,
    mask_pattern: MaskPattern | None = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = 0,
) -> Any:
    """Combines everything that hides keys into one mask.

    Args:
        q_len: Number of query rows.
        kv_len: Number of keys.
        mask: bool, `[batch | 1, heads | 1, q_len | 1, kv_len | 1]`; True takes part.
        mask_pattern: A mask of these lengths, the same for all samples and heads.
        q_segment_ids: int32 `[batch, q_len]`; a negative id matches nothing.
        kv_segment_ids: int32 `[batch, kv_len]`.
        q_lengths: int32 `[batch]`.
        kv_lengths: int32 `[batch]`.
        causal: Whether keys after the row's own are hidden.
        window: `(left, right)`, None on a side is unlimited.
        q_offset: int, int32 scalar or int32 `[batch]`; key position of row 0.

    Returns:
        bool, broadcastable to `[batch, heads, q_len, kv_len]`, or None where every
        key is visible.
    """
    parts = [] if mask is None else [mask]
    if mask_pattern is not None:
        parts.append(jnp.asarray(np.asarray(mask_pattern))[None, None])
    if q_segment_ids is not None:
        q_ids = q_segment_ids[:, None, :, None]
        kv_ids = kv_segment_ids[:, None, None, :]
        parts.append((q_ids == kv_ids) & (q_ids >= 0))
    if q_lengths is not None:
        parts.append(_positions(q_len, 2) < q_lengths[:, None, None, None])
    if kv_lengths is not None:
        parts.append(_positions(kv_len, 3) < kv_lengths[:, None, None, None])
    if causal or window is not None:
        parts.append(position_mask(q_len, kv_len, causal, window, q_offset))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def position_mask(
    q_len: int,
    kv_len: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: Any = 0,
) -> Any:
    """The part of visibility that only positions decide.

    Args:
        q_len: Number of query rows.
        kv_len: Number of keys.
        causal: `j <= i + q_offset`.
        window: `i + q_offset - left <= j <= i + q_offset + right`.
        q_offset: int, int32 scalar or int32 `[batch]`.

    Returns:
        bool `[1 or batch, 1, q_len, kv_len]`.
    """
    offset = jnp.asarray(q_offset, jnp.int32).reshape(-1, 1, 1, 1)
    row, key = _positions(q_len, 2) + offset, _positions(kv_len, 3)
    left, right = _bounds(causal, window)
    visible = jnp.ones((1, 1, q_len, kv_len), jnp.bool_)
    if left is not None:
        visible &= key >= row - left
    if right is not None:
        visible &= key <= row + right
    return visible


def _positions(length: int, axis: int) -> Any:
    """0, 1, 2, ... along one axis of four."""
    others = [other for other in range(4) if other != axis]
    return jnp.expand_dims(jnp.arange(length, dtype=jnp.int32), others)


def _bounds(
    causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    left, right = window if window is not None else (None, None)
    return left, 0 if causal else right


def sees_everything(
    q_len: int,
    kv_len: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: int = 0,
) -> bool:
    """Whether, by position alone, every row sees a key and every key is seen.

    Then there is neither an empty row (R6) nor a dirty key (R7) to take care of.

    Args:
        q_len: Number of query rows.
        kv_len: Number of keys.
        causal: As in `position_mask`.
        window: As in `position_mask`.
        q_offset: A static offset.
    """
    left, right = _bounds(causal, window)
    row = np.arange(q_len, dtype=np.int64) + q_offset
    first = np.zeros(q_len, np.int64) if left is None else np.maximum(row - left, 0)
    last = np.full(q_len, kv_len - 1)
    if right is not None:
        last = np.minimum(row + right, kv_len - 1)
    if not (first <= last).all():
        return False
    # first and last never decrease, so the keys seen are one range without gaps as
    # long as each row starts at most one past the end of the row before it.
    if not q_len:
        return kv_len == 0
    gaps = (first[1:] > last[:-1] + 1).any()
    return bool(first[0] == 0 and last[-1] == kv_len - 1 and not gaps)


def seen(visible: Any, kv_heads: int) -> tuple[Any, Any]:
    """Which rows see a key, and which keys are seen by a row of their sample.

    Args:
        visible: bool `[batch | 1, heads | 1, q_len | 1, kv_len | 1]`.
        kv_heads: Number of kv heads, for grouping.

    Returns:
        `row_sees` bool `[batch | 1, heads | 1, q_len | 1]` and `key_seen` bool
        `[batch | 1, kv_heads | 1, kv_len | 1]`.
    """
    key_seen = visible.any(axis=2)
    batch, heads, kv_len = key_seen.shape
    if heads > 1:
        key_seen = key_seen.reshape(batch, kv_heads, heads // kv_heads, kv_len).any(2)
    return visible.any(axis=3), key_seen
