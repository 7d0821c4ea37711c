"""The kernel: an online softmax over blocks of keys, in plain JAX.

References:
    Maxim Milakov and Natalia Gimelshein, "Online normalizer calculation for
    softmax", 2018, arXiv:1805.02867, algorithm 3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["attend"]

BLOCK_KV = 64

State = tuple[Array, Array, Array]


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    causal: bool,
    q_offset: Array | int,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> tuple[Array, Array]:
    """Computes attention, one block of keys after the other.

    Args:
        q: `[batch, q_len, heads, head_dim]`.
        k: `[batch, kv_len, heads, head_dim]`, kv_len a multiple of 64.
        v: `[batch, kv_len, heads, head_dim]`.
        softmax_scale: Factor of the logits.
        causal: Whether row i sees keys up to `i + q_offset` only.
        q_offset: An int or an int32 scalar.
        q_segment_ids: int32 `[batch, q_len]`, or None; negative matches nothing.
        kv_segment_ids: int32 `[batch, kv_len]`, or None.

    Returns:
        Output `[batch, q_len, heads, head_dim]` and lse `[batch, heads, q_len]`,
        both float32.
    """
    batch, q_len, heads, _ = q.shape
    blocks = k.shape[1] // BLOCK_KV
    if kv_segment_ids is None or q_segment_ids is None:
        q_segment_ids = jnp.zeros((batch, q_len), jnp.int32)
        kv_segment_ids = jnp.zeros((batch, k.shape[1]), jnp.int32)
    rows = jnp.arange(q_len, dtype=jnp.int32) + q_offset
    step = functools.partial(_visit, q, rows, q_segment_ids, softmax_scale, causal)
    state = (
        jnp.full((batch, heads, q_len), -jnp.inf, jnp.float32),
        jnp.zeros((batch, heads, q_len), jnp.float32),
        jnp.zeros((batch, heads, q_len, v.shape[3]), jnp.float32),
    )
    keys = jnp.arange(k.shape[1], dtype=jnp.int32).reshape(blocks, BLOCK_KV)
    split = [
        jnp.moveaxis(x.reshape(batch, blocks, BLOCK_KV, *x.shape[2:]), 1, 0)
        for x in (k, v, kv_segment_ids)
    ]
    (m, l, acc), _ = jax.lax.scan(step, state, (keys, *split))
    is_empty = l == 0  # no key was visible: output 0, lse -inf
    l = jnp.where(is_empty, 1, l)
    lse = jnp.where(is_empty, -jnp.inf, m + jnp.log(l))
    return jnp.swapaxes(acc / l[..., None], 1, 2), lse


def _visit(
    q: Array,
    rows: Array,
    q_ids: Array,
    softmax_scale: float,
    causal: bool,
    state: State,
    block: tuple[Array, Array, Array, Array],
) -> tuple[State, None]:
    """Takes one block of keys into the running max, sum and accumulator."""
    m, l, acc = state
    keys, k, v, kv_ids = block
    visible = (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids >= 0)[:, :, None]
    if causal:
        visible &= keys[None, None, :] <= rows[None, :, None]
    # What nothing sees may hold NaN, and 0 * NaN is NaN, forward or backward.
    q = jnp.where(visible.any(2)[..., None, None], q, 0)
    seen = visible.any(1)[..., None, None]
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    s = jnp.where(visible[:, None], softmax_scale * s, -jnp.inf)
    new_m = jax.lax.stop_gradient(jnp.maximum(m, s.max(axis=-1)))
    base = jnp.where(new_m == -jnp.inf, 0, new_m)
    p = jnp.exp(s - base[..., None])
    decay = jnp.exp(m - base)
    l = l * decay + p.sum(axis=-1)
    pv = jnp.einsum("bhts,bshd->bhtd", p, v.astype(jnp.float32))
    return (new_m, l, acc * decay[..., None] + pv), None
