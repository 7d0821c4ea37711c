"""The Pallas kernel: a block of tokens at a time, all of their heads.

References:
    Jianlin Su et al., "RoFormer: Enhanced transformer with rotary position embedding",
    2021, arXiv:2104.09864, section 3.4.2, equation 34, with the halves of a head
    paired instead of neighbours.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

__all__ = ["rotate"]

BLOCK = 64  # tokens


def _kernel(
    x_ref: Any,  # [BLOCK, heads, head_dim]
    positions_ref: Any,  # [BLOCK, 1] int32
    steps_ref: Any,  # [1, head_dim // 2] float32
    out_ref: Any,  # [BLOCK, heads, head_dim]
) -> None:
    angles = positions_ref[...].astype(jnp.float32) * steps_ref[...]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    x = x_ref[...].astype(jnp.float32)
    a, b = jnp.split(x, 2, axis=2)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=2)
    out_ref[...] = turned.astype(out_ref.dtype)


def _launch(x: Array, positions: Array, steps: Array, interpret: bool) -> Array:
    """Runs the kernel over all tokens, those that pad the last block included."""
    batch, length, heads, head_dim = x.shape
    tokens = batch * length
    missing = -tokens % BLOCK
    rows = jnp.pad(x.reshape(tokens, heads, head_dim), ((0, missing), (0, 0), (0, 0)))
    places = jnp.pad(positions.reshape(tokens, 1), ((0, missing), (0, 0)))
    out: Array = pl.pallas_call(
        _kernel,
        out_shape=jax.typeof(rows),
        grid=(len(rows) // BLOCK,),
        in_specs=[
            pl.BlockSpec((BLOCK, heads, head_dim), lambda block: (block, 0, 0)),
            pl.BlockSpec((BLOCK, 1), lambda block: (block, 0)),
            pl.BlockSpec((1, head_dim // 2), lambda block: (0, 0)),
        ],
        out_specs=pl.BlockSpec((BLOCK, heads, head_dim), lambda block: (block, 0, 0)),
        interpret=interpret,
    )(rows, places, steps)
    return out[:tokens].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x: Array, positions: Array, steps: Array, interpret: bool) -> Array:
    return _launch(x, positions, steps, interpret)


def _forward(
    x: Array, positions: Array, steps: Array, interpret: bool
) -> tuple[Array, tuple[Array, Array]]:
    # By itself, and not by _launch: what is differentiated twice comes by here too.
    return _rotate(x, positions, steps, interpret), (positions, steps)


def _backward(
    interpret: bool, kept: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None, None]:
    """Turns back: the transpose of a rotation is its inverse."""
    positions, steps = kept
    return _rotate(cotangent, positions, -steps, interpret), None, None


_rotate.defvjp(_forward, _backward)


def rotate(
    x: Array, positions: Array, frequencies: np.ndarray, interpret: bool = False
) -> Array:
    """Turns the halves of each head by the angles of their token.

    Args:
        x: `[batch, length, heads, head_dim]`.
        positions: int32 `[batch, length]`.
        frequencies: `[head_dim // 2]`, the angle of each pair at position 1.
        interpret: Whether to run without a compiler for the kernel.

    Returns:
        The rotated array, in the shape and dtype of x; computed in float32.
    """
    steps = jnp.asarray(frequencies, jnp.float32)[None]
    return _rotate(x, positions, steps, interpret)
