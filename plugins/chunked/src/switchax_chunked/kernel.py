"""Attention by an online softmax over tiles, with a backward pass of its own.

Nothing of q_len x kv_len is ever written: a tile of logits lives in the cache, and the
backward pass computes it anew from lse. Tiles that nobody sees are not visited.

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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .decode import attend_cache, suits
from .exponential import exp_of_logits
from .logits import (
    Operands,
    Static,
    at_key,
    below,
    clean,
    dropped,
    logits_of,
    precise,
    products,
    scale_of,
)
from .tiling import ZERO, Place
from .varying import made_varying, varying_axes
from .visible import Hidden, Lists, key_lists, row_lists, span_lists

__all__ = ["attend_keys", "gradients"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_keys(
    static: Static, operands: Operands, hidden: Hidden, dropout_key: Array | None
) -> tuple[Array, Array]:
    """Computes attention over keys alone, without sinks.

    Returns:
        Output `[batch, rows, kv_heads, group, v_head_dim]` and lse
        `[batch, kv_heads, group, rows]`, both in float32, or float64 for float64; 0 and
        -inf where a row sees no key.
    """
    if not static.is_exact and suits(operands, hidden, dropout_key):

        def by_tiles(operands: Operands, hidden: Hidden) -> tuple[Array, Array]:
            return _by_tiles(static, operands, hidden, None)

        return attend_cache(static, operands, hidden, by_tiles)
    return _by_tiles(static, operands, hidden, dropout_key)


def _by_tiles(
    static: Static, operands: Operands, hidden: Hidden, dropout_key: Array | None
) -> tuple[Array, Array]:
    find_lists = row_lists
    if dropout_key is not None:  # what is dropped of a block must be found again
        static = dataclasses.replace(static, span=None)
    if static.span is not None:
        find_lists = span_lists
        tiling = static.tiling._replace(kv=static.span)
        static = dataclasses.replace(static, tiling=tiling)
    tiling, (q, k, v, bias) = static.tiling, operands
    batch, rows, kv_heads, group, _ = q.shape
    dtype, scale = precise(q), scale_of(static, operands)
    lists = find_lists(hidden, tiling, static.q_len, static.kv_len)
    axes = varying_axes(operands)
    grid = (batch, kv_heads // tiling.kv_heads, group // tiling.group, rows // tiling.q)

    def products_and_values(q_rows: Array, at: Place) -> tuple[Array, Array]:
        # Read where they lie: to turn all of them once costs more than each tile's.
        keys, values = (
            tiling.of_head(jnp.moveaxis(at.take(x, "bkhd", tiling), 0, 1))
            for x in (k, v)
        )
        x = products(q_rows, keys.astype(q_rows.dtype), dtype)
        return x, values.astype(dtype)

    def block(number: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        sample, a, c, i = _unraveled(number, grid)
        at = Place(sample, a * tiling.kv_heads, c * tiling.group, i * tiling.q, ZERO)
        q_rows = jnp.moveaxis(at.take(q, "bqhgd", tiling), 0, 2)
        q_rows = scale.of(tiling.flat(q_rows))
        first_key: Any = ZERO
        if lists.key is not None:
            of = sample if lists.key.shape[0] > 1 else ZERO
            first_key = jnp.asarray(lists.key)[of, i]

        def visit(is_full: bool, j: Array, carry: Any) -> Any:
            m, l, acc = carry
            key = first_key + j * tiling.kv
            here = at_key(static, at, key)
            sees = None if is_full else hidden
            x, values = products_and_values(q_rows, here)
            logits = logits_of(static, scale, x, bias, sees, here, key)
            m_new = jnp.maximum(m, logits.x.max(axis=-1, keepdims=True))
            base = jnp.where(m_new == -jnp.inf, 0, m_new)  # -inf - -inf would be NaN
            p = exp_of_logits(below(logits.x, base) * scale.late)
            decay = exp_of_logits((m - base) * scale.late)
            l = decay * l + p.sum(axis=-1, keepdims=True)
            p = dropped(static, dropout_key, at, j, p)
            values = clean(values, logits.key_seen)
            return m_new, l, decay * acc + jnp.matmul(p, values)

        lead = q_rows.shape[:-1]
        zeros = jnp.zeros((*lead, 1), dtype)
        acc = jnp.zeros((*lead, v.shape[-1]), dtype)
        start = made_varying((jnp.full_like(zeros, -jnp.inf), zeros, acc), axes)
        m, l, acc = _visited(lists, sample, i, visit, start)
        is_empty = m == -jnp.inf
        l = jnp.where(is_empty, 1, l)
        lse = jnp.where(is_empty, -jnp.inf, m * scale.late + jnp.log(l))
        output = jnp.moveaxis(tiling.split(jnp.where(is_empty, 0, acc / l)), 2, 0)
        return (
            at.put(results[0], output, "bqhgd"),
            at.put(results[1], tiling.split(lse)[..., 0], "bhgq"),
        )

    output = jnp.zeros((*q.shape[:4], v.shape[-1]), dtype)
    lse = jnp.zeros((batch, kv_heads, group, rows), dtype)
    count = np.int32(math.prod(grid))
    results = made_varying((output, lse), axes)
    output, lse = lax.fori_loop(ZERO, count, block, results)
    return output, lse


def _forward(
    static: Static, operands: Operands, hidden: Hidden, dropout_key: Array | None
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    # By tiles: what rounds the weights would be in every gradient.
    output, lse = _by_tiles(static, operands, hidden, dropout_key)
    return (output, lse), (operands, hidden, dropout_key, output, lse)


def _backward(
    static: Static, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Operands, None, None]:
    operands, hidden, dropout_key, output, lse = residuals
    found = gradients(static, operands, hidden, dropout_key, output, lse, *cotangents)
    return found, None, None


attend_keys.defvjp(_forward, _backward)


def gradients(
    static: Static,
    operands: Operands,
    hidden: Hidden,
    dropout_key: Array | None,
    output: Array,
    lse: Array,
    d_output: Array,
    d_lse: Array,
) -> Operands:
    """Computes the gradients of operands from what `attend_keys` returned.

    Args:
        static: As in the forward pass, but for `tiling`, which may differ without
            dropout.
        operands: As in the forward pass, likewise the next two.
        hidden: What hides keys from rows.
        dropout_key: Or None.
        output: As returned.
        lse: As returned; where it holds sinks too, and output with it, all of this is
            right for the rest.
        d_output: Cotangent of output, likewise the next of lse.
        d_lse: Cotangent of lse.
    """
    static = dataclasses.replace(static, span=None)
    tiling, (q, k, v, bias) = static.tiling, operands
    batch, rows, kv_heads, group, head_dim = q.shape
    dtype, scale = precise(q), scale_of(static, operands)
    q, output, d_output = (jnp.moveaxis(x, 1, 3) for x in (q, output, d_output))
    is_empty = lse == -jnp.inf
    d_output = jnp.where(is_empty[..., None], 0, d_output)
    delta = (d_output * output).sum(axis=-1) - jnp.where(is_empty, 0, d_lse)
    delta = delta[..., None]
    lse = jnp.where(is_empty, 0, lse)[..., None]
    lists = key_lists(hidden, tiling, static.q_len, static.kv_len)
    blocks_kv, axes = lists.order.shape[1], varying_axes(operands)
    chunks = group // tiling.group
    # A product over the rows of both sides is far slower on a CPU than one over the
    # last axis of its first: all that needs to be turned for that is turned here.
    k_by_head, v_by_head = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    # A row that sees nothing may hold anything, and 0 * NaN is NaN. What a row that
    # sees a key makes of NaN is in its logits.
    q_finite = jnp.where(jnp.isfinite(q), q, jnp.zeros((), q.dtype))
    q_turned, d_output_turned = (jnp.moveaxis(x, 4, 2) for x in (q_finite, d_output))

    def heads(d_bias: Any, number: Array) -> tuple[Any, tuple[Array, ...]]:
        sample, a = _unraveled(number, (batch, kv_heads // tiling.kv_heads))
        kv_head = a * tiling.kv_heads

        def block(carry: Any, j: Array) -> tuple[Any, tuple[Array, Array]]:
            def visit(is_full: bool, member: Any, i: Array, carry: Any) -> Any:
                d_q, d_bias, d_k, d_v = carry
                at = Place(sample, kv_head, member, i * tiling.q, ZERO)
                key = j * tiling.kv
                at = at_key(static, at, key)

                def rows_of(x: Array) -> Array:
                    return tiling.flat(at.take(x, "bhgqd", tiling))

                def turned_rows_of(x: Array) -> Array:
                    x = tiling.of_head(at.take(x, "bhdgq", tiling))
                    rows = tiling.group * tiling.q
                    return x.reshape(*x.shape[:-2], rows).astype(dtype)

                sees = None if is_full else hidden
                q_rows = scale.of(rows_of(q))
                keys = tiling.of_head(at.take(k_by_head, "bhkd", tiling))
                x = products(q_rows, keys.astype(q_rows.dtype), dtype)
                logits = logits_of(static, scale, x, bias, sees, at, key)
                p = exp_of_logits(below(logits.x * scale.late, rows_of(lse)))
                values = tiling.of_head(at.take(v_by_head, "bhkd", tiling))
                values = clean(values.astype(dtype), logits.key_seen)
                d_p = products(rows_of(d_output), values, dtype)
                d_p = dropped(static, dropout_key, at, j, d_p)
                d_x = p * (d_p - rows_of(delta))
                if logits.slope is not None:
                    d_x = d_x * logits.slope
                if logits.visible is not None:
                    d_x = jnp.where(logits.visible, d_x, 0)
                p = dropped(static, dropout_key, at, j, p)
                d_v = d_v + jnp.matmul(turned_rows_of(d_output_turned), p)
                if d_bias is not None:
                    part = tiling.split(d_x)[None]
                    d_bias = _added(d_bias, part, at.starts(d_bias, "bhgqk"))
                d_x = d_x * (scale.early * scale.late)
                d_k = d_k + jnp.matmul(turned_rows_of(q_turned), d_x)
                keys = clean(keys.astype(dtype), logits.key_seen)
                d_rows = tiling.split(jnp.matmul(d_x, keys))
                d_q = _added(d_q, d_rows, (ZERO, member, at.row, ZERO))
                return d_q, d_bias, d_k, d_v

            def chunk(c: Array | np.int32, carry: Any) -> Any:
                # A loop of a static length counts in int64 under x64.
                member = lax.convert_element_type(c, jnp.int32) * np.int32(tiling.group)

                def visit_rows(is_full: bool, i: Array, carry: Any) -> Any:
                    return visit(is_full, member, i, carry)

                return _visited(lists, sample, j, visit_rows, carry)

            lead = () if tiling.kv_heads == 1 else (tiling.kv_heads,)
            d_k = jnp.zeros((*lead, head_dim, tiling.kv), dtype)
            d_v = jnp.zeros((*lead, v.shape[-1], tiling.kv), dtype)
            carry = (*carry, *made_varying((d_k, d_v), axes))
            if chunks == 1:
                carry = chunk(ZERO, carry)
            else:
                carry = lax.fori_loop(ZERO, np.int32(chunks), chunk, carry)
            *carry, d_k, d_v = carry
            return tuple(carry), (d_k, d_v)

        d_q = jnp.zeros((tiling.kv_heads, group, rows, head_dim), dtype)
        d_q = made_varying(d_q, axes)
        numbers = jnp.arange(blocks_kv, dtype=jnp.int32)
        (d_q, d_bias), (d_k, d_v) = lax.scan(block, (d_q, d_bias), numbers)
        return d_bias, (d_q, d_k, d_v)

    d_bias: Any = None if bias is None else jnp.zeros(bias.shape, dtype)
    d_bias = made_varying(d_bias, axes)
    numbers = jnp.arange(batch * (kv_heads // tiling.kv_heads), dtype=jnp.int32)
    d_bias, (d_q, d_k, d_v) = lax.scan(heads, d_bias, numbers)
    d_q = jnp.moveaxis(d_q.reshape(q.shape), 3, 1) * scale.query
    d_k = _from_key_blocks(static, d_k, k) * scale.query
    d_v = _from_key_blocks(static, d_v, v)
    if bias is not None:
        d_bias = d_bias.astype(bias.dtype)
    return Operands(
        d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias
    )


def _visited(
    lists: Lists,
    sample: Array,
    number: Array,
    visit: Callable[[bool, Array, Any], Any],
    carry: Any,
) -> Any:
    """Visits the blocks of the other side that a block meets.

    Those that are seen whole come first, by a loop of their own, which has no masks.

    Args:
        lists: Of each block of this side.
        sample: Which sample.
        number: Which block.
        visit: Of whether the other is seen whole, its number and the carry.
        carry: What the first visit is given.
    """
    listed = sample if lists.order.shape[0] > 1 else ZERO
    order, full, count = (jnp.asarray(x) for x in lists[:3])
    ends = (full[listed, number], count[listed, number])

    def step(is_full: bool, n: Array, carry: Any) -> Any:
        return visit(is_full, order[listed, number, n], carry)

    if lists.some_full:
        carry = lax.fori_loop(ZERO, ends[0], functools.partial(step, True), carry)
    if lists.some_partial:
        carry = lax.fori_loop(*ends, functools.partial(step, False), carry)
    return carry


def _unraveled(number: Array, grid: tuple[int, ...]) -> list[Array]:
    """Returns the indices of a number in a grid, all int32, whatever x64 says."""
    number, found = lax.convert_element_type(number, jnp.int32), []
    for size in reversed(grid):
        found.append(lax.rem(number, np.int32(size)))
        number = lax.div(number, np.int32(size))
    return found[::-1]


def _added(total: Array, part: Array, starts: tuple[Any, ...]) -> Array:
    """Adds a part at its place, summed over the axes of which total has but one."""
    axes = [a for a, size in enumerate(total.shape) if size == 1 != part.shape[a]]
    part = part.sum(axis=axes, keepdims=True)
    before = lax.dynamic_slice(total, starts, part.shape)
    return lax.dynamic_update_slice(total, before + part, starts)


def _from_key_blocks(static: Static, x: Array, like: Array) -> Array:
    """Joins `[batch * head blocks, key blocks, kv_heads, size, keys]` as key lies."""
    batch, kv_len, kv_heads, size = like.shape
    tiling, blocks = static.tiling, x.shape[1]
    shape = (batch, kv_heads // tiling.kv_heads, blocks, tiling.kv_heads, size)
    x = x.reshape(*shape, tiling.kv)
    x = x.transpose(0, 2, 5, 1, 3, 4)  # [batch, blocks, keys, a, kv_heads, size]
    x = x.reshape(batch, blocks, tiling.kv, kv_heads, size)
    rest = kv_len % tiling.kv
    whole = x[:, : kv_len // tiling.kv]
    whole = whole.reshape(batch, kv_len - rest, kv_heads, size)
    if not rest:
        return whole
    return jnp.concatenate([whole, x[:, -1, -rest:]], axis=1)
