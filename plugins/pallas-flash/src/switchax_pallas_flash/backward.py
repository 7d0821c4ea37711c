"""The backward pass: one kernel for the gradients of query, key and value.

Blocks of keys stay in the kernel, chunks of rows pass by; the gradient of query is
added up in vector memory for all rows of a head, so that probabilities are computed
once for all three. As in the forward pass a chunk goes through stages of which those
of neighbours overlap, and all of it is keys by rows.

References:
    Tri Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 2; departs from it in
    that the gradient of query stays on the chip.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .forward import BIASES, HIDES
from .launch import Refs, Step, either_way, launch, listed_place, step_of
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
    sizes = static.backward
    key, row = step.block * sizes.block, step.span * sizes.span
    whole, count, chunk_of = step.whole, step.count, step.chunk_of
    hides = HIDES & set(refs)
    unmasked = {name: ref for name, ref in refs.items() if name not in hides}
    groups = [
        slice(first, first + sizes.piece)
        for first in range(0, sizes.block, sizes.piece)
    ]

    def rows_of(number: Any) -> Any:
        start = chunk_of(number) * sizes.chunk
        return pl.ds(pl.multiple_of(start, sizes.chunk), sizes.chunk)

    def products(number: Any, into: int, keys: slice) -> None:
        _products(refs, rows_of(number), into, keys)

    def weights(number: Any, now: int, is_whole: bool, keys: slice) -> None:
        given = unmasked if is_whole else refs
        _weights(given, rows_of(number), key, now, static, keys)

    def gradients(number: Any, of: int, keys: slice) -> None:
        rows = rows_of(number)
        start = pl.multiple_of(row + chunk_of(number) * sizes.chunk, sizes.chunk)
        _gradients(refs, rows, pl.ds(start, sizes.chunk), of, keys)

    def alone(is_whole: bool) -> None:
        for keys in groups:
            products(0, 0, keys)
            weights(0, 0, is_whole, keys)
            gradients(0, 0, keys)

    def one(number: Any, now: int, is_whole: bool) -> None:
        for keys in groups:
            products(number + 1, 1 - now, keys)
            gradients(jnp.maximum(number - 1, 0), 1 - now, keys)
            weights(number, now, is_whole, keys)

    def last(number: Any, now: int, is_whole: bool) -> None:
        for keys in groups:
            gradients(jnp.maximum(number - 1, 0), 1 - now, keys)
            weights(number, now, is_whole, keys)
            gradients(number, now, keys)

    either = functools.partial(either_way, bool(hides))

    if sizes.chunks == 1:  # there is no neighbour
        either(False if static.q_len <= sizes.chunk else whole > 0, alone)
        return
    # Of the chunk before the first nothing is added.
    for name in ("p1", "d1"):
        refs[name][...] = jnp.zeros_like(refs[name])
    for keys in groups:
        products(0, 0, keys)

    def stage(number: Any, act: Any) -> None:
        for now in (0, 1):
            pl.when(number % 2 == now)(
                lambda now=now: either(
                    number < whole, lambda is_whole: act(number, now, is_whole)
                )
            )

    @pl.loop(0, count - 1)
    def body(number: Any) -> None:
        stage(number, one)

    stage(count - 1, last)


def _products(refs: Refs, rows: Any, into: int, keys: slice) -> None:
    """Computes products of a chunk of rows with keys, and of its cotangent."""
    refs[f"x{into}"][keys, :] = product(refs["k"][keys, :], refs["q"][:, rows], 1, 0)
    refs[f"y{into}"][keys, :] = product(refs["v"][keys, :], refs["do"][:, rows], 1, 0)


def _weights(
    refs: Refs, rows: Any, key: Any, now: int, static: Static, keys: slice
) -> None:
    """Turns products into probabilities and the cotangents of logits."""
    has_bias = bool(BIASES & set(refs))
    unit = unit_of(static, has_bias) * LOG2E
    bias = bias_of(refs, keys, rows)
    x, slope = logits_of(static, refs[f"x{now}"][keys, :], bias)
    p = jnp.exp2(x * unit - refs["lse"][:, rows] * LOG2E)
    d = p * (refs[f"y{now}"][keys, :] - refs["delta"][:, rows])
    if slope is not None:
        d = d * slope
    visible = visible_of(refs, key + keys.start, keys, rows)
    if visible is not None:
        p, d = (jnp.where(visible, z, 0.0) for z in (p, d))
    refs[f"p{now}"][keys, :] = p.astype(refs[f"p{now}"].dtype)
    refs[f"d{now}"][keys, :] = d.astype(refs[f"d{now}"].dtype)


def _gradients(refs: Refs, rows: Any, all_rows: Any, of: int, keys: slice) -> None:
    """Adds up what a chunk of rows gives; but for the scale."""
    p, d = refs[f"p{of}"][keys, :], refs[f"d{of}"][keys, :]
    refs["acc_v"][:, keys] += product(refs["do"][:, rows], p, 1, 1)
    refs["acc_k"][:, keys] += product(refs["q"][:, rows], d, 1, 1)
    refs["dq"][:, all_rows] += product(refs["k_turned"][:, keys], d, 1, 0)


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
        Of query `[batch, heads, head_dim, q_len]`, and of key and value as each query
        head has them, `[batch, heads, ..., kv_len]`; all float32.
    """
    q, k, v, bias = operands
    batch, heads, rows, head_dim = q.shape
    kv_len, v_head_dim = v.shape[2:]
    sizes = static.backward
    blocks = {"q": sizes.span, "k": sizes.block, "g": heads // k.shape[1]}
    lists = static.q_len, static.kv_len, sizes.block, sizes.chunk, sizes.chunks
    steps = key_steps(hidden, *lists)
    place = listed_place(steps, by_rows=False)

    def along(x: Array, axes: str) -> Any:
        return window(x, axes, blocks, place)

    inputs = {
        "q": along(q.swapaxes(2, 3), "bhdq"),
        "k": along(k, "bgkd"),
        "k_turned": along(k.swapaxes(2, 3), "bgdk"),
        "v": along(v, "bgkd"),
        "do": along(d_output, "bhdq"),
        "lse": along(lse[:, :, None], "bhdq"),
        "delta": along(delta[:, :, None], "bhdq"),
        **of_hidden(hidden, blocks, place),
        **of_bias(bias, blocks, place),
    }
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = {
        # All rows of a head, until its last block of keys.
        "dq": along(shape((batch, heads, head_dim, rows)), "bhdd"),
        "dk": along(shape((batch, heads, head_dim, kv_len)), "bhdk"),
        "dv": along(shape((batch, heads, v_head_dim, kv_len)), "bhdk"),
    }
    tile = (sizes.block, sizes.chunk)
    copies = range(min(sizes.chunks, 2))
    scratch = {
        "acc_k": pltpu.VMEM((head_dim, sizes.block), jnp.float32),
        "acc_v": pltpu.VMEM((v_head_dim, sizes.block), jnp.float32),
        **{f"{x}{n}": pltpu.VMEM(tile, jnp.float32) for x in "xy" for n in copies},
        **{f"{x}{n}": pltpu.VMEM(tile, q.dtype) for x in "pd" for n in copies},
    }
    return tuple(
        launch(
            functools.partial(_kernel, static),
            "pallas_flash_backward",
            static,
            grid=(batch, heads, steps.block.shape[1]),
            scalars=steps,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            parallel=2,
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
    _products(refs, rows, 0, keys)
    _weights(refs, rows, block * sizes.block, 0, static, keys)
    d = refs["d0"][...]
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
    What the bias is the same for is added up on the chip.

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
    tile = pltpu.VMEM((sizes.block, sizes.chunk), jnp.float32)
    reduced = [order.index(axis) for axis in range(4) if not kept[axis]]
    (result,) = launch(
        functools.partial(_bias_kernel, static, place, kept, reduced),
        "pallas_flash_bias_gradient",
        static,
        grid=grid,
        inputs=inputs,
        outputs={"d_bias": along(found, axes)},
        scratch=dict.fromkeys(("x0", "y0", "p0", "d0"), tile),
        parallel=0,
    )
    if not kept[3]:
        result = result.swapaxes(2, 3)
        return result if bias.shape[2] > 1 else result.sum(axis=2, keepdims=True)
    return result
