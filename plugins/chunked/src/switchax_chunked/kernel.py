"""Attention by an online softmax over tiles, with a backward pass of its own.

Nothing of q_len x kv_len is ever written: a tile of logits lives in the cache, and the
backward pass computes it anew from lse. Tiles that nobody sees are not visited. Query,
key and value are read where they lie, `[batch, length, heads, head_dim]`, so that a
cache is neither copied nor padded.

Sinks are no part of the loops: they only scale what the keys give, outside of them.

References:
    Maxim Milakov and Natalia Gimelshein, "Online normalizer calculation for softmax",
    2018, arXiv:1805.02867, algorithm 3. Markus N. Rabe and Charles Staats,
    "Self-attention Does Not Need O(n^2) Memory", 2021, arXiv:2112.05682. Tri Dao,
    "FlashAttention-2", 2023, arXiv:2307.08691, algorithms 1 and 2; departs from it in
    that one loop computes all gradients, over keys first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .tiling import ZERO, Place, Tiling
from .visible import Hidden, key_lists, row_lists, tile

__all__ = ["Operands", "Static", "attend_keys"]


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
    """

    tiling: Tiling
    softmax_scale: float
    logits_soft_cap: float | None
    dropout_prob: float
    q_len: int
    kv_len: int


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


class _Logits(NamedTuple):
    """A tile of logits, and what its derivative needs.

    Attributes:
        x: `[kv_heads, group, rows, keys]`, -inf where hidden.
        slope: Derivative by the logit before the cap, or None for 1.
        visible: As in `Tile`.
        k: `[kv_heads, keys, head_dim]`, 0 where no row of the tile sees the key.
        v: Likewise.
    """

    x: Array
    slope: Array | None
    visible: Array | None
    k: Array
    v: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_keys(
    static: Static, operands: Operands, hidden: Hidden, dropout_key: Array | None
) -> tuple[Array, Array]:
    """Computes attention over keys alone, without sinks.

    Returns:
        Output `[batch, kv_heads, group, rows, v_head_dim]` and lse
        `[batch, kv_heads, group, rows]`, both in float32, or float64 for float64; 0 and
        -inf where a row sees no key.
    """
    tiling, q = static.tiling, operands.q
    batch, rows, kv_heads, group, _ = q.shape
    lists = row_lists(hidden, tiling, static.q_len, static.kv_len)
    count, order = (jnp.asarray(x) for x in lists)
    grid = (batch, kv_heads // tiling.kv_heads, group // tiling.group, rows // tiling.q)

    def block(number: Array) -> tuple[Array, Array]:
        sample, a, c, i = jnp.unravel_index(number, grid)
        listed = sample if count.shape[0] > 1 else ZERO
        at = Place(sample, a * tiling.kv_heads, c * tiling.group, i * tiling.q, ZERO)
        rows_of_q = _scaled(static, _rows(q, at, tiling))

        def visit(n: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            m, l, acc = carry
            j = order[listed, i, n]
            _, logits = _logits(static, operands, hidden, at, j, rows_of_q)
            m_new = jnp.maximum(m, logits.x.max(axis=-1, keepdims=True))
            base = jnp.where(m_new == -jnp.inf, 0, m_new)  # -inf - -inf would be NaN
            p = jnp.exp(logits.x - base)
            decay = jnp.exp(m - base)
            l = decay * l + p.sum(axis=-1, keepdims=True)
            p = _dropped(static, dropout_key, at, j, p)
            return m_new, l, decay * acc + _product("hgqk,hkd->hgqd", p, logits.v)

        shape = rows_of_q.shape[:3]
        zeros = jnp.zeros((*shape, 1), rows_of_q.dtype)
        acc = jnp.zeros((*shape, operands.v.shape[-1]), rows_of_q.dtype)
        start = (jnp.full_like(zeros, -jnp.inf), zeros, acc)
        m, l, acc = lax.fori_loop(0, count[listed, i], visit, start)
        is_empty = m == -jnp.inf
        l = jnp.where(is_empty, 1, l)
        lse = jnp.where(is_empty, -jnp.inf, m + jnp.log(l))
        return jnp.where(is_empty, 0, acc / l), lse

    output, lse = lax.map(block, jnp.arange(_size(grid), dtype=jnp.int32))
    output = _from_grid(output, grid, tiling)
    return output, _from_grid(lse, grid, tiling)[..., 0]


def _forward(
    static: Static, operands: Operands, hidden: Hidden, dropout_key: Array | None
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    output, lse = attend_keys(static, operands, hidden, dropout_key)
    return (output, lse), (operands, hidden, dropout_key, output, lse)


def _backward(
    static: Static, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Operands, None, None]:
    operands, hidden, dropout_key, output, lse = residuals
    tiling, bias = static.tiling, operands.bias
    batch, rows, kv_heads, group, head_dim = operands.q.shape
    is_empty = lse == -jnp.inf
    d_output = jnp.where(is_empty[..., None], 0, cotangents[0])
    delta = (d_output * output).sum(axis=-1) - jnp.where(is_empty, 0, cotangents[1])
    lse = jnp.where(is_empty, 0, lse)
    # A row that sees nothing may hold anything, and 0 * NaN is NaN.
    clean = ~jnp.moveaxis(is_empty, 3, 1)[..., None]
    q = jnp.where(clean, operands.q, jnp.zeros((), operands.q.dtype))
    lists = key_lists(hidden, tiling, static.q_len, static.kv_len)
    count, order = (jnp.asarray(x) for x in lists)
    blocks_kv = order.shape[1]
    chunks = group // tiling.group
    operands = operands._replace(q=q)

    def heads(d_bias: Any, number: Array) -> tuple[Any, tuple[Array, ...]]:
        sample, a = jnp.unravel_index(number, (batch, kv_heads // tiling.kv_heads))
        listed = sample if count.shape[0] > 1 else ZERO
        kv_head = a * tiling.kv_heads

        def block(carry: Any, j: Array) -> tuple[Any, tuple[Array, Array]]:
            def visit(n: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                d_q, d_bias, d_k, d_v = carry
                i = order[listed, j, n // chunks]
                member = (n % chunks) * tiling.group
                at = Place(sample, kv_head, member, i * tiling.q, ZERO)
                rows_of_q = _scaled(static, _rows(q, at, tiling))
                here, logits = _logits(static, operands, hidden, at, j, rows_of_q)
                p = jnp.exp(logits.x - at.of(lse[..., None], tiling))
                d_out = at.of(d_output, tiling._replace(kv=d_output.shape[-1]))
                d_p = _product("hgqd,hkd->hgqk", d_out, logits.v)
                d_p = _dropped(static, dropout_key, at, j, d_p)
                d_x = p * (d_p - at.of(delta[..., None], tiling))
                if logits.slope is not None:
                    d_x = d_x * logits.slope
                if logits.visible is not None:
                    d_x = jnp.where(logits.visible, d_x, 0)
                p = _dropped(static, dropout_key, at, j, p)
                d_v = d_v + _product("hgqk,hgqd->hkd", p, d_out)
                if d_bias is not None:
                    d_bias = _added(d_bias, d_x[None], here.starts(d_bias))
                d_x = d_x * _power(static)
                d_k = d_k + _product("hgqk,hgqd->hkd", d_x, rows_of_q)
                d_rows = _product("hgqk,hkd->hgqd", d_x, logits.k)
                d_q = _added(d_q, d_rows, (ZERO, member, at.row, ZERO))
                return d_q, d_bias, d_k, d_v

            d_k = jnp.zeros((tiling.kv_heads, tiling.kv, head_dim), lse.dtype)
            d_v = jnp.zeros((*d_k.shape[:2], output.shape[-1]), lse.dtype)
            visits = count[listed, j] * chunks
            *carry, d_k, d_v = lax.fori_loop(0, visits, visit, (*carry, d_k, d_v))
            return tuple(carry), (d_k, d_v)

        d_q = jnp.zeros((tiling.kv_heads, group, rows, head_dim), lse.dtype)
        numbers = jnp.arange(blocks_kv, dtype=jnp.int32)
        (d_q, d_bias), (d_k, d_v) = lax.scan(block, (d_q, d_bias), numbers)
        return d_bias, (_scaled(static, d_q), d_k, d_v)

    d_bias = None if bias is None else jnp.zeros(bias.shape, lse.dtype)
    numbers = batch * (kv_heads // tiling.kv_heads)
    numbers = jnp.arange(numbers, dtype=jnp.int32)
    d_bias, (d_q, d_k, d_v) = lax.scan(heads, d_bias, numbers)
    d_q = d_q.reshape(batch, kv_heads, group, rows, head_dim)
    d_q = jnp.moveaxis(d_q, 3, 1).astype(q.dtype)
    d_k, d_v = (
        _from_key_blocks(static, x, like).astype(like.dtype)
        for x, like in ((d_k, operands.k), (d_v, operands.v))
    )
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return Operands(d_q, d_k, d_v, d_bias), None, None


attend_keys.defvjp(_forward, _backward)


def _logits(
    static: Static,
    operands: Operands,
    hidden: Hidden,
    at: Place,
    block: Array,
    rows_of_q: Array,
) -> tuple[Place, _Logits]:
    """Computes one tile of logits, and says where it is.

    The last block of keys starts where it ends with the keys: those of the block before
    it are hidden here, and nothing is padded.
    """
    tiling, kv_len = static.tiling, static.kv_len
    owned_from = None
    key = block * tiling.kv
    if kv_len % tiling.kv:
        owned_from, key = key, jnp.minimum(key, kv_len - tiling.kv)
    at = at._replace(key=key)
    visible, key_seen = tile(hidden, at, tiling, owned_from)
    k, v = (_keys(x, at, tiling, rows_of_q.dtype) for x in operands[1:3])
    if key_seen is not None:
        k, v = (jnp.where(key_seen[..., None], x, 0) for x in (k, v))
    x = _product("hgqd,hkd->hgqk", rows_of_q, k) * _power(static)
    if operands.bias is not None:
        x = x + at.of(operands.bias, tiling).astype(x.dtype)
    slope = None
    if static.logits_soft_cap is not None:
        capped = jnp.tanh(x / static.logits_soft_cap)
        x, slope = static.logits_soft_cap * capped, 1 - capped * capped
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    return at, _Logits(x, slope, visible, k, v)


def _rows(q: Array, at: Place, tiling: Tiling) -> Array:
    """Returns the rows of a tile, `[kv_heads, group, rows, head_dim]`."""
    sizes = (1, tiling.q, tiling.kv_heads, tiling.group, q.shape[-1])
    starts = (at.sample, at.row, at.kv_head, at.member, ZERO)
    return jnp.moveaxis(lax.dynamic_slice(q, starts, sizes)[0], 0, 2)


def _keys(x: Array, at: Place, tiling: Tiling, dtype: Any) -> Array:
    """Returns the keys of a tile, `[kv_heads, keys, head_dim]`."""
    sizes = (1, tiling.kv, tiling.kv_heads, x.shape[-1])
    starts = (at.sample, at.key, at.kv_head, ZERO)
    return jnp.moveaxis(lax.dynamic_slice(x, starts, sizes)[0], 0, 1).astype(dtype)


def _scaled(static: Static, rows: Array) -> Array:
    """Scales rows in the dtype of softmax, which every product then accumulates in.

    By less than 2; the power of two that is left scales the logits, and is exact.
    """
    precise = jnp.float64 if rows.dtype == jnp.float64 else jnp.float32
    return rows.astype(precise) * (2 * math.frexp(static.softmax_scale)[0])


def _power(static: Static) -> float:
    """The power of two by which logits of `_scaled` rows are still to be scaled."""
    return math.ldexp(1.0, math.frexp(static.softmax_scale)[1] - 1)


def _product(terms: str, a: Array, b: Array) -> Array:
    return jnp.einsum(terms, a, b)


def _dropped(
    static: Static, key: Array | None, at: Place, block: Array, x: Array
) -> Array:
    """Drops and rescales; the same of a tile, whenever it is asked."""
    if key is None:
        return x
    for number in (at.sample, at.kv_head, at.member, at.row, block):
        key = jax.random.fold_in(key, number)
    keep = jax.random.bernoulli(key, 1 - static.dropout_prob, x.shape)
    return jnp.where(keep, x / (1 - static.dropout_prob), 0)


def _added(total: Array, part: Array, starts: tuple[Any, ...]) -> Array:
    """Adds a part at its place, summed over the axes of which total has but one."""
    axes = [a for a, size in enumerate(total.shape) if size == 1 != part.shape[a]]
    part = part.sum(axis=axes, keepdims=True)
    before = lax.dynamic_slice(total, starts, part.shape)
    return lax.dynamic_update_slice(total, before + part, starts)


def _size(grid: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, grid, 1)


def _from_grid(x: Array, grid: tuple[int, ...], tiling: Tiling) -> Array:
    """Joins tiles `[number, kv_heads, group, rows, size]`, in the order of a grid."""
    x = x.reshape(*grid, *x.shape[1:])
    x = x.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    batch, a, h, c, g, i, q, size = x.shape
    return x.reshape(batch, a * h, c * g, i * q, size)


def _from_key_blocks(static: Static, x: Array, like: Array) -> Array:
    """Joins `[batch * head blocks, key blocks, kv_heads, keys, size]` as key lies."""
    batch, kv_len, kv_heads, size = like.shape
    x = x.reshape(batch, -1, *x.shape[1:])
    x = x.transpose(0, 2, 4, 1, 3, 5)  # [batch, blocks, keys, a, kv_heads, size]
    x = x.reshape(batch, x.shape[1], x.shape[2], kv_heads, size)
    whole = x[:, : kv_len // static.tiling.kv].reshape(batch, -1, kv_heads, size)
    if not (rest := kv_len % static.tiling.kv):
        return whole
    return jnp.concatenate([whole, x[:, -1, -rest:]], axis=1)
