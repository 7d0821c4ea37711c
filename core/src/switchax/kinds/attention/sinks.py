"""Sinks, for a kernel that knows of none but returns lse."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["share_with_sinks"]


def share_with_sinks(lse: Array, softmax_aux: Array) -> tuple[Array, Array]:
    """Adds sinks to the denominators of a softmax over keys alone.

    A kernel with lse has sinks by this: its output times the share. JAX differentiates
    both. Where a row sees no key, a cotangent of its output may be anything: choose 0
    there by `jnp.where`, and do not rely on the share alone.

    Args:
        lse: Of the keys, floating `[batch, heads, q_len]`, -inf where none is seen.
        softmax_aux: Floating `[heads]` or `[heads, num_sinks]`.

    Returns:
        The share of the keys, from 0 to 1, and lse with the sinks, -inf where they are
        -inf too; both in the shape and dtype of lse.
    """
    heads = lse.shape[1]
    num_sinks = softmax_aux.size // heads if heads else 0
    sinks = softmax_aux.astype(lse.dtype).reshape(1, heads, 1, num_sinks)
    m = jnp.maximum(lse[..., None], sinks.max(axis=-1, keepdims=True, initial=-jnp.inf))
    m = lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    is_empty = lse == -jnp.inf
    keys = jnp.where(is_empty, 0, jnp.exp(jnp.where(is_empty, 0, lse) - m[..., 0]))
    total = keys + jnp.exp(sinks - m).sum(axis=-1)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    return keys / total, jnp.where(nothing, -jnp.inf, m[..., 0] + jnp.log(total))
