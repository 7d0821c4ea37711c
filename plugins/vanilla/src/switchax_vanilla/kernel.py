"""Attention that writes every score, in plain jnp; differentiated by JAX.

Everything is arranged so that a key, query row or bias entry that nothing can see
takes part in no product, forward or backward: 0 * NaN is NaN.

References:
    Ashish Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762,
    section 3.2. Sinks as in Guangxuan Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", 2023, arXiv:2309.17453, there as keys, here as
    logits of the denominator alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from switchax.kinds.attention import seen

__all__ = ["Result", "attend"]


class Result(NamedTuple):
    """Output `[batch, q_len, heads, v_head_dim]`, weights and lse."""

    output: Array
    weights: Array
    lse: Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    visible: Array | None = None,
    bias: Array | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Array | None = None,
    dropout_prob: float = 0.0,
    dropout_key: Array | None = None,
) -> Result:
    """Computes attention, writing all scores.

    Args:
        q: `[batch, q_len, heads, head_dim]`.
        k: `[batch, kv_len, kv_heads, head_dim]`.
        v: `[batch, kv_len, kv_heads, v_head_dim]`.
        softmax_scale: Factor of the logits.
        visible: bool, broadcastable to `[batch, heads, q_len, kv_len]`, or None.
        bias: Floating, broadcastable likewise, or None.
        logits_soft_cap: Positive, or None.
        softmax_aux: `[heads]` or `[heads, num_sinks]`, or None.
        dropout_prob: In [0, 1).
        dropout_key: A PRNG key, needed with `dropout_prob`.

    Returns:
        Output, weights `[batch, heads, q_len, kv_len]` and lse
        `[batch, heads, q_len]`, all in float32, or float64 for float64.
    """
    precise = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    row_sees = None
    if visible is not None:
        row_sees, key_seen = seen(visible, k.shape[2])
        q, k, v = _without_unseen(q, k, v, row_sees, key_seen)
    mantissa, exponent = math.frexp(softmax_scale)
    if abs(mantissa) != 0.5:
        # XLA may fuse scaling the logits into the subtraction of their maximum, which
        # was rounded: from 1e9 on, the two differ by hundreds. A power of two is exact.
        q, k = q.astype(precise) * (2 * mantissa), k.astype(precise)
        softmax_scale = math.ldexp(1.0, exponent - 1)
    logits = softmax_scale * _scores(q, k, precise)
    if bias is not None:
        bias = bias.astype(precise)  # first: its gradient is summed in this dtype
        logits = logits + (bias if visible is None else jnp.where(visible, bias, 0))
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    if bias is not None:  # a row of nothing but -inf sees nothing either (R6)
        row_sees = jnp.max(logits, axis=-1) != -jnp.inf
        logits = jnp.where(row_sees[..., None], logits, -jnp.inf)
    weights, lse = _softmax(logits, softmax_aux)
    if dropout_prob > 0:
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_prob, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_prob), 0)
    if visible is not None:  # or a NaN cotangent of what nothing sees would spread
        weights = jnp.where(visible, weights, 0)
    output = _weighted_sum(weights, v.astype(precise))
    if row_sees is not None:  # also keeps a NaN cotangent of such a row from spreading
        output = jnp.where(jnp.swapaxes(row_sees, 1, 2)[..., None], output, 0)
    return Result(output, weights, lse)


def _without_unseen(
    q: Array, k: Array, v: Array, row_sees: Array, key_seen: Array
) -> tuple[Array, Array, Array]:
    """Puts 0 for query rows that see nothing and keys that nothing sees (R6, R7)."""
    q = jnp.where(jnp.swapaxes(row_sees, 1, 2)[..., None], q, 0)
    key_seen = jnp.swapaxes(key_seen, 1, 2)[..., None]
    return q, jnp.where(key_seen, k, 0), jnp.where(key_seen, v, 0)


def _scores(q: Array, k: Array, precise: jnp.dtype) -> Array:
    """Products q @ k^T per head, `[batch, heads, q_len, kv_len]`."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1], k.shape[2]
    if q.dtype == jnp.float16:
        # XLA on CPU has no float16 product with a float32 result; casting is exact.
        q, k = q.astype(precise), k.astype(precise)
    if head_dim == 1:  # a product of numbers could be fused, as above
        head_dim = 2
        q, k = (jnp.pad(x, ((0, 0),) * 3 + ((0, 1),)) for x in (q, k))
    q = q.reshape(batch, q_len, kv_heads, heads // max(kv_heads, 1), head_dim)
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k, preferred_element_type=precise)
    return scores.reshape(batch, heads, q_len, kv_len)


def _softmax(logits: Array, softmax_aux: Array | None) -> tuple[Array, Array]:
    """Softmax over keys and sinks; a row of nothing but -inf gives 0 (R6)."""
    m = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = None
    if softmax_aux is not None:
        heads = logits.shape[1]
        num_sinks = softmax_aux.size // heads if heads else 0
        sinks = softmax_aux.astype(logits.dtype).reshape(1, heads, 1, num_sinks)
        m = jnp.maximum(m, jnp.max(sinks, axis=-1, keepdims=True, initial=-jnp.inf))
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    below = logits - m
    # A product fused into the subtraction is not rounded, as it was for the maximum.
    below = below - jax.lax.stop_gradient(jnp.where(logits >= m, below, 0))
    unnormalised = jnp.exp(below)
    l = jnp.sum(unnormalised, axis=-1, keepdims=True)
    if sinks is not None:
        l = l + jnp.sum(jnp.exp(sinks - m), axis=-1, keepdims=True)
    is_empty = l == 0
    l = jnp.where(is_empty, 1, l)
    lse = jnp.where(is_empty, -jnp.inf, m + jnp.log(l))
    return unnormalised / l, lse[..., 0]


def _weighted_sum(weights: Array, v: Array) -> Array:
    """Sums weights @ v per head, `[batch, q_len, heads, v_head_dim]`."""
    batch, heads, q_len, kv_len = weights.shape
    kv_heads, v_head_dim = v.shape[2], v.shape[3]
    shape = (batch, kv_heads, heads // max(kv_heads, 1), q_len, kv_len)
    output = jnp.einsum("bgrts,bsgd->btgrd", weights.reshape(shape), v)
    return output.reshape(batch, q_len, heads, v_head_dim)
