"""The forward pass: one kernel, an online softmax over tiles of keys by rows.

Logits are computed keys by rows, the other way round than is usual: then a row's
maximum and sum are taken over sublanes, by plain vector operations, its statistics lie
along the lanes, and the product with the values fills the matrix unit, whose weights
are the probabilities. The products of the next chunk are issued before the softmax of
this one, so that the matrix unit does not wait.

References:
    Tri Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .launch import (
    Refs,
    Step,
    either_way,
    launch,
    listed,
    listed_place,
    step_of,
    with_table,
)
from .static import (
    LOG2E,
    Operands,
    Static,
    bias_of,
    logits_of,
    product,
    unit_of,
    visible_of,
)
from .steps import FIRST, LAST, Hidden, Steps, row_steps
from .windows import of_bias, of_hidden, window

__all__ = ["BIASES", "HIDES", "attend_rows"]

SUBLANES = 8
SLICE = 32
"""Keys whose probabilities are computed at once; more would not stay in registers."""
BIASES = {"bias", "key_bias", "row_bias"}
HIDES = {"first", "end", "q_ids", "kv_ids", "mask", "table"}


def _kernel(static: Static, *given: Any) -> None:
    """Takes a span of keys into the softmax of one block of rows."""
    *lists, refs = given
    step = step_of(Steps(*lists))

    @pl.when(step.ends & FIRST != 0)
    def start() -> None:
        refs["m"][...] = jnp.full_like(refs["m"], -jnp.inf)
        refs["l"][...] = jnp.zeros_like(refs["l"])
        refs["acc"][...] = jnp.zeros_like(refs["acc"])

    @pl.when(step.count > 0)
    def visit() -> None:
        _visit(refs, step, static)

    @pl.when(step.ends & LAST != 0)
    def finish() -> None:
        l = refs["l"][...].sum(axis=0, keepdims=True)
        m = refs["m"][:1]
        is_empty = m == -jnp.inf
        l = jnp.where(is_empty, 1.0, l)
        output = jnp.where(is_empty, 0.0, refs["acc"][...] / l)
        refs["output"][...] = output.astype(refs["output"].dtype)
        unit = unit_of(static, bool(BIASES & set(refs)))
        refs["lse"][...] = jnp.where(is_empty, -jnp.inf, m * unit + jnp.log(l))


def _visit(refs: Refs, step: Step, static: Static) -> None:
    """Visits chunks, each by three stages of which those of neighbours overlap.

    While the softmax of one chunk is taken, the products of the next are computed, and
    the values of the one before are added up: they share nothing, so the compiler mixes
    their instructions.
    """
    sizes = static.forward
    span, chunk_of = step.span * sizes.span, step.chunk_of
    whole, count = step.whole, step.count
    hides = HIDES & set(refs)
    unmasked = {name: ref for name, ref in refs.items() if name not in hides}

    def products(number: Any, into: int, is_whole: bool, lanes: slice) -> None:
        _products(
            unmasked if is_whole else refs, chunk_of(number), span, into, static, lanes
        )

    def softmax(into: int, lanes: slice) -> None:
        _softmax(refs, into, static, lanes)

    def values(number: Any, into: int, lanes: slice) -> None:
        chunk = chunk_of(jnp.maximum(number, 0))
        _values(refs, chunk, into, static, lanes)

    groups = [
        slice(first, first + sizes.lanes)
        for first in range(0, sizes.block, sizes.lanes)
    ]

    def alone(is_whole: bool) -> None:
        for lanes in groups:
            products(0, 0, is_whole, lanes)
            softmax(0, lanes)
            values(0, 0, lanes)

    def first_products(is_whole: bool) -> None:
        for lanes in groups:
            products(0, 0, is_whole, lanes)

    def one(number: Any, now: int, is_whole: bool) -> None:
        """Takes the softmax of a chunk, the next one of which is seen whole or not."""
        for lanes in groups:
            values(number - 1, 1 - now, lanes)
            products(number + 1, 1 - now, is_whole, lanes)
            softmax(now, lanes)

    def last(now: int) -> None:
        for lanes in groups:
            values(count - 2, 1 - now, lanes)
            softmax(now, lanes)
            values(count - 1, now, lanes)

    either = functools.partial(either_way, bool(hides))

    if sizes.chunks == 1:  # there is no neighbour
        # All keys in one: it is hardly ever seen whole.
        either(False if static.kv_len <= sizes.chunk else whole > 0, alone)
        return
    # Of the chunk before the first nothing is added.
    refs["p1"][...] = jnp.zeros_like(refs["p1"])
    refs["decay"][1] = jnp.ones_like(refs["decay"][1])
    either(whole > 0, first_products)

    if sizes.unroll == 2:

        @pl.loop(0, (count - 1) // 2)
        def body(number: Any) -> None:
            def pair(is_whole: bool) -> None:
                one(2 * number, 0, is_whole)
                one(2 * number + 1, 1, is_whole)

            either(2 * number + 2 < whole, pair)

        def last_two(is_whole: bool) -> None:
            one(count - 2, 0, is_whole)
            last(1)

        pl.when(count % 2 == 0)(lambda: either(count - 1 < whole, last_two))
        pl.when(count % 2 == 1)(functools.partial(last, 0))
        return

    @pl.loop(0, count - 1)
    def body(number: Any) -> None:
        def act(now: int) -> Any:
            return lambda is_whole: one(number, now, is_whole)

        for now in (0, 1):
            pl.when(number % 2 == now)(
                lambda now=now: either(number + 1 < whole, act(now))
            )

    for now in (0, 1):
        pl.when((count - 1) % 2 == now)(functools.partial(last, now))


def _products(
    refs: Refs, chunk: Any, span: Any, into: int, static: Static, lanes: slice
) -> None:
    """Computes the logits of a chunk, and the largest of each row."""
    sizes = static.forward
    q, top = refs["q"][lanes, :], None
    for piece in range(0, sizes.chunk, sizes.piece):
        start = pl.multiple_of(chunk * sizes.chunk, sizes.chunk) + piece
        keys = pl.ds(start, sizes.piece)
        x = product(refs["k"][keys, :], q, 1, 1)
        x, _ = logits_of(static, x, bias_of(refs, keys, lanes))
        visible = visible_of(refs, span + start, keys, lanes)
        if visible is not None:
            x = jnp.where(visible, x, -jnp.inf)
        refs[f"x{into}"][piece : piece + sizes.piece, lanes] = x
        most = x.reshape(-1, SUBLANES, sizes.lanes).max(axis=0)
        top = most if top is None else jnp.maximum(top, most)
    top = top.max(axis=0, keepdims=True)
    refs["top"][into, :, lanes] = jnp.broadcast_to(top, (SUBLANES, sizes.lanes))


def _softmax(refs: Refs, now: int, static: Static, lanes: slice) -> None:
    """Turns the logits of a chunk into probabilities, and adds them up."""
    sizes = static.forward
    may_be_empty = bool((HIDES | BIASES) & set(refs))
    unit = unit_of(static, bool(BIASES & set(refs))) * LOG2E
    m = refs["m"][:, lanes]
    m_new = jnp.maximum(m, refs["top"][now, :, lanes])
    base = m_new
    if may_be_empty:  # -inf - -inf would be NaN
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    decay = jnp.exp2((m - base) * unit)
    l = decay * refs["l"][:, lanes]
    for piece in range(0, sizes.chunk, SLICE):
        keys = slice(piece, piece + SLICE)
        x = refs[f"x{now}"][keys, lanes].reshape(-1, SUBLANES, sizes.lanes)
        p = jnp.exp2((x - base[None]) * unit)
        l = l + p.sum(axis=0)
        p = p.reshape(SLICE, sizes.lanes)
        refs[f"p{now}"][keys, lanes] = p.astype(refs[f"p{now}"].dtype)
    refs["m"][:, lanes], refs["l"][:, lanes] = m_new, l
    refs["decay"][now, :, lanes] = decay


def _values(refs: Refs, chunk: Any, of: int, static: Static, lanes: slice) -> None:
    """Adds the values of a chunk, weighted."""
    size = static.forward.chunk
    keys = pl.ds(pl.multiple_of(chunk * size, size), size)
    values = product(refs["v"][:, keys], refs[f"p{of}"][:, lanes], 1, 0)
    acc = refs["acc"][:, lanes] * refs["decay"][of, :1, lanes]
    refs["acc"][:, lanes] = acc + values


def attend_rows(
    static: Static, operands: Operands, hidden: Hidden
) -> tuple[Array, Array]:
    """Computes attention without sinks.

    Returns:
        Output `[batch, heads, v_head_dim, q_len]` in q's dtype and lse
        `[batch, heads, q_len]` in float32; 0 and -inf where a row sees no key.
    """
    q, k, v, bias = operands
    batch, heads, rows, _ = q.shape
    v_head_dim = v.shape[3]
    sizes = static.forward
    blocks = {"q": sizes.block, "k": sizes.span, "g": heads // k.shape[1]}
    lists = static.q_len, static.kv_len, sizes.block, sizes.chunk, sizes.chunks
    steps = row_steps(hidden, *lists, static.pattern)
    steps, table = with_table(
        steps, static.pattern, sizes.block, sizes.span, by_rows=True
    )
    place = listed_place(steps, by_rows=True)
    inputs = {
        "q": window(q, "bhqd", blocks, place),
        "k": window(k, "bgkd", blocks, place),
        "v": window(v.swapaxes(2, 3), "bgdk", blocks, place),
        **of_hidden(hidden, blocks, place),
        **of_bias(bias, blocks, place),
        **table,
    }
    shape = jax.ShapeDtypeStruct
    outputs = {
        "output": window(
            shape((batch, heads, v_head_dim, rows), static.output),
            "bhdq",
            blocks,
            place,
        ),
        "lse": window(
            shape((batch, heads, 1, rows), jnp.float32), "bhdq", blocks, place
        ),
    }
    statistic = (SUBLANES, sizes.block)
    tile = (sizes.chunk, sizes.block)
    copies = range(min(sizes.chunks, 2))
    scratch = {
        "m": pltpu.VMEM(statistic, jnp.float32),
        "l": pltpu.VMEM(statistic, jnp.float32),
        "acc": pltpu.VMEM((v_head_dim, sizes.block), jnp.float32),
        "top": pltpu.VMEM((len(copies), *statistic), jnp.float32),
        "decay": pltpu.VMEM((len(copies), *statistic), jnp.float32),
        **{f"x{n}": pltpu.VMEM(tile, jnp.float32) for n in copies},
        **{f"p{n}": pltpu.VMEM(tile, v.dtype) for n in copies},
    }
    output, lse = launch(
        functools.partial(_kernel, static),
        "pallas_flash_forward",
        static,
        grid=(batch, heads, steps.block.shape[1]),
        scalars=listed(steps),
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        parallel=2,
    )
    lse = lse[:, :, 0]
    written = sizes.block * -(-static.q_len // sizes.block)
    if written < rows:  # what is copied at once in the other pass reaches beyond
        is_written = (np.arange(rows) < written)[None, None]
        lse = jnp.where(is_written, lse, -jnp.inf)
        output = jnp.where(is_written[:, :, None], output, 0)
    return output, lse
