"""`jax.nn.dot_product_attention`, corrected where its meaning differs from ours.

What it does otherwise, measured with JAX 0.10.2 on CPU, and what is done here:

- a row that sees no key gives the mean of value: such rows are set to 0 (R6);
- NaN in a masked key or value leaks, forward or backward: keys that nothing sees and
  rows that see nothing are set to 0 first (R7);
- a bias of -inf, or near finfo.min, loses against the number that JAX masks with, 0.7
  of finfo.min: -inf becomes part of the mask, a row of nothing else is empty (R6), and
  a bias near finfo.min is brought above that number;
- a scale that is no power of two gives NaN, or nothing at all, from logits of 1e9 on:
  float32 queries are scaled instead; half-precision logits stay as they are;
- the lse of half-precision inputs comes back rounded, and its derivative is dropped
  in silence: refused by the operation (R8, R11).

Nothing is added to a call that needs none of it.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from switchax.kinds.attention import position_mask, seen, sees_everything

__all__ = ["Implementation", "attend"]

Implementation = Literal["xla", "cudnn"]

# A quarter of float32's range; JAX masks with 0.7 of it. Halves of powers of two are
# exact: a logit that two fusions round in two ways would be NaN out there.
LOW = -(2.0**126)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    bias: Array | None,
    mask: Array | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    return_lse: bool,
    implementation: Implementation,
) -> tuple[Array, Array | None]:
    """Computes attention by JAX's own function.

    Args:
        q: `[batch, q_len, heads, head_dim]`.
        k: `[batch, kv_len, kv_heads, head_dim]`.
        v: `[batch, kv_len, kv_heads, head_dim]`.
        softmax_scale: Factor of the logits.
        bias: Floating `[batch | 1, heads | 1, q_len | 1, kv_len | 1]`, or None.
        mask: bool of such a shape, or None.
        causal: `j <= i`.
        window: `(left, right)`, None on a side is unlimited; or None.
        return_lse: Whether lse is computed.
        implementation: "xla" or "cudnn".

    Returns:
        Output `[batch, q_len, heads, head_dim]`, and lse `[batch, heads, q_len]` in
        float32 or None.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    visible = mask
    if (causal or window) and not sees_everything(q_len, kv_len, causal, window):
        positions = position_mask(q_len, kv_len, causal, window)
        visible = positions if visible is None else visible & positions
        causal, window = False, None
    if bias is not None:
        if implementation == "xla":  # first: its gradient is summed in this dtype
            bias = bias.astype(jnp.float32)
        bias, visible = _without_infinities(bias, visible)
        if implementation == "xla":
            bias = _above_masked(bias)
    row_sees = None
    if visible is not None:
        if causal or window:  # an empty row may come of the two together
            positions = position_mask(q_len, kv_len, causal, window)
            visible, causal, window = visible & positions, False, None
        row_sees, key_seen = seen(visible, k.shape[2])
        q = jnp.where(jnp.swapaxes(row_sees, 1, 2)[..., None], q, 0)
        key_seen = jnp.swapaxes(key_seen, 1, 2)[..., None]
        k, v = jnp.where(key_seen, k, 0), jnp.where(key_seen, v, 0)
    if window is not None:
        window = tuple(max(q_len, kv_len) if side is None else side for side in window)
    mantissa, exponent = math.frexp(softmax_scale)
    is_exact = abs(mantissa) == 0.5
    if implementation == "xla" and q.dtype == jnp.float32 and not is_exact:
        # JAX would scale the logits, and XLA may fuse that into the subtraction of
        # their maximum, which was rounded: from 1e9 on, the two differ by hundreds. A
        # power of two is exact.
        q, softmax_scale = q * (2 * mantissa), math.ldexp(1.0, exponent - 1)
    v_head_dim = v.shape[3]
    if implementation == "xla" and q.shape[3] == 1:
        # Nor may XLA fuse a product of numbers: with 0 beside, it is one of matrices.
        q, k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, 1),)) for x in (q, k, v))
    with jax.numpy_dtype_promotion("standard"):  # JAX's function relies on it
        result = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            mask=visible,
            scale=softmax_scale,
            is_causal=causal,
            local_window_size=window,
            implementation=implementation,
            return_residual=return_lse,
        )
    output, lse = result if return_lse else (result, None)
    output = output[..., :v_head_dim]
    if lse is not None:
        lse = jnp.swapaxes(lse, 1, 2).astype(jnp.float32)
        if bias is not None:
            # 2 * lse would overflow; beyond finfo.min, -inf would mean an empty row.
            further = jnp.maximum(lse + (lse - LOW), jnp.finfo(jnp.float32).min)
            lse = jnp.where(lse < LOW, further, lse)
    if row_sees is not None:
        output = jnp.where(jnp.swapaxes(row_sees, 1, 2)[..., None], output, 0)
        lse = None if lse is None else jnp.where(row_sees, lse, -jnp.inf)
    return output, lse


def _without_infinities(bias: Array, visible: Array | None) -> tuple[Array, Array]:
    """Moves -inf from bias into the mask, and drops bias where nothing is seen."""
    allowed = bias != -jnp.inf
    visible = allowed if visible is None else visible & allowed
    return jnp.where(visible, bias, 0), visible


def _above_masked(bias: Array) -> Array:
    """Brings a bias near finfo.min above what JAX masks with, in the same order.

    Out there a logit is its bias: floats lie further apart than the softmax can tell.
    """
    nearer = jnp.where(bias < LOW, bias / 2 + LOW / 2, bias)
    return bias + jax.lax.stop_gradient(nearer - bias)
