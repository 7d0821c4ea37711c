"""From a call of attention to the kernels, and back: padding, dirt, derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from switchax import MaskPattern
from switchax.kinds.attention import share_with_sinks

from .backward import bias_gradient, gradients_of
from .blocks import PallasFlashConfig, blocks_for, shape_class
from .forward import attend_rows
from .patterns import first_rows, packed_pairs
from .static import Operands, Static
from .steps import Hidden, bounds

__all__ = ["attend"]

PACKED = 64
"""Up to as many rows of each head, the heads of a group share the rows of a tile."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Array | int = 0,
    logits_soft_cap: float | None = None,
    softmax_aux: Array | None = None,
    mask_pattern: MaskPattern | None = None,
    config: PallasFlashConfig | None = None,
    operation: str = "pallas_flash",
    generation: str = "v6e",
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Computes attention.

    Args:
        q: `[batch, heads, q_len, head_dim]`.
        k: `[batch, kv_heads, kv_len, head_dim]`.
        v: `[batch, kv_heads, kv_len, v_head_dim]`.
        softmax_scale: Factor of the logits.
        bias: Floating, broadcastable to `[batch, heads, q_len, kv_len]`, or None.
        mask: bool, likewise; True takes part.
        q_segment_ids: int32 `[batch, q_len]`; a negative id matches nothing.
        kv_segment_ids: int32 `[batch, kv_len]`.
        q_lengths: int32 `[batch]`.
        kv_lengths: int32 `[batch]`.
        causal: Whether keys after the row's own are hidden.
        window: `(left, right)`; None on a side is unlimited.
        q_offset: int, int32 scalar or int32 `[batch]`: key position of row 0.
        logits_soft_cap: Positive, or None.
        softmax_aux: `[heads]` or `[heads, num_sinks]`, or None.
        mask_pattern: `[q_len, kv_len]`, or None; tiles that it hides are not visited.
        config: Sizes of blocks.
        operation: Who is asked, for messages.
        generation: Of the chip, whose memories and fastest sizes count.
        interpret: As `pl.pallas_call` takes it.

    Returns:
        Output `[batch, heads, q_len, v_head_dim]` in q's dtype, or float32 beside
        sinks, and lse `[batch, heads, q_len]` in float32.
    """
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len, v_head_dim = v.shape[1:]
    if 0 in (batch, heads, q_len, kv_len, v_head_dim):
        output = jnp.zeros((batch, heads, q_len, v_head_dim), q.dtype)
        lse = jnp.full((batch, heads, q_len), -jnp.inf, jnp.float32)
        return _with_sinks(output, lse, softmax_aux)
    if q.shape[3] == 0:  # all logits are 0, which a kernel is not asked for
        q, k = (jnp.zeros((*x.shape[:3], 1), x.dtype) for x in (q, k))
    if softmax_scale < 0:  # exact, and a maximum stays one
        q, softmax_scale = -q, -softmax_scale
    first, end = bounds(
        q_len,
        kv_len,
        causal=causal,
        window=window,
        q_offset=q_offset,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
    )
    hidden = Hidden(first, end, q_segment_ids, kv_segment_ids, mask)
    operands = Operands(q, k, v, bias)
    group = heads // kv_heads
    is_packed = group > 1 and q_len <= PACKED
    if is_packed:
        operands, hidden = _packed(operands, hidden, group)
        if mask_pattern is not None:
            mask_pattern = MaskPattern(np.tile(np.asarray(mask_pattern), (group, 1)))
    output, lse = _attend_padded(
        operands,
        hidden,
        config,
        scale=softmax_scale,
        cap=logits_soft_cap,
        pattern=mask_pattern,
        # It is scaled once more, and rounded after that.
        output=str(q.dtype) if softmax_aux is None else "float32",
        operation=operation,
        generation=generation,
        interpret=interpret,
    )
    if is_packed:
        output, lse = (
            x.reshape(batch, heads, q_len, *x.shape[3:]) for x in (output, lse)
        )
    return _with_sinks(output, lse, softmax_aux)


def _packed(operands: Operands, hidden: Hidden, group: int) -> tuple[Operands, Hidden]:
    """Makes the rows of all heads of a group those of one head."""
    q, k, v, bias = operands
    batch, heads, q_len, head_dim = q.shape
    kv_heads = heads // group

    def rows(x: Any) -> Any:
        """Of `[batch | 1, q_len]`."""
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        return None if x is None else xp.tile(x, (1, group))

    def tiles(x: Array | None) -> Array | None:
        """Of bias or mask."""
        if x is None:
            return None
        shape = (x.shape[0], heads if x.shape[1] > 1 else 1, x.shape[2], x.shape[3])
        if x.shape[1] == 1 and x.shape[2] == 1:
            return x
        of_heads = kv_heads if x.shape[1] > 1 else 1
        each = x.reshape(x.shape[0], of_heads, -1, *shape[2:])
        size = (x.shape[0], of_heads, group, q_len, x.shape[3])
        each = jnp.broadcast_to(each, size)
        return each.reshape(x.shape[0], of_heads, group * q_len, x.shape[3])

    q = q.reshape(batch, kv_heads, group * q_len, head_dim)
    hidden = dataclasses.replace(
        hidden,
        first=rows(hidden.first),
        end=rows(hidden.end),
        q_ids=rows(hidden.q_ids),
        mask=tiles(hidden.mask),
    )
    return Operands(q, k, v, tiles(bias)), hidden


def _attend_padded(
    operands: Operands,
    hidden: Hidden,
    config: PallasFlashConfig | None,
    **options: Any,
) -> tuple[Array, Array]:
    """Brings operands to whole blocks, without what nobody sees."""
    q, k, v, bias = operands
    q_len, kv_len, v_head_dim = q.shape[2], *v.shape[2:]
    hidden = _without_thin_masks(hidden, q, kv_len)
    shape = shape_class(str(q.dtype), max(q.shape[3], v_head_dim))
    tile_bytes = (hidden.mask is not None) + (options["pattern"] is not None)
    if bias is not None and 1 not in bias.shape[2:]:
        tile_bytes += bias.dtype.itemsize
    forward, backward, rows, keys = blocks_for(
        options["generation"], shape, q_len, kv_len, tile_bytes, config
    )
    if bias is not None and bias.shape[2:] == (1, 1):  # kernels slice rows or keys
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], rows, 1))
    lengths = {"q_len": q_len, "kv_len": kv_len}
    static = Static(forward=forward, backward=backward, **lengths, **options)
    k, v = _without_unseen(k, v, hidden, q.shape[1], static.pattern)

    def padded(x: Any, axis: int, size: int, fill: Any = 0) -> Any:
        if x is None or x.shape[axis] in (1, size):
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        return xp.pad(x, widths, constant_values=fill)

    def grown(x: Array, axis: int, size: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths)

    def tile(x: Any) -> Any:
        return padded(padded(x, 2, rows), 3, keys)

    q, k, v = grown(q, 2, rows), grown(k, 2, keys), grown(v, 2, keys)
    q_ids, kv_ids = hidden.q_ids, hidden.kv_ids
    if q_ids is not None:
        q_ids = grown(jnp.maximum(q_ids, -1) + 1, 1, rows) - 1
        kv_ids = grown(jnp.where(kv_ids < 0, -2, kv_ids) + 2, 1, keys) - 2
    mask = hidden.mask
    if mask is not None:
        shape = (*mask.shape[:2], q_len, kv_len)
        mask = grown(grown(jnp.broadcast_to(mask, shape), 2, rows), 3, keys)
    first, end = hidden.first, hidden.end
    if end is None and kv_len != keys:  # the last block of keys has an end
        end = np.full((1, q_len), kv_len, np.int32)
    # Rows that fill a block are as the last, so that they decide nothing.
    first, end = (_edge(x, rows) for x in (first, end))
    hidden = Hidden(first, end, q_ids, kv_ids, mask)
    output, lse = _attend(static, Operands(q, k, v, tile(bias)), hidden)
    return output[:, :, :q_len], lse[:, :, :q_len]


def _edge(x: Any, rows: int) -> Any:
    if x is None:
        return None
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, rows - x.shape[1])), mode="edge")


def _without_thin_masks(hidden: Hidden, q: Array, kv_len: int) -> Hidden:
    """Turns a mask that all heads share, of rows or keys alone, into ids or ends."""
    mask = hidden.mask
    if mask is None or mask.shape[1] > 1 or 1 not in mask.shape[2:]:
        return hidden
    batch, q_len = q.shape[0], q.shape[2]
    keys = jnp.broadcast_to(mask[:, 0, :1, :], (mask.shape[0], 1, kv_len))[:, 0]
    rows = jnp.broadcast_to(mask[:, 0, :, :1], (mask.shape[0], q_len, 1))[..., 0]
    q_ids, kv_ids = hidden.q_ids, hidden.kv_ids
    if q_ids is None:
        q_ids = jnp.zeros((batch, q_len), jnp.int32)
        kv_ids = jnp.zeros((batch, kv_len), jnp.int32)
    if mask.shape[2] == 1:
        kv_ids = jnp.where(keys, kv_ids, -1)
    else:
        q_ids = jnp.where(rows, q_ids, -1)
    return dataclasses.replace(hidden, q_ids=q_ids, kv_ids=kv_ids, mask=None)


def _without_unseen(
    k: Array, v: Array, hidden: Hidden, heads: int, pattern: MaskPattern | None
) -> tuple[Array, Array]:
    """Puts 0 where no row sees a key: it may hold NaN, and 0 * NaN is NaN."""
    kv_len, kv_heads = k.shape[2], k.shape[1]
    seen = None
    by_position = hidden.q_ids is None and hidden.mask is None
    is_static = by_position and not isinstance(hidden.end, jax.Array)
    if pattern is not None and is_static:
        edges = (None if x is None else x[0] for x in (hidden.first, hidden.end))
        seen = first_rows(pattern, *edges) < pattern.q_len
        if seen.all():
            return k, v
        seen = jnp.asarray(seen)[None, None]
    elif pattern is None and by_position:
        if hidden.end is None:
            return k, v
        # The keys of following rows are a range that moves by one: so is the union.
        xp: Any = np if isinstance(hidden.end, np.ndarray) else jnp
        sees = hidden.end > hidden.lower
        low = xp.where(sees, hidden.lower, kv_len).min(axis=1)[:, None]
        high = xp.where(sees, hidden.end, 0).max(axis=1)[:, None]
        key = np.arange(kv_len, dtype=np.int32)[None]
        seen = (key >= low) & (key < high)
        if isinstance(seen, np.ndarray) and seen.all():
            return k, v
        seen = jnp.asarray(seen)[:, None]
    else:
        # XLA fuses this into a reduction: nothing of q_len x kv_len is written.
        visible: Any = True
        if hidden.end is not None:
            key = np.arange(kv_len, dtype=np.int32)[None, None, None]
            first, end = (jnp.asarray(x) for x in (hidden.lower, hidden.end))
            visible = (key >= first[:, None, :, None]) & (key < end[:, None, :, None])
        if hidden.q_ids is not None:
            q_ids = hidden.q_ids[:, None, :, None]
            visible &= (q_ids == hidden.kv_ids[:, None, None, :]) & (q_ids >= 0)
        if hidden.mask is not None:
            visible &= hidden.mask
        if pattern is not None:
            visible &= _pairs_of(pattern)
        seen = visible.any(axis=2)
        seen = jnp.broadcast_to(seen, (*seen.shape[:2], kv_len))
        if seen.shape[1] > 1:
            seen = seen.reshape(seen.shape[0], kv_heads, -1, kv_len).any(axis=2)
    seen = seen[..., None]
    return jnp.where(seen, k, 0), jnp.where(seen, v, 0)


def _pairs_of(pattern: MaskPattern) -> Array:
    """Returns all pairs of a pattern, of which the program holds a bit each."""
    packed = jnp.asarray(packed_pairs(pattern))
    place = np.arange(7, -1, -1, dtype=np.uint8)[None, None]
    bits = jnp.right_shift(packed[..., None], place) & 1
    return bits.reshape(packed.shape[0], -1)[None, None, :, : pattern.kv_len] > 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, operands: Operands, hidden: Hidden) -> tuple[Array, Array]:
    output, lse = attend_rows(static, operands, hidden)
    return output.swapaxes(2, 3), lse


def _forward(static: Static, operands: Operands, hidden: Hidden) -> Any:
    output, lse = attend_rows(static, operands, hidden)
    return (output.swapaxes(2, 3), lse), (operands, hidden, output, lse)


def _backward(static: Static, residuals: Any, cotangents: Any) -> Any:
    operands, hidden, output, lse = residuals
    d_output, d_lse = cotangents
    q, k, v, bias = operands
    is_empty = lse == -jnp.inf
    # A row that sees nothing may hold anything, its cotangent too.
    q = jnp.where(is_empty[..., None], 0, q)
    d_output = jnp.where(is_empty[..., None], 0, d_output).swapaxes(2, 3)
    product = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    delta = product.sum(axis=2) - jnp.where(is_empty, 0, d_lse)
    lse = jnp.where(is_empty, jnp.inf, lse)
    operands = Operands(q, k, v, bias)
    given = static, operands, hidden, lse, d_output, delta
    d_q, d_k, d_v = gradients_of(*given)
    d_q = (d_q.swapaxes(2, 3) * static.scale).astype(q.dtype)
    d_k, d_v = (
        x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:]).sum(axis=2)
        for x in (d_k, d_v)
    )
    d_k = (d_k.swapaxes(2, 3) * static.scale).astype(k.dtype)
    d_bias = None
    if bias is not None:
        d_bias = bias_gradient(*given).astype(bias.dtype)
    zeros = jax.tree.map(_no_gradient, hidden)
    return Operands(d_q, d_k, d_v.astype(v.dtype), d_bias), zeros


def _no_gradient(x: Any) -> Any:
    return np.zeros(np.shape(x), jax.dtypes.float0)


_attend.defvjp(_forward, _backward)


def _with_sinks(
    output: Array, lse: Array, softmax_aux: Array | None
) -> tuple[Array, Array]:
    if softmax_aux is None:
        return output, lse
    share, total = share_with_sinks(lse, softmax_aux)
    shared = output.astype(jnp.float32) * share[..., None]
    # Where no key is seen, a cotangent of the output may be anything.
    shared = jnp.where((lse == -jnp.inf)[..., None], 0, shared)
    return shared.astype(output.dtype), total
