"""Turns the flags of `explain` into the arguments of a call."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from switchax.errors import near_miss
from switchax.kinds.attention import MaskPattern

from .flags import MODES, Shape, wrong

__all__ = ["arguments_of"]


def arguments_of(kind: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the call that the flags describe.

    Args:
        kind: Name of the operation kind; "attention" must have `--q`.
        flags: Values of the options of `request_options`.

    Returns:
        Arguments by name, arrays as `jax.ShapeDtypeStruct`.

    Raises:
        WrongCall: If a flag is missing or cannot be read.
    """
    arguments: dict[str, Any] = {}
    if flags["q"] is not None:
        arguments |= _arrays(flags)
    elif kind == "attention" and not flags["others"]:
        todo = "for example --q 1,1024,8,64 --kv 1,1024,2,64 --causal"
        raise wrong("--q SHAPE", "no --q", todo)
    else:
        _check_beside_q(flags)
    arguments |= _static(flags)
    for name, value in map(_other, flags["others"]):
        if name in arguments:
            todo = "say it once, by its own flag or by --arg"
            raise wrong("each argument once", f"{name} twice", todo)
        arguments[name] = value
    if kind == "attention" and "query" in arguments:
        arguments.setdefault("key", arguments["query"])
        arguments.setdefault("value", arguments["key"])
    return arguments


def _check_beside_q(flags: Mapping[str, Any]) -> None:
    """Raises for flags of arrays that without `--q` would be dropped."""
    lengths = ("segment_ids", "q_lengths", "kv_lengths", "q_offset")
    shaped = ("kv", "v", "dtype", "bias", "mask", "mask_pattern", "sinks")
    for name in (*shaped, *lengths):
        value = flags[name]
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            todo = "or give all arrays by --arg"
            raise wrong(f"--q SHAPE with {flag}", "no --q", todo)


def _static(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = {
        "layout": flags["layout"],
        "mode": MODES[flags["mode"]] if flags["mode"] is not None else None,
        "causal": flags["causal"] or None,
        "window": flags["window"],
        "softmax_scale": flags["softmax_scale"],
        "logits_soft_cap": flags["soft_cap"],
        "dropout_prob": flags["dropout"],
        "return_lse": flags["lse"] or None,
        "return_weights": flags["weights"] or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _arrays(flags: Mapping[str, Any]) -> dict[str, Any]:
    dtype = flags["dtype"] or "bfloat16"
    query = flags["q"]
    key = flags["kv"] if flags["kv"] is not None else query
    value = flags["v"] if flags["v"] is not None else key
    layout = flags["layout"] or "bthd"
    q_sizes = dict(zip(layout, query, strict=False))
    kv_sizes = dict(zip(layout, key, strict=False))
    packed = layout == "thd"
    batch = (q_sizes.get("b", 1),)
    rows, keys = (q_sizes.get("t", 0),), (kv_sizes.get("t", 0),)
    heads, sinks = q_sizes.get("h", 0), flags["sinks"]
    shapes: dict[str, tuple[Shape | None, str]] = {
        "query": (query, dtype),
        "key": (key, dtype),
        "value": (value, dtype),
        "bias": (flags["bias"], dtype),
        "mask": (flags["mask"], "bool"),
        "softmax_aux": (_sinks(heads, sinks), dtype),
        "dropout_key": (() if flags["dropout"] else None, _key_dtype()),
    }
    if flags["segment_ids"]:
        shapes["q_segment_ids"] = (rows if packed else batch + rows, "int32")
        shapes["kv_segment_ids"] = (keys if packed else batch + keys, "int32")
    for name in ("q_lengths", "kv_lengths"):
        shapes[name] = (batch if flags[name] else None, "int32")
    offset = flags["q_offset"]
    if isinstance(offset, str):
        shapes["q_offset"] = (batch if offset == "batch" else (), "int32")
    arrays: dict[str, Any] = {
        name: _array(shape, dtype)
        for name, (shape, dtype) in shapes.items()
        if shape is not None
    }
    if isinstance(offset, int):
        arrays["q_offset"] = offset
    if flags["mask_pattern"] is not None:
        which, number = flags["mask_pattern"]
        arrays["mask_pattern"] = _pattern(which, number, rows[0], keys[0], offset)
    return arrays


def _pattern(which: str, number: int, q_len: int, kv_len: int, offset: Any) -> Any:
    make = MaskPattern.chunked if which == "chunked" else MaskPattern.prefix
    if isinstance(offset, str):
        todo = "a pattern is known before the offset is"
        raise wrong("--q-offset N with --mask-pattern", f"--q-offset={offset}", todo)
    try:
        return make(number, q_len, kv_len, offset or 0)
    except ValueError as error:
        got = f"--mask-pattern={which}:{number}"
        raise wrong("a number of tokens from 1 on", got, "say how many") from error


def _array(shape: Shape, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _key_dtype() -> Any:
    return jax.eval_shape(jax.random.key, 0).dtype


def _sinks(heads: int, sinks: int | None) -> Shape | None:
    if sinks is None:
        return None
    return (heads,) if sinks == 1 else (heads, sinks)


def _other(text: str) -> tuple[str, Any]:
    """Reads `name=dtype[sizes]`, or `name=value` with a Python literal or a word."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier():
        todo = "for example query=bfloat16[64,8,128] or causal=True"
        got = f"--arg {text}"
        raise wrong("--arg NAME=VALUE", got, todo)
    array = re.fullmatch(r"(\w+)\[([\d, ]*)\]", value)
    if array:
        try:
            dtype = jnp.dtype(array[1])
        except TypeError:
            got = f"--arg {text}{near_miss(array[1], ('bfloat16', 'float32', 'int32'))}"
            raise wrong("a dtype", got, "correct it") from None
        sizes = tuple(int(size) for size in array[2].split(",") if size.strip())
        return name, _array(sizes, dtype)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value
