"""Rotary position embedding (this part will move to the plugin `switchax-flax`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotary_tables(
    positions: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Computes the cosines and sines that `rotate` takes.

    Args:
        positions: `[batch, q_len]` int32, the place of each token in its text.
        head_dim: Size of one head; even.
        theta: Base of the frequencies.

    Returns:
        Two float32 arrays `[batch, q_len, 1, head_dim // 2]`; the 1 is for the heads.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions[:, :, None, None].astype(jnp.float32) * (
        theta ** -exponents[None, None, None, :]
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the interleaved pairs `(x[2i], x[2i + 1])` by their angles.

    GGUF files of the llama family store the query and key projections with their rows
    permuted so that a rotary pair lies side by side, where the original checkpoint
    has it half a head apart. Rotating neighbours therefore needs no un-permuting, and
    since query and key are permuted alike, their products do not change.

    Args:
        x: `[batch, q_len, heads, head_dim]`, query or key.
        cos: `[batch, q_len, 1, head_dim // 2]` float32.
        sin: As `cos`.

    Returns:
        The rotated array, in the shape and dtype of `x`; computed in float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
