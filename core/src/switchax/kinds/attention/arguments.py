"""Checks and normalises the arguments of an attention call (rules R1 to R5, R9, R10).

Everything here happens before anything is traced: an error names the argument, its
value and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from switchax.axes import MODE_TRAIN, check_mode
from switchax.checks import (
    as_array,
    as_bool,
    as_number,
    check_choice,
    check_devices,
    check_keywords,
    fail_type,
    fail_value,
    is_integer,
    unwrapped,
)
from switchax.kind import Call
from switchax.metadata.precision import check_softmax_dtype, runtime_dtype_name
from switchax.request import ArraySpec

from .pattern import MaskPattern
from .request import AttentionRequest, Window

if TYPE_CHECKING:
    from switchax.metadata import OperationMetadata

__all__ = ["LAYOUTS", "NEUTRAL", "bind"]

LAYOUTS = ("bthd", "bhtd", "thd")

# Every argument beside query, key and value, with the value that means "not used".
NEUTRAL: dict[str, Any] = {
    "bias": None,
    "mask": None,
    "mask_pattern": None,
    "q_segment_ids": None,
    "kv_segment_ids": None,
    "q_lengths": None,
    "kv_lengths": None,
    "causal": False,
    "window": None,
    "q_offset": None,
    "softmax_scale": None,
    "logits_soft_cap": None,
    "softmax_aux": None,
    "dropout_prob": 0.0,
    "dropout_key": None,
    "layout": "bthd",
    "mode": MODE_TRAIN,
    "return_lse": False,
    "return_weights": False,
}
OPERANDS = ("query", "key", "value")
# What jax.nn, PyTorch, flash-attn and models call them.
ELSEWHERE = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attention_mask": "mask",
    "attn_mask": "mask",
    "attn_bias": "bias",
    "is_causal": "causal",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "softcap": "logits_soft_cap",
    "sinks": "softmax_aux",
    "dropout_p": "dropout_prob",
    "dropout_rate": "dropout_prob",
    "dropout_rng": "dropout_key",
    "local_window_size": "window",
    "sliding_window": "window",
    "window_size": "window",
    "query_seq_lengths": "q_lengths",
    "key_value_seq_lengths": "kv_lengths",
    "return_residual": "return_lse",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_weights",
    "cu_seqlens_q": "q_segment_ids",
    "cu_seqlens_k": "kv_segment_ids",
    "alibi_slopes": "bias",
    "implementation": "operation",
    "attn_implementation": "operation",
    "backend": "operation",
    "impl": "operation",
}
INT32 = np.iinfo(np.int32)
POSITION = INT32.max // 4  # positions beyond any length, with room for sums


class Sizes(NamedTuple):
    """Sizes of one call, by the project's axis names."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def check_names(where: str, given: Iterable[str], *others: str) -> None:
    """Raises a TypeError for a name that the contract, and others, do not have."""
    check_keywords(where, given, (*OPERANDS, *NEUTRAL, *others), ELSEWHERE)


def bind(where: str, arguments: Mapping[str, Any], metadata: OperationMetadata) -> Call:
    """Checks an attention call and describes it.

    Args:
        where: Who was called, for messages.
        arguments: Arguments by name, as the user gave them.
        metadata: Its `runtime_dtype` lets operands of different dtypes through.

    Returns:
        The call, with arrays as JAX arrays and masks and biases as they came.

    Raises:
        TypeError: For an unknown keyword, a wrong type or dtype.
        ValueError: For a wrong shape or value.
    """
    check_names(where, arguments)
    given = {name: unwrapped(x) for name, x in {**NEUTRAL, **arguments}.items()}
    layout = check_choice(where, "layout", given["layout"], LAYOUTS)
    mode = given["mode"]
    if not isinstance(mode, str):
        todo = "pass one such as switchax.MODE_DECODE"
        raise fail_type(where, "mode to be a str", f"mode={mode!r}", todo)
    mode = check_mode(where, mode)
    arrays = _operands(where, given)
    sizes = _sizes(where, arrays, layout)
    dtype = _dtype(where, arrays, metadata)
    check_softmax_dtype(where, metadata, dtype)
    arrays |= _logit_arrays(where, given, sizes, layout)
    arrays |= _token_arrays(where, given, sizes, layout)
    causal = as_bool(where, "causal", given["causal"])
    window = _window(where, given["window"])
    pattern = _mask_pattern(where, given["mask_pattern"], sizes)
    offset = _q_offset(where, given["q_offset"], sizes, causal or window is not None)
    static_offset = offset if isinstance(offset, int) else None
    if offset is not None and static_offset is None:
        arrays["q_offset"] = offset
    dropout_prob = _dropout(where, given, arrays)
    check_devices(where, arrays)
    request = AttentionRequest(
        kind="attention",
        features=frozenset(),
        dtype=dtype,
        layout=layout,
        mode=mode,
        **sizes._asdict(),
        output_dtype=np.dtype(arrays["query"].dtype).name,
        arrays=tuple(sorted((name, _spec(array)) for name, array in arrays.items())),
        causal=causal,
        window=window,
        mask_pattern=pattern,
        q_offset=static_offset,
        softmax_scale=_in_range(
            where,
            "softmax_scale",
            _softmax_scale(where, given["softmax_scale"], sizes.head_dim),
            dtype,
        ),
        logits_soft_cap=_in_range(
            where, "logits_soft_cap", _soft_cap(where, given["logits_soft_cap"]), dtype
        ),
        dropout_prob=dropout_prob,
        return_lse=as_bool(where, "return_lse", given["return_lse"]),
        return_weights=as_bool(where, "return_weights", given["return_weights"]),
    )
    return Call(request, arrays)


