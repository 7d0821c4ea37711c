"""The backward pass: one kernel for the gradients of query, key and value.

Blocks of keys stay in the kernel, chunks of rows pass by; the gradient of query is
added up in vector memory for all rows of a head, so that probabilities are computed
once for all three. As in the forward pass all of it is keys by rows.

A product either streams what was just computed through the matrix unit or makes it the
unit's weights, which for two of the three means turning it. The gradient of value
streams the probabilities, and the others push their cotangents: so pushing, turning and
streaming take about as long as each other.

References:
    Tri Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 2; departs from it in
    that the gradient of query stays on the chip.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .forward import BIASES, HIDES
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
from .steps import FIRST, LAST, Hidden, Steps, key_steps
from .windows import of_bias, of_hidden, window

__all__ = ["bias_gradient", "gradients_of"]

_VALUES = 4 * 4  # bytes: products of two groups of keys, two of each, in float32
_QUERY_FIRST = ("v5e", "v5p")  # whose matrix units are of 128 x 128


def _kernel(static: Static, *given: Any) -> None:
    """Takes a span of rows into the gradients of one block of keys."""
    *lists, refs = given
    step = step_of(Steps(*lists))

    @pl.when(pl.program_id(2) == 0)
    def start_rows() -> None:
        refs["dq"][...] = jnp.zeros_like(refs["dq"])

    @pl.when(step.ends & FIRST != 0)
    def start() -> None:
        refs["acc_k"][...] = jnp.zeros_like(refs["acc_k"])
        refs["acc_v"][...] = jnp.zeros_like(refs["acc_v"])

    @pl.when(step.count > 0)
    def visit() -> None:
        _visit(refs, step, static)

    @pl.when(step.ends & LAST != 0)
    def finish() -> None:
        refs["dk"][...] = refs["acc_k"][...].astype(refs["dk"].dtype)
        refs["dv"][...] = refs["acc_v"][...].astype(refs["dv"].dtype)


def _visit(refs: Refs, step: Step, static: Static) -> None:
    """Visits chunks of rows, each by groups of keys.

    The products of a group are asked for before what is made of the one before it: they
    share nothing, so the compiler mixes their instructions.
    """
    sizes = static.backward
    key, row = step.block * sizes.block, step.span * sizes.span
    hides = HIDES & set(refs)
    unmasked = {name: ref for name, ref in refs.items() if name not in hides}
    groups = [
        slice(first, first + sizes.piece)
        for first in range(0, sizes.block, sizes.piece)
    ]

    def chunk(number: Any, is_whole: bool) -> None:
        start = step.chunk_of(number) * sizes.chunk
        rows = pl.ds(pl.multiple_of(start, sizes.chunk), sizes.chunk)
        start = pl.multiple_of(row + start, sizes.chunk)
        all_rows = pl.ds(start, sizes.chunk)
        given = unmasked if is_whole else refs
        following = _products(refs, rows, groups[0])
        for keys, next_keys in zip(groups, [*groups[1:], None], strict=True):
            products = following
            if next_keys is not None:
                following = _products(refs, rows, next_keys)
            weights = _weights(given, products, rows, key, static, keys)
            _gradients(refs, weights, rows, all_rows, static, keys)

    either = functools.partial(either_way, bool(hides))

    if sizes.chunks == 1:  # all rows in one: it is hardly ever seen whole
        is_whole = False if static.q_len <= sizes.chunk else step.whole > 0
        either(is_whole, functools.partial(chunk, 0))
        return

    @pl.loop(0, step.count)
    def body(number: Any) -> None:
        either(number < step.whole, functools.partial(chunk, number))


def _products(refs: Refs, rows: Any, keys: slice) -> tuple[Any, Any]:
    """Returns products of keys with rows, and of values with cotangents."""
    x = product(refs["k"][keys, :], refs["q"][:, rows], 1, 0)
    return x, product(refs["v"][keys, :], refs["do"][:, rows], 1, 0)


def _weights(
    refs: Refs,
    products: tuple[Any, Any],
    rows: Any,
    key: Any,
    static: Static,
    keys: slice,
) -> tuple[Any, Any]:
    """Turns products into probabilities and the cotangents of logits, float32."""
    x, y = products
    unit = unit_of(static, bool(BIASES & set(refs))) * LOG2E
    x, slope = logits_of(static, x, bias_of(refs, keys, rows))
    p = jnp.exp2(x * unit - refs["lse"][:, rows] * LOG2E)
    d = p * (y - refs["delta"][:, rows])
    if slope is not None:
        d = d * slope
    visible = visible_of(refs, key + keys.start, keys, rows)
    if visible is not None:
        p, d = (jnp.where(visible, z, 0.0) for z in (p, d))
    return p, d


def _gradients(
    refs: Refs,
    weights: tuple[Any, Any],
    rows: Any,
    all_rows: Any,
    static: Static,
    keys: slice,
) -> None:
    """Adds up what a chunk of rows gives; but for the scale."""
    p, d = (x.astype(refs["k"].dtype) for x in weights)

    def of_value() -> None:
        refs["acc_v"][keys, :] += product(p, refs["do_turned"][rows, :], 1, 0)

    def of_key() -> None:
        refs["acc_k"][:, keys] += product(refs["q"][:, rows], d, 1, 1)

    def of_query() -> None:
        refs["dq"][:, all_rows] += product(refs["k_turned"][:, keys], d, 1, 0)

    # In which order they are written is all that the compilers' schedules differ by.
    value_first = (of_value, of_key, of_query)
    query_first = (of_query, of_key, of_value)
    for gradient in query_first if static.generation in _QUERY_FIRST else value_first:
        gradient()


def gradients_of(
    static: Static,
    operands: Operands,
    hidden: Hidden,
    lse: Array,
    d_output: Array,
    delta: Array,
) -> tuple[Array, Array, Array]:
    """Computes the gradients of query, key and value.

    Args:
        static: As in the forward pass, likewise the next two.
        operands: See `Operands`.
        hidden: What hides keys.
        lse: `[batch, heads, q_len]` float32; +inf where a row sees nothing.
        d_output: Cotangent of the output, `[batch, heads, v_head_dim, q_len]`.
        delta: `[batch, heads, q_len]` float32: of each row the product of output and
            cotangent, less the cotangent of lse.

    Returns:
        Of query `[batch, heads, head_dim, q_len]`, and as each query head has them of
        key `[batch, heads, head_dim, kv_len]` and value `[batch, heads, kv_len,
        v_head_dim]`; all float32.
    """
    q, k, v, bias = operands
    batch, heads, rows, head_dim = q.shape
    kv_len, v_head_dim = v.shape[2:]
    sizes = static.backward
    blocks = {"q": sizes.span, "k": sizes.block, "g": heads // k.shape[1]}
    lists = static.q_len, static.kv_len, sizes.block, sizes.chunk, sizes.chunks
    steps = key_steps(hidden, *lists, static.pattern)
    steps, table = with_table(
        steps, static.pattern, sizes.span, sizes.block, by_rows=False
    )
    place = listed_place(steps, by_rows=False)

    def along(x: Array, axes: str) -> Any:
        return window(x, axes, blocks, place)

    inputs = {
        "q": along(q.swapaxes(2, 3), "bhdq"),
        "k": along(k, "bgkd"),
        "k_turned": along(k.swapaxes(2, 3), "bgdk"),
        "v": along(v, "bgkd"),
        "do": along(d_output, "bhdq"),
        "do_turned": along(d_output.swapaxes(2, 3), "bhqd"),
        "lse": along(lse[:, :, None], "bhdq"),
        "delta": along(delta[:, :, None], "bhdq"),
        **of_hidden(hidden, blocks, place),
        **of_bias(bias, blocks, place),
        **table,
    }
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = {
        # All rows of a head, until its last block of keys.
        "dq": along(shape((batch, heads, head_dim, rows)), "bhdd"),
        "dk": along(shape((batch, heads, head_dim, kv_len)), "bhdk"),
        "dv": along(shape((batch, heads, kv_len, v_head_dim)), "bhkd"),
    }
    scratch = {
        "acc_k": pltpu.VMEM((head_dim, sizes.block), jnp.float32),
        "acc_v": pltpu.VMEM((sizes.block, v_head_dim), jnp.float32),
    }
    return tuple(
        launch(
            functools.partial(_kernel, static),
            "pallas_flash_backward",
            static,
            grid=(batch, heads, steps.block.shape[1]),
            scalars=listed(steps),
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            parallel=2,
            values=_VALUES * sizes.piece * sizes.chunk,
        )
    )


def _bias_kernel(
    static: Static, place: Any, kept: Sequence[bool], reduced: Sequence[int], refs: Refs
) -> None:
    """Adds one tile to the gradient of the bias that it had."""
    sizes = static.backward
    is_first = functools.reduce(
        jnp.logical_and, (pl.program_id(axis) == 0 for axis in reduced), True
    )

    @pl.when(is_first)
    def start() -> None:
        refs["d_bias"][...] = jnp.zeros_like(refs["d_bias"])

    rows, keys = pl.ds(0, sizes.chunk), slice(0, sizes.block)
    block = place(*(pl.program_id(axis) for axis in range(4)))[3]
    products = _products(refs, rows, keys)
    _, d = _weights(refs, products, rows, block * sizes.block, static, keys)
    if not kept[3]:  # its rows lie along the lanes
        refs["d_bias"][...] += d.sum(axis=0, keepdims=True)
    elif kept[2]:
        refs["d_bias"][...] += d.T
    else:
        refs["d_bias"][...] += d.T.sum(axis=0, keepdims=True)


def bias_gradient(
    static: Static,
    operands: Operands,
    hidden: Hidden,
    lse: Array,
    d_output: Array,
    delta: Array,
) -> Array:
    """Computes the gradient of the bias, in its own shape and float32.

    A kernel of its own, which nothing else needs: it is gone where nobody asks for it.
    What the bias is the same for is added up on the chip. A pattern is a mask here.

    Args:
        static: As in `gradients_of`, likewise the others.
        operands: With a bias.
        hidden: What hides keys.
        lse: As there.
        d_output: As there.
        delta: As there.
    """
    q, k, v, bias = operands
    assert bias is not None  # narrows the type
    if static.pattern is not None:
        pairs = static.pattern.padded(q.shape[2], k.shape[2])
        mask = jnp.asarray(np.asarray(pairs))[None, None]
        if hidden.mask is not None:
            mask = mask & hidden.mask
        hidden = dataclasses.replace(hidden, mask=mask)
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    sizes = static.backward
    blocks = {"q": sizes.chunk, "k": sizes.block, "g": heads // k.shape[1]}
    # Rows of a bias that is the same for all keys are told apart, and added up after.
    kept = tuple(size > 1 for size in bias.shape)
    kept = (*kept[:2], kept[2] or not kept[3], kept[3])
    counts = (batch, heads, rows // sizes.chunk, keys // sizes.block)
    order = [a for a in range(4) if kept[a]] + [a for a in range(4) if not kept[a]]
    grid = tuple(counts[axis] for axis in order)

    def place(*step: Any) -> tuple[Any, ...]:
        of = dict(zip(order, step, strict=False))
        return tuple(of[axis] for axis in range(4))

    def along(x: Any, axes: str) -> Any:
        return window(x, axes, blocks, place)

    inputs = {
        "q": along(q.swapaxes(2, 3), "bhdq"),
        "k": along(k, "bgkd"),
        "v": along(v, "bgkd"),
        "do": along(d_output, "bhdq"),
        "lse": along(lse[:, :, None], "bhdq"),
        "delta": along(delta[:, :, None], "bhdq"),
        **of_hidden(hidden, blocks, place),
        **of_bias(bias, blocks, place),
    }
    lead = tuple(
        size if is_kept else 1
        for size, is_kept in zip((batch, heads), kept, strict=False)
    )
    shape, axes = (*lead, rows if kept[2] else 1, keys), "bhqk"
    if not kept[3]:
        shape, axes = (*lead, 1, rows), "bhdq"
    found = jax.ShapeDtypeStruct(shape, jnp.float32)
    reduced = [order.index(axis) for axis in range(4) if not kept[axis]]
    (result,) = launch(
        functools.partial(_bias_kernel, static, place, kept, reduced),
        "pallas_flash_bias_gradient",
        static,
        grid=grid,
        inputs=inputs,
        outputs={"d_bias": along(found, axes)},
        scratch={},
        parallel=0,
        values=_VALUES * sizes.block * sizes.chunk,
    )
    if not kept[3]:
        result = result.swapaxes(2, 3)
        return result if bias.shape[2] > 1 else result.sum(axis=2, keepdims=True)
    return result
