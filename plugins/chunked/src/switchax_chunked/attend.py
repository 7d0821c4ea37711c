"""From a call of attention to the loops over tiles, and sinks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from switchax.kinds.attention import share_with_sinks

from .kernel import attend_keys
from .logits import Operands, Static, precise
from .tiling import (
    SHORT,
    USUAL_CACHE,
    ChunkedConfig,
    cache_of_a_core,
    padded,
    tiling_for,
)
from .varying import made_varying, varying_alike, varying_axes
from .visible import Hidden, bounds

__all__ = ["attend", "prepared"]


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
    dropout_prob: float = 0.0,
    dropout_key: Array | None = None,
    config: ChunkedConfig | None = None,
    exact: bool = False,
) -> tuple[Array, Array]:
    """Computes attention in memory that grows as the operands do.

    Args:
        q: `[batch, q_len, heads, head_dim]`.
        k: `[batch, kv_len, kv_heads, head_dim]`.
        v: `[batch, kv_len, kv_heads, v_head_dim]`.
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
        dropout_prob: In [0, 1).
        dropout_key: A PRNG key, needed with `dropout_prob`.
        config: Sizes of blocks.
        exact: Whether weights must not be rounded to half precision.

    Returns:
        Output `[batch, q_len, heads, v_head_dim]` and lse `[batch, heads, q_len]`, both
        in float32, or float64 for float64.
    """
    batch, q_len, heads, _ = q.shape
    kv_len, v_head_dim = v.shape[1], v.shape[3]
    if 0 in (batch, q_len, heads, kv_len):
        # Nothing is seen; or there is nothing to see it.
        dtype = precise(q)
        output = jnp.zeros((batch, q_len, heads, v_head_dim), dtype)
        lse = jnp.full((batch, heads, q_len), -jnp.inf, dtype)
        output, lse = made_varying((output, lse), varying_axes((q, k, v)))
    else:
        # A product of numbers, and not of matrices, could be fused: see `below`.
        q, k = (padded(x, 3, max(q.shape[3], 2)) for x in (q, k))
        v = padded(v, 3, max(v_head_dim, 1))
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "bias": bias,
            "mask": mask,
            "q_segment_ids": q_segment_ids,
            "kv_segment_ids": kv_segment_ids,
            "q_lengths": q_lengths,
            "kv_lengths": kv_lengths,
            "q_offset": q_offset,
            "dropout_key": _counting(dropout_key) if dropout_prob > 0 else None,
        }
        arrays = varying_alike(arrays)
        key = arrays.pop("dropout_key")
        static, operands, hidden = prepared(
            **arrays,
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            logits_soft_cap=logits_soft_cap,
            dropout_prob=dropout_prob,
            config=config,
        )
        static = dataclasses.replace(static, is_exact=exact)
        output, lse = attend_keys(static, operands, hidden, key)
        output = output.reshape(batch, -1, heads, v.shape[3])[:, :q_len, :, :v_head_dim]
        lse = lse.reshape(batch, heads, -1)[:, :, :q_len]
    if softmax_aux is None:
        return output, lse
    return _with_sinks(output, lse, softmax_aux)


def prepared(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    bias: Array | None,
    mask: Array | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    q_offset: Array | int,
    logits_soft_cap: float | None,
    dropout_prob: float,
    config: ChunkedConfig | None,
) -> tuple[Static, Operands, Hidden]:
    """Brings a call, as `attend` takes it and without empty axes, to whole blocks."""
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    first, last = bounds(q_len, kv_len, causal, window, q_offset)
    reach = None
    if window is not None and window[0] is not None:
        right = 0 if causal else window[1]
        reach = None if right is None else window[0] + right + 1
    tiling = tiling_for(
        q_len,
        kv_len,
        kv_heads,
        group,
        is_banded=first is not None or last is not None,
        reach=reach,
        # What is dropped depends on the tiles, and must not on the machine.
        cache=USUAL_CACHE if dropout_prob > 0 else cache_of_a_core(),
        config=config,
    )
    rows = tiling.blocks(q_len, kv_len)[0] * tiling.q

    def by_group(x: Array | None, fill: float) -> Array | None:
        if x is None:
            return None
        split = (kv_heads, group) if x.shape[1] > 1 else (1, 1)
        x = x.reshape(x.shape[0], *split, *x.shape[2:])
        return x if x.shape[3] == 1 else padded(x, 3, rows, fill)

    q = padded(q, 1, rows).reshape(batch, rows, kv_heads, group, q.shape[3])
    operands = Operands(q, k, v, by_group(bias, 0))
    hidden = Hidden(
        first=first,
        last=last,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_ids=None if q_segment_ids is None else padded(q_segment_ids, 1, rows, -1),
        kv_ids=kv_segment_ids,
        mask=by_group(mask, False),
    )
    span = None
    if reach is not None and 4 * reach <= kv_len and q_len > SHORT:
        span = -(-(reach + tiling.q - 1) // 8) * 8
        span = min(kv_len, span)
    static = Static(
        tiling,
        softmax_scale,
        logits_soft_cap,
        dropout_prob,
        q_len,
        kv_len,
        span,
    )
    return static, operands, hidden


def _counting(key: Array | None) -> Array | None:
    """Returns a key of threefry, whose draws depend on nothing but the key.

    Of rbg, JAX's vmap draws for all examples from the first one's key. A tile is drawn
    by its number, and which tile an example is at differs between the two passes.
    """
    if key is None or jax.random.key_impl(key) == "threefry2x32":
        return key
    data = jax.random.bits(key, (2,), "uint32")
    found: Array = jax.random.wrap_key_data(data, impl="threefry2x32")
    return found


def _with_sinks(output: Array, lse: Array, softmax_aux: Array) -> tuple[Array, Array]:
    share, total = share_with_sinks(lse, softmax_aux)
    share, sees_none = (
        jnp.swapaxes(x, 1, 2)[..., None] for x in (share, lse == -jnp.inf)
    )
    # Where no key is seen, a cotangent of the output may be anything.
    return jnp.where(sees_none, 0, output * share), total
