"""A backward pass for kernels that have none: that of chunked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from switchax import ATTENTION, Capabilities, OperationMetadata, UnsupportedError

from .attend import attend, prepared
from .kernel import gradients
from .logits import precise
from .tiling import padded
from .varying import varying_alike

__all__ = ["borrow_backward"]

_OPERANDS = ("query", "key", "value")
_ARRAYS = (
    "bias",
    "mask",
    "q_segment_ids",
    "kv_segment_ids",
    "q_lengths",
    "kv_lengths",
    "softmax_aux",
)
_STATIC = ("softmax_scale", "causal", "window", "logits_soft_cap")
# Nothing of a call is brought to another form, but what core does to all.
_ALL = Capabilities(
    platforms={"any"},
    dtypes={"float32", "bfloat16", "float16", "float64"},
    features=set(ATTENTION.features),
)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(_ARRAYS),
    "causal": False,
    "window": None,
    "q_offset": 0,
    "logits_soft_cap": None,
    "dropout_prob": 0.0,
    "config": None,
}


def borrow_backward(
    forward: Callable[..., tuple[Array, Array]], *, layout: str = "bthd"
) -> Callable[..., tuple[Array, Array]]:
    """Gives a forward pass that returns lse the gradients of attention.

    The backward pass is plain JAX by blocks, in memory that grows as the operands do:
    it computes the weights anew from lse. It is right for whatever `forward` computes
    in the sense of the contract; second derivatives are refused. Let `forward`
    return its output in float32: one that is rounded to bfloat16 or float16 cannot be
    used, since its rounding would be in every gradient, and is computed anew, by blocks
    too. Policies of `jax.checkpoint` do not look into `forward`.

        attend = borrow_backward(my_kernel, layout="bhtd")
        output, lse = attend(query, key, value, softmax_scale=0.125, causal=True)

    Args:
        forward: Of query, key and value, and by keyword of exactly those of the
            arguments below that were given, options as Python's own numbers; returns
            the output, `[batch, q_len, heads, v_head_dim]` or as `layout` says, and
            lse, `[batch, heads, q_len]`, the natural logarithm in float32 (float64 for
            float64, or gradients are no better), of the sinks too. Rows that see
            nothing give 0 and -inf.
        layout: "bthd" or "bhtd", of query, key, value and output.

    Returns:
        A function of query, key and value, and by keyword `softmax_scale` and any of
        `bias`, `mask`, `q_segment_ids`, `kv_segment_ids`, `q_lengths`, `kv_lengths`,
        `causal`, `window`, `q_offset`, `logits_soft_cap` and `softmax_aux`, as
        `switchax.attention` takes and checks them. None is as if it were left out, and
        no offset is 0. Operands that lie on Explicit axes of a mesh are for core, or a
        `shard_map`, to split.
        It returns the output in query's dtype, and lse. Its gradients are those of
        query, key, value, bias and softmax_aux, by the cotangents of both. One that is
        inf or NaN does not reach keys from a row whose output is 0 and whose lse is
        that of its sinks, within 1e-5: it sees nothing.

    Raises:
        TypeError: If an argument is none of those: what it does cannot be known. So
            with dropout: which weights a kernel drops is its own. As
            `switchax.attention` raises, for instance if softmax_scale is traced: it has
            no gradient, and may be multiplied into query. From the function it
            returns, if `forward` returns no pair of floating arrays, or an lse in
            half precision.
        ValueError: If `layout` is another; as `switchax.attention` raises, for instance
            for a window whose sides are beyond all lengths; from the function it
            returns, if what `forward` returns has another shape.
        UnsupportedError: If a gradient is differentiated, even if nothing comes of it:
            `stop_gradient` goes around its operands.
    """
    if layout not in ("bthd", "bhtd"):
        raise ValueError(
            f"borrow_backward: expected layout to be 'bthd' or 'bhtd', got {layout!r}; "
            "transpose in the forward pass"
        )

    def with_gradients(query: Array, key: Array, value: Array, **given: Any) -> Any:
        known = {*_ARRAYS, *_STATIC, "q_offset"}
        if unknown := sorted(set(given) - known):
            raise TypeError(
                f"borrow_backward: got an argument {unknown[0]!r} whose gradient is "
                f"not known; expected some of {', '.join(sorted(known))}"
            )
        given = {n: x for n, x in given.items() if x is not None}
        if "softmax_scale" not in given:
            raise TypeError(
                "borrow_backward: expected softmax_scale, got none; a kernel is told "
                "it, for example head_dim ** -0.5"
            )
        qkv, static, arrays = _bound(layout, (query, key, value), given)
        query, key, value, arrays = varying_alike((*qkv, arrays))

        @_differentiated_once
        def called(query: Array, key: Array, value: Array, arrays: Any) -> Any:
            found = forward(query, key, value, **static, **arrays)
            return _checked(layout, found, query, value)

        @jax.custom_vjp
        def run(*operands: Any) -> Any:
            output, lse = called(*operands)
            return output.astype(query.dtype), lse

        def run_forward(*operands: Any) -> Any:
            output, lse = called(*operands)
            return (output.astype(query.dtype), lse), (operands, output, lse)

        @_differentiated_once
        def run_backward(residuals: Any, cotangents: Any) -> Any:
            operands, output, lse = residuals
            return _gradients(layout, static, operands, output, lse, *cotangents)

        run.defvjp(run_forward, run_backward)
        return run(query, key, value, arrays)

    return with_gradients


def _differentiated_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses a derivative of what a first derivative is made of."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            "borrow_backward: expected first derivatives in reverse mode, got a second "
            "derivative; put stop_gradient around the operands of the inner one, or "
            "use an operation that declares second_order, such as 'vanilla'"
        )

    return guarded


def _bound(
    layout: str, operands: tuple[Any, Any, Any], given: dict[str, Any]
) -> tuple[list[Array], dict[str, Any], dict[str, Any]]:
    """Checks and normalises a call as core does.

    Returns:
        Query, key and value; of what was given what is static, as Python's own numbers;
        and the arrays of it.
    """
    call = dict(zip(_OPERANDS, operands, strict=True))
    # Without an offset a forward method has rows that are aligned at key 0.
    call |= {"q_offset": 0, **given, "layout": layout}
    bound = ATTENTION.bind("borrow_backward", call, OperationMetadata())
    plan = ATTENTION.plan(bound.request, dataclasses.replace(_ALL, layouts=(layout,)))
    arrays, options = ATTENTION.operands(bound, plan)
    qkv = [arrays.pop(name) for name in _OPERANDS]
    found = {name: options[name] for name in _STATIC if name in given}
    static = {name: x for name, x in found.items() if x is not None}
    offset = arrays.pop("q_offset")
    if "q_offset" in given:
        (static if isinstance(offset, int) else arrays)["q_offset"] = offset
    return qkv, static, arrays


def _checked(
    layout: str, found: Any, query: Array, value: Array
) -> tuple[Array, Array]:
    """Returns what a forward pass returned, if it is what the backward pass takes."""
    rule = "borrow_backward: expected the forward pass to return"
    if not (isinstance(found, tuple | list) and len(found) == 2):
        got = f"{type(found).__name__}{getattr(found, 'shape', '')}"
        if isinstance(found, tuple | list):
            got += f" of {len(found)}"
        raise TypeError(f"{rule} (output, lse), got {got}; return these two")
    output, lse = found
    batch, heads = query.shape[0], query.shape[2 if layout == "bthd" else 1]
    q_len = query.shape[1 if layout == "bthd" else 2]
    shapes = {
        "output": (*query.shape[:3], value.shape[3]),
        "lse": (batch, heads, q_len),
    }
    for (name, shape), x in zip(shapes.items(), found, strict=True):
        if not isinstance(x, Array):
            raise TypeError(
                f"{rule} {name} as an array of JAX, got a {type(x).__name__}"
            )
        if x.shape != shape:
            raise ValueError(
                f"{rule} {name} of shape {shape}, got {x.shape}; with layout "
                f"{layout!r} query is {query.shape}"
            )
    if not jnp.issubdtype(output.dtype, jnp.floating):
        raise TypeError(
            f"{rule} a floating output, got {output.dtype}; float32 is best"
        )
    if lse.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{rule} lse in float32, got {lse.dtype}; every weight of the backward "
            "pass is computed from it"
        )
    return output, lse


def _gradients(
    layout: str,
    static: dict[str, Any],
    operands: tuple[Array, Array, Array, dict[str, Any]],
    output: Array,
    lse: Array,
    d_output: Array,
    d_lse: Array,
) -> tuple[Any, ...]:
    *qkv, arrays = operands
    given = {**_NEUTRAL, **static, **arrays}
    sinks = given.pop("softmax_aux")

    def natural(x: Array) -> Array:
        return x if layout == "bthd" else jnp.swapaxes(x, 1, 2)

    q, k, v = (natural(x) for x in qkv)
    batch, q_len, heads, _ = q.shape
    dtype = precise(q)
    if output.dtype != dtype:
        output, lse = attend(q, k, v, **given, softmax_aux=sinks, exact=True)
        output = natural(output)
    output, d_output = (natural(x).astype(dtype) for x in (output, d_output))
    lse, d_lse = lse.astype(dtype), d_lse.astype(dtype)
    d_of_keys = d_lse
    if sinks is not None and 0 not in lse.shape:
        d_output, d_of_keys = _where_keys_are_seen(sinks, output, lse, d_output, d_lse)
    found: dict[str, Any] = dict.fromkeys(arrays)
    if 0 in (batch, q_len, heads, k.shape[1]):
        d_qkv = [jnp.zeros_like(x) for x in qkv]
        if given["bias"] is not None:
            found["bias"] = jnp.zeros_like(given["bias"])
    else:
        call, taken, hidden = prepared(q, k, v, **given)
        rows, kv_heads, group = taken.q.shape[1:4]

        def by_group(x: Array) -> Array:  # [batch, q_len, heads, size]
            shape = (batch, rows, kv_heads, group, x.shape[3])
            return padded(x, 1, rows).reshape(shape)

        def of_rows(x: Array, fill: float) -> Array:  # [batch, heads, q_len]
            return padded(x, 2, rows, fill).reshape(batch, kv_heads, group, rows)

        d = gradients(
            call,
            taken,
            hidden,
            None,
            by_group(output),
            of_rows(lse, -jnp.inf),
            by_group(d_output),
            of_rows(d_of_keys, 0),
        )
        d_q = d.q.reshape(batch, rows, heads, q.shape[3])
        d_qkv = [d_q[:, :q_len], d.k, d.v]
        d_qkv = [natural(x) for x in d_qkv]
        if d.bias is not None:
            shape = given["bias"].shape
            d_bias = d.bias.reshape(*shape[:2], *d.bias.shape[3:])
            found["bias"] = d_bias[:, :, : shape[2]]
    if sinks is not None and 0 in sinks.shape:
        found["softmax_aux"] = jnp.zeros_like(sinks)
    elif sinks is not None:
        found["softmax_aux"] = _of_sinks(sinks, output, lse, d_output, d_lse)
    return *d_qkv, found


def _where_keys_are_seen(
    sinks: Array, output: Array, lse: Array, d_output: Array, d_lse: Array
) -> tuple[Array, Array]:
    """Returns cotangents, finite in rows that give 0 and have lse of the sinks alone.

    Without sinks such a row has an lse of -inf; what comes back to it may be anything.
    """
    total = jax.nn.logsumexp(sinks.astype(lse.dtype).reshape(lse.shape[1], -1), axis=1)
    most = (total + 1e-5 * (1 + jnp.abs(total))).reshape(1, -1, 1)
    is_of_sinks = lse <= most
    gives_none = (output == 0).all(-1) & jnp.swapaxes(is_of_sinks, 1, 2)
    is_lost = gives_none[..., None] & ~jnp.isfinite(d_output)
    d_lse_is_lost = jnp.swapaxes(gives_none, 1, 2) & ~jnp.isfinite(d_lse)
    return jnp.where(is_lost, 0, d_output), jnp.where(d_lse_is_lost, 0, d_lse)


def _of_sinks(
    sinks: Array, output: Array, lse: Array, d_output: Array, d_lse: Array
) -> Array:
    """A sink takes a share of each row and gives nothing for it."""
    heads = lse.shape[1]
    logits = sinks.astype(lse.dtype).reshape(1, heads, 1, -1)
    is_empty = lse == -jnp.inf
    total = jnp.where(is_empty, jnp.inf, lse)[..., None]
    mean = jnp.einsum("bthd,bthd->bht", output, d_output)
    slope = jnp.where(is_empty, 0, d_lse - mean)[..., None]
    return (
        (jnp.exp(logits - total) * slope)
        .sum((0, 2))
        .reshape(sinks.shape)
        .astype(sinks.dtype)
    )
