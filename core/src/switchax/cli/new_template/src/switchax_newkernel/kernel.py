"""The kernel: an online softmax over blocks of keys, in Pallas.

References:
    Tri Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023, arXiv:2307.08691, algorithm 1. The backward pass is borrowed
    from switchax-chunked: plain JAX by blocks, which needs the output and lse alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from switchax_chunked import borrow_backward

__all__ = ["attend"]

BLOCK_Q = 64
BLOCK_KV = 128


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced; see `attend`."""

    softmax_scale: float
    causal: bool
    interpret: bool


def _attend_block(
    # inputs
    q_offset_ref: Any,  # [1, 1] int32, in scalar memory
    q_ids_ref: Any,  # [block_q, 1] int32
    kv_ids_ref: Any,  # [1, block_kv] int32
    q_ref: Any,  # [block_q, head_dim]
    k_ref: Any,  # [block_kv, head_dim]
    v_ref: Any,  # [block_kv, v_head_dim]
    # outputs
    output_ref: Any,  # [block_q, v_head_dim] float32, for the backward pass
    lse_ref: Any,  # [block_q, 1] float32
    # scratch, kept from one block of keys to the next
    m_ref: Any,  # [block_q, 1] float32
    l_ref: Any,  # [block_q, 1] float32
    acc_ref: Any,  # [block_q, v_head_dim] float32
    *,
    static: Static,
) -> None:
    """Takes one block of keys into the softmax of one block of rows."""
    block, blocks = pl.program_id(3), pl.num_programs(3)
    first_row = q_offset_ref[0, 0] + pl.program_id(2) * BLOCK_Q
    first_key = block * BLOCK_KV

    @pl.when(block == 0)
    def start() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    # Blocks right of the diagonal are skipped, though not their copies.
    @pl.when(first_key < first_row + BLOCK_Q if static.causal else True)
    def visit() -> None:
        visible = q_ids_ref[...] == kv_ids_ref[...]
        if static.causal:
            row = lax.broadcasted_iota(jnp.int32, visible.shape, 0)
            key = lax.broadcasted_iota(jnp.int32, visible.shape, 1)
            visible &= first_key + key <= first_row + row
        s = static.softmax_scale * _product(q_ref[...], k_ref[...], ((1,), (1,)))
        s = jnp.where(visible, s, -jnp.inf)
        m = jnp.maximum(m_ref[...], s.max(axis=1, keepdims=True))
        base = jnp.where(m == -jnp.inf, 0.0, m)  # -inf - -inf would be NaN
        p = jnp.exp(s - base)
        decay = jnp.exp(m_ref[...] - base)
        m_ref[...] = m
        l_ref[...] = decay * l_ref[...] + p.sum(axis=1, keepdims=True)
        pv = _product(p.astype(v_ref.dtype), v_ref[...], ((1,), (0,)))
        acc_ref[...] = decay * acc_ref[...] + pv

    @pl.when(block == blocks - 1)
    def finish() -> None:
        l = l_ref[...]
        is_empty = l == 0  # no key was visible: output 0, lse -inf
        l = jnp.where(is_empty, 1.0, l)
        output_ref[...] = acc_ref[...] / l
        lse_ref[...] = jnp.where(is_empty, -jnp.inf, m_ref[...] + jnp.log(l))


def _product(a: Array, b: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    """Returns a product over one axis of each, accumulated in float32."""
    # A TPU would round float32 operands to bfloat16; other operands allow no choice.
    is_float32 = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (axes, ((), ())), precision, preferred_element_type=jnp.float32
    )


