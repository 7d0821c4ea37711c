"""A few rows on a long bfloat16 cache: two products over all heads, which read it once.

The cache is `[batch, kv_len, kv_heads, head_dim]`, and a product for each kv head would
first turn it, which costs more than the product. Here a row is as long as all heads of
a key together, with zeros where another head is: the product reads the cache as it
lies, and computes `kv_heads` times too much, which a CPU with matrix units for bfloat16
does while it waits for memory.

0 times what is finite adds nothing. What is not finite makes NaN, also where no row of
its own head sees it: then, and where little of the cache is seen, the tiles are asked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .exponential import exp_of_logits
from .logits import Operands, Static, below, logits_of, precise, scale_of
from .tiling import ZERO, Place, Tiling
from .varying import varying_axes
from .visible import Hidden, row_lists

__all__ = ["attend_cache", "suits"]

MOST_ROWS = 128
"""Query rows of all heads up to which reading the cache outweighs the products."""
MOST_KV_HEADS = 32
PANEL = 2**23
"""Values up to which a product over keys keeps its speed."""

Results = tuple[Array, Array]
ByTiles = Callable[[Operands, Hidden], Results]


@functools.cache
def has_matrix_units() -> bool:
    """Returns whether this host multiplies bfloat16 by tiles (AMX)."""
    try:
        return " amx_bf16 " in Path("/proc/cpuinfo").read_text()
    except (OSError, ValueError):
        return False


def suits(operands: Operands, hidden: Hidden, dropout_key: Array | None) -> bool:
    """Returns whether `attend_cache` is worth asking."""
    q, k, v, _ = operands
    _, rows, kv_heads, group, head_dim = q.shape
    # What is written of all keys, in float32, is no larger than what is read of them.
    arrays = 2 + (operands.bias is not None) + (hidden.mask is not None)
    is_small = arrays * 4 * rows * group <= 2 * (head_dim + v.shape[3])
    # Nor is a row with its zeros, where there are keys enough.
    is_small &= 2 * rows * kv_heads * group <= k.shape[1]
    return (
        dropout_key is None
        and {q.dtype, k.dtype, v.dtype} == {np.dtype(jnp.bfloat16)}
        and rows * kv_heads * group <= MOST_ROWS
        and is_small
        and kv_heads <= MOST_KV_HEADS
        and has_matrix_units()
        # vmap of `lax.cond` does not know of types inside a shard_map.
        and not varying_axes(operands)
    )


def attend_cache(
    static: Static, operands: Operands, hidden: Hidden, by_tiles: ByTiles
) -> Results:
    """Computes what `attend_keys` does, for few rows.

    Args:
        static: As in `attend_keys`, likewise the next two.
        operands: All bfloat16.
        hidden: What hides keys from rows.
        by_tiles: Computes the same, from the operands and what is hidden.
    """

    def on_cpu(operands: Operands, hidden: Hidden) -> Results:
        is_worth_it = _most_is_seen(static, hidden)
        if is_worth_it is False:
            return by_tiles(operands, hidden)
        if is_worth_it is True:
            found, is_right = _by_products(static, operands, hidden)
        else:
            found, is_right = lax.cond(
                is_worth_it,
                functools.partial(_by_products, static),
                functools.partial(_nothing, static),
                operands,
                hidden,
            )
        right: Results = lax.cond(
            is_right, lambda operands, hidden: found, by_tiles, operands, hidden
        )
        return right

    found: Results = lax.platform_dependent(
        operands, hidden, cpu=on_cpu, default=by_tiles
    )
    return found


def _most_is_seen(static: Static, hidden: Hidden) -> bool | Array:
    """Returns whether half of the cache is seen or more; by tiles it is slower then."""
    lists = row_lists(hidden, static.tiling, static.q_len, static.kv_len)
    count = lists.count
    most = math.prod(static.tiling.blocks(static.q_len, static.kv_len)) * len(count)
    if isinstance(count, np.ndarray):
        return bool(2 * int(count.sum()) >= most)
    return 2 * jnp.asarray(count).sum() >= most


def _by_products(
    static: Static, operands: Operands, hidden: Hidden
) -> tuple[Results, Array]:
    """Returns results, and whether they hold."""
    q, k, v, bias = operands
    batch, rows, kv_heads, group, head_dim = q.shape
    kv_len, v_head_dim = v.shape[1], v.shape[3]
    dtype, scale = precise(q), scale_of(static, operands)
    tiling = Tiling(kv_heads, group, rows, kv_len)
    static = dataclasses.replace(static, tiling=tiling, span=None)
    # [batch, kv_heads, group, rows, kv_heads, head_dim], 0 off the diagonal of heads
    own = np.eye(kv_heads, dtype=bool).reshape(kv_heads, 1, 1, kv_heads, 1)
    spread = jnp.where(
        own, jnp.moveaxis(q, 1, 3)[:, :, :, :, None], jnp.zeros((), q.dtype)
    )
    spread = spread.reshape(batch, -1, kv_heads * head_dim)
    x = jnp.einsum(
        "bsc,bnc->bsn",
        k.reshape(batch, kv_len, -1),
        spread,
        preferred_element_type=dtype,
    )
    x = jnp.swapaxes(x, 1, 2).reshape(batch, kv_heads, group * rows, kv_len)

    def logits(sample: Array, x: Array) -> Array:
        first = jnp.asarray(ZERO)
        at = Place(sample, first, first, first, first)
        x = tiling.of_head(x)
        found = logits_of(static, scale, x, bias, hidden, at, first)
        return found.x.reshape(kv_heads, group, rows, kv_len)

    x = jax.vmap(logits)(jnp.arange(batch, dtype=jnp.int32), x)
    m = x.max(axis=-1, keepdims=True)
    is_empty = m == -jnp.inf
    base = jnp.where(is_empty, 0, m)
    p = exp_of_logits(below(x, base) * scale.late)
    l = jnp.where(is_empty, 1, p.sum(axis=-1, keepdims=True))
    # What multiplies the values is rounded, and its sum with it: weights add up to 1.
    p = p.astype(v.dtype)
    total = jnp.where(is_empty, 1, p.astype(dtype).sum(axis=-1, keepdims=True))
    panels = _panels(kv_len, kv_heads * v_head_dim)
    values = jnp.einsum(
        "bnps,bpsc->bpnc",
        p.reshape(batch, -1, panels, kv_len // panels),
        v.reshape(batch, panels, kv_len // panels, -1),
        preferred_element_type=dtype,
    ).sum(axis=1)
    shape = (batch, kv_heads, group, rows, kv_heads, v_head_dim)
    values = jnp.einsum("bhgqhd->bhgqd", values.reshape(shape))
    lse = jnp.where(is_empty, -jnp.inf, base * scale.late + jnp.log(l))[..., 0]
    output = jnp.moveaxis(jnp.where(is_empty, 0, values / total), 3, 1)
    return (output, lse), jnp.isfinite(values).all()


def _panels(kv_len: int, width: int) -> int:
    """Returns into how many equal parts the values are cut, 1 if none are equal."""
    least = max(1, -(-kv_len * width // PANEL))
    equal = (n for n in range(least, 2 * least + 1) if kv_len % n == 0)
    return next(equal, 1)


def _nothing(
    static: Static, operands: Operands, hidden: Hidden
) -> tuple[Results, Array]:
    """Returns what `_by_products` does, where it is not asked."""
    del static, hidden
    q, _, v, _ = operands
    batch, rows, kv_heads, group, _ = q.shape
    output = jnp.zeros((*q.shape[:4], v.shape[3]), precise(q))
    lse = jnp.zeros((batch, kv_heads, group, rows), precise(q))
    return (output, lse), jnp.asarray(False)
