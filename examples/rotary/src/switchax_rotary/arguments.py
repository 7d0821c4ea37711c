"""Checks and normalises the arguments of a rotary call, before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from switchax import MODE_TRAIN, ArraySpec, Call, OperationMetadata
from switchax.checks import (
    as_array,
    as_number,
    brief,
    check_choice,
    check_devices,
    check_keywords,
    fail_type,
    fail_value,
    is_integer,
)
from switchax.metadata.precision import runtime_dtype_name

from .request import RotaryRequest

__all__ = ["PAIRINGS", "bind"]

PAIRINGS = ("half", "interleaved")
# Every argument beside the arrays, with the value that means "not used".
NEUTRAL: dict[str, Any] = {
    "base": 10000.0,
    "pairing": "half",
    "rotary_dim": None,
    "scale": 1.0,
}
STATIC = "it decides what is compiled: pass a number that is known beforehand"


def bind(where: str, arguments: Mapping[str, Any], metadata: OperationMetadata) -> Call:
    """Checks a rotary call and describes it; see `switchax_rotary.rotary`.

    Args:
        where: Who was called, for messages.
        arguments: Arguments by name, as the user gave them.
        metadata: Its `runtime_dtype` is what x is cast to.

    Returns:
        The call, with arrays as they came.

    Raises:
        TypeError: For an unknown keyword, a missing array, a wrong type or dtype.
        ValueError: For a wrong shape or value.
    """
    check_keywords(where, arguments, ("x", "positions", *NEUTRAL))
    given = {**NEUTRAL, **arguments}
    x = _x(where, given.get("x"))
    positions = _positions(where, given.get("positions"), x)
    head_dim = x.shape[3]
    rotary_dim = _rotary_dim(where, given["rotary_dim"], head_dim)
    pairing = check_choice(where, "pairing", given["pairing"], PAIRINGS)
    scale = as_number(where, "scale", given["scale"], STATIC)
    if not 0 < scale <= 1:
        got, todo = f"scale={scale}", "for a context twice as long pass 0.5"
        raise fail_value(where, "scale over 0 and up to 1", got, todo)
    base = as_number(where, "base", given["base"], STATIC)
    if not base >= 1:
        got, todo = f"base={base}", "most models have 10000.0"
        raise fail_value(where, "base of at least 1", got, todo)
    arrays = {"x": x, "positions": positions}
    check_devices(where, arrays)
    used = {
        "interleaved": pairing == "interleaved",
        "partial": rotary_dim != head_dim,
        "scale": scale != 1,
    }
    dtype = np.dtype(x.dtype).name
    request = RotaryRequest(
        kind="rotary",
        features=frozenset(name for name, is_used in used.items() if is_used),
        dtype=runtime_dtype_name(where, metadata) or dtype,
        layout="bthd",
        mode=MODE_TRAIN,
        **dict(zip(("batch", "length", "heads", "head_dim"), x.shape, strict=True)),
        rotary_dim=rotary_dim,
        output_dtype=dtype,
        arrays=tuple((name, ArraySpec.of(arrays[name])) for name in sorted(arrays)),
        base=base,
        pairing=pairing,
        scale=scale,
    )
    return Call(request, arrays)


def _x(where: str, value: Any) -> Any:
    x = as_array(where, "x", value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        todo = "cast it, for example to float32"
        raise fail_type(where, "x of a floating dtype", f"x of {x.dtype}", todo)
    if x.ndim != 4 or not isinstance(x.shape[3], int):
        rule = "x of shape [batch, length, heads, head_dim], the last one a number"
        todo = "add the axes that are missing"
        raise fail_value(where, rule, f"x of shape {list(x.shape)}", todo)
    return x


def _positions(where: str, value: Any, x: Any) -> Any:
    todo = "pass jnp.arange(length, dtype=jnp.int32), or one row for each sample"
    positions = as_array(where, "positions", value, todo)
    whole = jnp.issubdtype(positions.dtype, jnp.integer)
    if not (whole and np.can_cast(positions.dtype, np.int32)):
        rule, got = "positions of int32 or narrower", f"positions of {positions.dtype}"
        raise fail_type(where, rule, got, todo)
    batch, length = x.shape[:2]
    if positions.shape not in ((length,), (batch, length)):
        rule = f"positions of shape [{length}] or [{batch}, {length}]"
        got = f"positions of shape {list(positions.shape)}"
        raise fail_value(where, rule, got, todo)
    return positions


def _rotary_dim(where: str, value: Any, head_dim: int) -> int:
    if value is None and head_dim % 2:
        rule, got = "an even head_dim", f"head_dim={head_dim}"
        raise fail_value(where, rule, got, f"pass rotary_dim={head_dim - 1} or less")
    if value is None:
        return head_dim
    if not is_integer(value):
        got = f"rotary_dim={brief(value)}"
        raise fail_type(where, "rotary_dim to be a static int", got, STATIC)
    if value % 2 or not 0 < value <= head_dim:
        rule = f"rotary_dim even and from 2 to head_dim={head_dim}"
        raise fail_value(where, rule, f"rotary_dim={value}", "it counts both of a pair")
    return int(value)