def _launch(
    static: Static,
    q: Array,
    k: Array,
    v: Array,
    q_offset: Array,
    q_ids: Array,
    kv_ids: Array,
) -> tuple[Array, Array]:
    """Runs the kernel over batch, heads, blocks of rows and blocks of keys."""
    batch, heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, v_head_dim = v.shape
    group = np.int32(heads // kv_heads)  # as wide as a program id

    def rows(size: int) -> pl.BlockSpec:
        shape = (None, None, BLOCK_Q, size)
        return pl.BlockSpec(shape, lambda b, h, i, j: (b, h, i, 0))

    def keys(size: int) -> pl.BlockSpec:
        shape = (None, None, BLOCK_KV, size)
        return pl.BlockSpec(shape, lambda b, h, i, j: (b, lax.div(h, group), j, 0))

    shape = (batch, heads, q_len)
    output, lse = pl.pallas_call(
        functools.partial(_attend_block, static=static),
        grid=(batch, heads, q_len // BLOCK_Q, kv_len // BLOCK_KV),
        in_specs=[
            pl.BlockSpec((1, 1), lambda b, h, i, j: (0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((None, BLOCK_Q, 1), lambda b, h, i, j: (b, i, 0)),
            pl.BlockSpec((None, 1, BLOCK_KV), lambda b, h, i, j: (b, 0, j)),
            rows(head_dim),
            keys(head_dim),
            keys(v_head_dim),
        ],
        out_specs=[rows(v_head_dim), rows(1)],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, v_head_dim), jnp.float32),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct((*shape, 1), jnp.float32),  # type: ignore[no-untyped-call]
        ],
        scratch_shapes=[
            pltpu.VMEM((BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((BLOCK_Q, v_head_dim), jnp.float32),
        ],
        interpret=static.interpret,
    )(q_offset[None, None], q_ids[:, :, None], kv_ids[:, None, :], q, k, v)
    return output, lse[..., 0]


def _visibility(causal: bool, q_offset: Array, q_ids: Array, kv_ids: Array) -> Array:
    """Returns `[batch, q_len, kv_len]`, True where the row sees the key."""
    visible = q_ids[:, :, None] == kv_ids[:, None, :]
    if causal:
        rows = q_offset + jnp.arange(q_ids.shape[1], dtype=jnp.int32)
        keys = jnp.arange(kv_ids.shape[1], dtype=jnp.int32)
        visible &= keys[None, None, :] <= rows[None, :, None]
    return visible


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    causal: bool,
    q_offset: Array | int,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """Computes attention by one kernel, with derivatives in reverse mode.

    Query head h reads kv head `h // (heads // kv_heads)`.

    Args:
        q: `[batch, heads, q_len, head_dim]`, q_len a multiple of 64.
        k: `[batch, kv_heads, kv_len, head_dim]`, kv_len a multiple of 128.
        v: `[batch, kv_heads, kv_len, v_head_dim]`.
        softmax_scale: Factor of the logits.
        causal: Whether row i sees keys up to `i + q_offset` only.
        q_offset: An int or an int32 scalar.
        q_segment_ids: int32 `[batch, q_len]`, or None; negative matches nothing.
        kv_segment_ids: int32 `[batch, kv_len]`, or None.
        interpret: Whether Pallas interprets the kernel, as it must on a CPU.

    Returns:
        Output `[batch, heads, q_len, v_head_dim]` in q's dtype, and lse
        `[batch, heads, q_len]` in float32.
    """
    # A backward pass of your own takes the place of this: a `jax.custom_vjp`.
    attend_forward = functools.partial(_forward, interpret=interpret)
    with_gradients = borrow_backward(attend_forward, layout="bhtd")
    segments = {}
    if q_segment_ids is not None:
        segments = {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}
    return with_gradients(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_offset=q_offset,
        **segments,
    )


def _forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float,
    causal: bool,
    q_offset: Array | int,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    interpret: bool,
) -> tuple[Array, Array]:
    """Brings operands to what the kernel takes; see `attend`."""
    batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    if q_segment_ids is None or kv_segment_ids is None:
        zeros = jnp.zeros((batch, q_len + kv_len), jnp.int32)
        # Or XLA would spend seconds on folding what follows while it compiles.
        zeros = lax.optimization_barrier(zeros)  # type: ignore[no-untyped-call]
        q_segment_ids, kv_segment_ids = zeros[:, :q_len], zeros[:, q_len:]
    # So that the kernel has but to compare: what is negative differs on both sides.
    q_ids = jnp.maximum(q_segment_ids, -1)
    kv_ids = jnp.where(kv_segment_ids < 0, -2, kv_segment_ids)
    # Beyond these it means the same, and cannot overflow when positions are added.
    offset = jnp.clip(jnp.asarray(q_offset, jnp.int32), -q_len, kv_len)
    # What nothing sees may hold NaN, and 0 * NaN is NaN. XLA fuses this into two
    # reductions: nothing of q_len * kv_len is written.
    visible = _visibility(causal, offset, q_ids, kv_ids)
    row_sees, key_seen = visible.any(axis=2), visible.any(axis=1)
    q = jnp.where(row_sees[:, None, :, None], q, 0)
    k, v = (jnp.where(key_seen[:, None, :, None], x, 0) for x in (k, v))
    static = Static(softmax_scale, causal, interpret)
    return _launch(static, q, k, v, offset, q_ids, kv_ids)