def _spec(array: Any) -> ArraySpec:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return ArraySpec(tuple(array.shape), str(array.dtype))
    return ArraySpec.of(array)


def _operands(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    arrays = {}
    for name in OPERANDS:
        if given.get(name) is None:
            got = f"no {name}"
            raise fail_type(where, "query, key and value", got, f"pass {name}")
        arrays[name] = as_array(where, name, given[name])
        _check_floating(where, name, arrays[name])
    return arrays


def _check_floating(where: str, name: str, array: Any) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        got = f"{name} of dtype {array.dtype}"
        raise fail_type(where, f"{name} of a floating dtype", got, "cast it")


def _sizes(where: str, arrays: Mapping[str, Any], layout: str) -> Sizes:
    rank = len(layout)
    for name in OPERANDS:
        shape = arrays[name].shape
        if len(shape) != rank:
            axes = {
                "bthd": "[batch, length, heads, head_dim]",
                "bhtd": "[batch, heads, length, head_dim]",
                "thd": "[tokens, heads, head_dim]",
            }[layout]
            got = f"{name} of shape {shape}"
            rule = f"{name} {axes} in layout {layout!r}"
            raise fail_value(where, rule, got, "reshape it or pass its layout")
    shapes = {
        name: dict(zip(layout, arrays[name].shape, strict=True)) for name in OPERANDS
    }
    query, key, value = (shapes[name] for name in OPERANDS)
    _check_equal(where, "kv_len", "key", key["t"], "value", value["t"])
    _check_equal(where, "kv_heads", "key", key["h"], "value", value["h"])
    _check_equal(where, "head_dim", "query", query["d"], "key", key["d"])
    batch = query.get("b", 1)
    _check_equal(where, "batch", "query", batch, "key", key.get("b", 1))
    _check_equal(where, "batch", "query", batch, "value", value.get("b", 1))
    heads, kv_heads = query["h"], key["h"]
    if heads % kv_heads if kv_heads else heads:
        raise fail_value(
            where,
            "heads to be a multiple of kv_heads",
            f"heads={heads}, kv_heads={kv_heads}",
            "query head h reads kv head h // (heads // kv_heads)",
        )
    return Sizes(batch, query["t"], key["t"], heads, kv_heads, query["d"], value["d"])


def _check_equal(
    where: str, axis: str, first: str, left: int, second: str, right: int
) -> None:
    if left != right:
        got = f"{first} {axis}={left}, {second} {axis}={right}"
        raise fail_value(where, f"{axis} to agree", got, "check the shapes and layout")


def _dtype(where: str, arrays: Mapping[str, Any], metadata: OperationMetadata) -> str:
    runtime_dtype = runtime_dtype_name(where, metadata)
    if runtime_dtype is not None:
        return runtime_dtype
    dtypes = {name: np.dtype(arrays[name].dtype).name for name in OPERANDS}
    if len(set(dtypes.values())) > 1:
        got = ", ".join(f"{name}={dtype}" for name, dtype in dtypes.items())
        todo = "cast them or set metadata=OperationMetadata(runtime_dtype=...)"
        raise fail_type(where, "query, key and value of one dtype", got, todo)
    return str(dtypes["query"])


def _logit_arrays(
    where: str, given: Mapping[str, Any], sizes: Sizes, layout: str
) -> dict[str, Any]:
    """bias, mask, softmax_aux: what is added to, or removed from, the logits."""
    arrays = {}
    for name in ("bias", "mask"):
        if given[name] is not None:
            array = as_array(where, name, _within_jax(given[name]))
            _check_broadcastable(where, name, array, sizes, layout)
            arrays[name] = array
    if "bias" in arrays:
        _check_floating(where, "bias", arrays["bias"])
    if "mask" in arrays and arrays["mask"].dtype != jnp.bool_:
        raise fail_type(
            where,
            "mask of dtype bool (True takes part)",
            f"mask of dtype {arrays['mask'].dtype}",
            "pass mask != 0, or an additive mask as bias",
        )
    if given["softmax_aux"] is not None:
        array = as_array(where, "softmax_aux", _within_jax(given["softmax_aux"]))
        _check_floating(where, "softmax_aux", array)
        if array.ndim not in (1, 2) or array.shape[0] != sizes.heads:
            rule = f"softmax_aux [heads] or [heads, num_sinks] with heads={sizes.heads}"
            got = f"softmax_aux of shape {array.shape}"
            raise fail_value(where, rule, got, "give every query head its own sinks")
        arrays["softmax_aux"] = array
    return arrays


def _within_jax(value: Any) -> Any:
    """Keeps numbers of numpy finite where JAX narrows their dtype (see x64).

    As `adaptation` does for what JAX holds in a wider dtype than the logits have.
    """
    is_masked = isinstance(value, np.ma.MaskedArray)  # which `as_array` refuses
    if is_masked or not isinstance(value, np.ndarray | np.generic):
        return value
    if not np.issubdtype(value.dtype, np.floating):
        return value
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if np.dtype(dtype).itemsize >= value.dtype.itemsize:
        return value
    largest = float(np.finfo(dtype).max)
    return np.where(np.isfinite(value), np.clip(value, -largest, largest), value)


def _check_broadcastable(
    where: str, name: str, array: Any, sizes: Sizes, layout: str
) -> None:
    full = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    shape = array.shape
    fits = len(shape) <= 4 and all(
        have in (1, want) for have, want in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        axes = (
            "[heads, q_len, kv_len]"
            if layout == "thd"
            else "[batch, heads, q_len, kv_len]"
        )
        rule = f"{name} broadcastable to {axes}={full[1:] if layout == 'thd' else full}"
        got = f"{name} of shape {shape}"
        raise fail_value(where, rule, got, "insert axes of size 1")


def _token_arrays(
    where: str, given: Mapping[str, Any], sizes: Sizes, layout: str
) -> dict[str, Any]:
    """Segment ids and lengths, as int32."""
    arrays = {}
    if (given["q_segment_ids"] is None) != (given["kv_segment_ids"] is None):
        missing = "kv" if given["kv_segment_ids"] is None else "q"
        got = f"{missing}_segment_ids=None"
        todo = "for self-attention pass the same ids twice"
        raise fail_value(where, "q_segment_ids and kv_segment_ids together", got, todo)
    for name, length, axis in (
        ("q_segment_ids", sizes.q_len, "q_len"),
        ("kv_segment_ids", sizes.kv_len, "kv_len"),
    ):
        if given[name] is not None:
            shape = (length,) if layout == "thd" else (sizes.batch, length)
            axes = "[tokens]" if layout == "thd" else f"[batch, {axis}]"
            arrays[name] = _integers(where, name, given[name], shape, axes)
    for name in ("q_lengths", "kv_lengths"):
        if given[name] is not None:
            arrays[name] = _integers(
                where, name, given[name], (sizes.batch,), "[batch]"
            )
    return arrays


def _integers(
    where: str, name: str, value: Any, shape: tuple[int, ...], axes: str
) -> Any:
    array = as_array(where, name, value, todo="pass an int32 array")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = f"{name} of dtype {array.dtype}"
        raise fail_type(where, f"{name} of an integer dtype", got, "cast it to int32")
    if array.shape != shape:
        got = f"{name} of shape {array.shape}"
        todo = "one entry per sample" if axes == "[batch]" else "one id per token"
        raise fail_value(where, f"{name} {axes}={shape}", got, todo)
    given = value.dtype if isinstance(value, np.ndarray) else array.dtype
    if np.can_cast(given, np.int32):
        return array.astype(jnp.int32)
    if axes == "[batch]":  # a length beyond int32 is beyond every axis
        if isinstance(value, np.ndarray):
            return jnp.asarray(np.clip(value, 0, INT32.max).astype(np.int32))
        return jnp.clip(array, 0, INT32.max).astype(jnp.int32)
    return _narrowed(where, name, value, array)


def _narrowed(where: str, name: str, value: Any, array: Any) -> Any:
    """Returns ids of a wider dtype as int32, if they are known to fit."""
    todo = "ids that wrap would match others: number them from 0"
    # As passed: without x64 JAX has wrapped them, and under jit traced them, already.
    if isinstance(value if isinstance(value, np.ndarray) else array, jax.core.Tracer):
        got = f"{name} of dtype {array.dtype}"
        raise fail_type(where, f"{name} within int32", got, "cast it to int32")
    ids = np.asarray(value)
    if ids.size and not INT32.min <= ids.min() <= ids.max() <= INT32.max:
        got = f"{name} from {ids.min()} to {ids.max()}"
        raise fail_value(where, f"{name} within int32", got, todo)
    return jnp.asarray(ids.astype(np.int32))


def _window(where: str, window: Any) -> Window | None:
    if window is None:
        return None
    if is_integer(window):
        raise fail_type(
            where,
            "window as a pair (left, right)",
            f"window={window}",
            f"elsewhere a bare {window} means either ({window}, {window}), symmetric, "
            f"or the last {window} keys with the row's own, here "
            f"({max(int(window) - 1, 0)}, 0): say which",
        )
    if not isinstance(window, tuple | list) or len(window) != 2:
        got = f"window={window!r}"
        todo = "None on a side is unlimited"
        raise fail_type(where, "window as a pair (left, right) of ints", got, todo)
    left, right = (_window_side(where, window, side) for side in window)
    return None if left is None and right is None else (left, right)


def _mask_pattern(where: str, value: Any, sizes: Sizes) -> MaskPattern | None:
    if value is None:
        return None
    if not isinstance(value, MaskPattern):
        got = f"mask_pattern of type {type(value).__name__}"
        todo = "make one with switchax.MaskPattern(...), or pass an array as mask"
        raise fail_type(where, "mask_pattern to be a MaskPattern", got, todo)
    lengths = sizes.q_len, sizes.kv_len
    if (value.q_len, value.kv_len) != lengths:
        rule = f"mask_pattern [q_len, kv_len]={lengths}"
        got = f"one of {(value.q_len, value.kv_len)}"
        raise fail_value(where, rule, got, "make one of the lengths of the call")
    return value


def _window_side(where: str, window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if not is_integer(side):
        got = f"window={window!r}"
        todo = "its sides are static; None is unlimited"
        raise fail_type(where, "window as a pair (left, right) of ints", got, todo)
    if side < 0:
        got = f"window={tuple(window)!r}"
        todo = "sides count the keys beside the row's own; None is unlimited"
        raise fail_value(where, "window sides of at least 0", got, todo)
    if side > POSITION // 2:  # an offset of -side would leave int32
        got = f"window={tuple(window)!r}"
        rule = f"window sides of at most {POSITION // 2}"
        raise fail_value(where, rule, got, "None on a side is unlimited")
    return int(side)


def _q_offset(where: str, value: Any, sizes: Sizes, needed: bool) -> Any:
    """Returns an int, an int32 array of shape () or [batch], or None if unneeded."""
    if value is None:
        if needed and sizes.q_len != sizes.kv_len:
            raise fail_value(
                where,
                "q_offset with causal or window where q_len != kv_len",
                f"q_offset=None, q_len={sizes.q_len}, kv_len={sizes.kv_len}",
                "pass q_offset=0 to align the first rows, or q_offset=kv_len - q_len"
                f"={sizes.kv_len - sizes.q_len} to align the last",
            )
        return 0 if needed else None
    if is_integer(value):
        if not -POSITION <= value <= POSITION:
            got = f"q_offset={value}"
            rule = f"q_offset from {-POSITION} to {POSITION}"
            raise fail_value(where, rule, got, "it is the position of a key")
        return int(value) if needed else None
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        value = np.clip(value, -POSITION, POSITION)  # before JAX narrows it
    todo = "pass an int, or an int32 array"
    array = as_array(where, "q_offset", value, todo)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        got = f"q_offset of dtype {array.dtype}"
        raise fail_type(where, "q_offset of an integer dtype", got, "cast it to int32")
    if array.shape not in ((), (sizes.batch,)):
        got = f"q_offset of shape {array.shape}"
        rule = f"q_offset an int, a scalar or [batch]=({sizes.batch},)"
        raise fail_value(where, rule, got, "it is the key position of query row 0")
    if not needed:
        return None
    # Beyond every length on either side; sums with positions must not wrap.
    info = jnp.iinfo(array.dtype)  # type: ignore[no-untyped-call]  # knows int4 too
    low, high = max(-POSITION, int(info.min)), min(POSITION, int(info.max))
    return jnp.clip(array, low, high).astype(jnp.int32)


def _softmax_scale(where: str, value: Any, head_dim: int) -> float:
    if value is None:
        if not isinstance(head_dim, int):  # symbolic, of jax.export
            rule = "softmax_scale where head_dim is symbolic"
            got, todo = f"softmax_scale=None, head_dim={head_dim}", "pass a number"
            raise fail_value(where, rule, got, todo)
        return float(head_dim) ** -0.5 if head_dim else 1.0
    todo = "pass a Python or numpy number; for a traced or learned scale, multiply "
    todo += "query by it and pass 1.0"
    return as_number(where, "softmax_scale", value, todo)


def _soft_cap(where: str, value: Any) -> float | None:
    if value is None:
        return None
    todo = "the cap is part of the compiled program"
    cap = as_number(where, "logits_soft_cap", value, todo)
    if cap <= 0:
        got = f"logits_soft_cap={cap}"
        raise fail_value(where, "logits_soft_cap positive", got, "None means no cap")
    return cap


def _in_range(where: str, name: str, value: Any, dtype: str) -> Any:
    """Returns a number that the logits' dtype can compute with, or raises.

    Its square and its inverse must exist there too: tanh(x / cap) and its derivative
    need them.
    """
    if not value:
        return value
    info = np.finfo(np.float64 if dtype == "float64" else np.float32)
    low, high = float(info.tiny) ** 0.5, float(info.max) ** 0.5
    if name == "softmax_scale":
        low, high = float(info.tiny), float(info.max)
    if low <= abs(value) <= high:
        return value
    rule = f"{name} between {low:.0e} and {high:.0e} in size for {info.dtype} logits"
    raise fail_value(where, rule, f"{name}={value}", "it cannot be computed with")


def _dropout(where: str, given: Mapping[str, Any], arrays: dict[str, Any]) -> float:
    todo = "the probability is part of the compiled program"
    prob = as_number(where, "dropout_prob", given["dropout_prob"], todo)
    if not 0.0 <= prob < 1.0:
        got = f"dropout_prob={prob}"
        raise fail_value(where, "dropout_prob in [0, 1)", got, "0.0 means no dropout")
    key = given["dropout_key"]
    if key is not None:
        key = _one_key(where, key)
    if prob == 0.0:
        return 0.0
    if key is None:
        got = f"dropout_prob={prob}, dropout_key=None"
        todo = "pass dropout_key=jax.random.key(...)"
        raise fail_value(where, "dropout_key with dropout_prob > 0", got, todo)
    arrays["dropout_key"] = key
    return prob


def _one_key(where: str, key: Any) -> Any:
    """Returns a typed key, or a raw one of the default implementation, or raises."""
    todo = "make one with jax.random.key(seed)"
    key = as_array(where, "dropout_key", key, todo)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        shape: tuple[int, ...] = ()
    else:
        shape = _raw_key_shape(str(jax.config.jax_default_prng_impl))  # type: ignore[attr-defined]
    if key.shape == shape and (not shape or key.dtype == jnp.uint32):
        return key
    got = f"dropout_key {key.dtype}{list(key.shape)}"
    rule = "dropout_key to be one PRNG key"
    if shape and (key.dtype != jnp.uint32 or key.shape[-1:] != shape):
        rule += f", typed or uint32{list(shape)}"
    else:
        todo = "split it, or take one of its keys"
    raise fail_type(where, rule, got, todo)


@functools.cache
def _raw_key_shape(implementation: str) -> tuple[int, ...]:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    return tuple(jax.eval_shape(jax.random.key_data, key).shape)
