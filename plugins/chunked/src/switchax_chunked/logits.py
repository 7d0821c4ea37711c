"""One tile of logits: what of the operands it reads, how it is scaled and hidden."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .tiling import Place, Tiling
from .visible import Hidden, tile

__all__ = [
    "Logits",
    "Operands",
    "Scale",
    "Static",
    "at_key",
    "below",
    "clean",
    "dropped",
    "logits_of",
    "precise",
    "products",
    "scale_of",
]


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced.

    Attributes:
        tiling: Sizes of the tiles.
        softmax_scale: Factor of the logits.
        logits_soft_cap: Positive, or None.
        dropout_prob: In [0, 1).
        q_len: Rows that are no padding.
        kv_len: Keys.
        span: Keys of a tile of the forward pass, where such a tile starts with the
            first key that its rows see; None where it starts at a multiple.
        is_exact: Whether weights must not be rounded, since a gradient starts from
            what is computed.
    """

    tiling: Tiling
    softmax_scale: float
    logits_soft_cap: float | None
    dropout_prob: float
    q_len: int
    kv_len: int
    span: int | None = None
    is_exact: bool = False


class Operands(NamedTuple):
    """What has a gradient.

    Attributes:
        q: `[batch, rows, kv_heads, group, head_dim]`, rows in whole blocks.
        k: `[batch, kv_len, kv_heads, head_dim]`.
        v: `[batch, kv_len, kv_heads, v_head_dim]`.
        bias: `[batch | 1, kv_heads | 1, group | 1, rows | 1, kv_len | 1]`, or None.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None


class Scale(NamedTuple):
    """The factor of the logits, in three.

    Attributes:
        query: Of query's rows, less than 2 in size, so that nothing overflows.
        early: Of the products of query and key.
        late: Positive; of the logits after their maximum is taken off, which costs
            nothing there.
    """

    query: float
    early: float
    late: float

    def of(self, rows: Array) -> Array:
        """Returns query's rows as products take them."""
        if rows.dtype == jnp.bfloat16:
            return rows
        return rows.astype(precise(rows)) * self.query


def precise(x: Array) -> Any:
    """Returns the dtype in which softmax of an operand is computed."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def scale_of(static: Static, operands: Operands) -> Scale:
    """Splits `softmax_scale`.

    A power of two is exact wherever it is applied. bfloat16 is not scaled at all before
    the product, whose terms are then exact in float32.
    """
    if operands.q.dtype == jnp.bfloat16:
        query, rest = 1.0, static.softmax_scale
    else:
        fraction, exponent = math.frexp(static.softmax_scale)
        query, rest = 2 * fraction, math.ldexp(1.0, exponent - 1)
    needs_logits = operands.bias is not None or static.logits_soft_cap is not None
    if needs_logits or not 2.0**-16 <= rest <= 2.0**16:
        return Scale(query, rest, 1.0)
    return Scale(query, 1.0, rest)


class Logits(NamedTuple):
    """A tile of logits, and what its derivative needs; all flat as `Tiling.flat` says.

    Attributes:
        x: `[kv_heads, rows, keys]`, -inf where hidden, but for `Scale.late`.
        slope: Derivative by the logit before the cap, or None for 1.
        visible: Whether a row sees a key, or None where each sees each.
        key_seen: `[kv_heads, keys]`: which keys any of these rows sees, or None for
            all; broadcastable.
    """

    x: Array
    slope: Array | None
    visible: Array | None
    key_seen: Array | None


def below(x: Array, top: Array) -> Array:
    """Returns `x - top`, 0 where x is top or more, and NaN where either is, or inf.

    XLA may fuse a product into the subtraction. It is not rounded there, as it was for
    the maximum: from 1e9 on, the two differ by hundreds.
    """
    return jnp.where((x >= top) & (top != jnp.inf), 0, x - top)


def products(rows: Array, keys: Array, dtype: Any) -> Array:
    """Returns `[..., rows, keys]`, each row's product with each key, in a dtype."""
    terms = "...qd,...kd->...qk"
    return jnp.einsum(terms, rows, keys, preferred_element_type=dtype)


def clean(keys: Array, key_seen: Array | None) -> Array:
    """Returns keys or values with 0 where no row of the tile sees them.

    Args:
        keys: `[..., keys, size]`.
        key_seen: As in `Logits`.
    """
    return keys if key_seen is None else jnp.where(key_seen[..., None], keys, 0)


def at_key(static: Static, at: Place, key: Array) -> Place:
    """Returns the place with its keys, from one on.

    The last keys are taken with some before them, so that nothing is padded.
    """
    return at._replace(key=jnp.minimum(key, static.kv_len - static.tiling.kv))


def logits_of(
    static: Static,
    scale: Scale,
    x: Array,
    bias: Array | None,
    hidden: Hidden | None,
    at: Place,
    key: Array,
) -> Logits:
    """Computes one tile of logits.

    Args:
        static: Sizes and constants.
        scale: As `scale_of` gives it.
        x: `[kv_heads, rows, keys]`, flat: the product of rows, as `Scale.of` gives
            them, with keys. A key that nobody sees is still in it.
        bias: As in `Operands`.
        hidden: What hides keys from rows; None where each row sees each key.
        at: Where the tile is, as `at_key` gives it.
        key: The first key that is the tile's own: those before it are hidden here.
    """
    tiling = static.tiling
    visible, key_seen = None, None
    if hidden is not None:
        # What starts at a multiple, and ends at one, is never moved.
        is_even = static.span is None and static.kv_len % tiling.kv == 0
        visible, key_seen = tile(
            hidden, at, tiling, None if is_even else key, static.q_len
        )
        if key_seen is not None and key_seen.shape[0] == 1:
            key_seen = key_seen[0]
    if scale.early != 1:
        x = x * scale.early
    if bias is not None:
        added = at.take(bias, "bhgqk", tiling).astype(x.dtype)
        x = tiling.flat(tiling.split(x) + added)
    slope = None
    if static.logits_soft_cap is not None:
        capped = jnp.tanh(x / static.logits_soft_cap)
        x, slope = static.logits_soft_cap * capped, 1 - capped * capped
    if visible is not None:
        shape = (tiling.kv_heads, tiling.group, tiling.q, tiling.kv)
        visible = tiling.flat(jnp.broadcast_to(visible, shape))
        x = jnp.where(visible, x, -jnp.inf)
    return Logits(x, slope, visible, key_seen)


def dropped(
    static: Static, key: Array | None, at: Place, block: Array, x: Array
) -> Array:
    """Drops and rescales; the same of a tile, whenever it is asked."""
    if key is None:
        return x
    for number in (at.sample, at.kv_head, at.member, at.row, block):
        key = jax.random.fold_in(key, number)
    keep = jax.random.bernoulli(key, 1 - static.dropout_prob, x.shape)
    return jnp.where(keep, x / (1 - static.dropout_prob), 0)
