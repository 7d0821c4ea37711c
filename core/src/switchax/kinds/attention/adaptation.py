"""Brings an attention call to the form that an operation declares.

`plan` decides from declarations alone, with no array at hand; `operands` and
`finish` apply and undo the plan inside the compiled program. Each change is an
`Adaptation`, listed in the decision with what it costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.capabilities import Capabilities
from switchax.errors import Refusal
from switchax.kind import Adaptation, Arrays, Call, Plan
from switchax.request import ArraySpec

from .features import VISIBILITY, with_features
from .request import AttentionRequest
from .visibility import visibility

__all__ = ["AttentionPlan", "operands", "plan"]

Padding = tuple[tuple[str, int], ...]
PADDABLE = ("q_len", "kv_len", "head_dim", "v_head_dim")


@dataclasses.dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of one attention call.

    Attributes:
        padding: Axis and padded size, for each axis that is padded.
        kv_repeat: How often each kv head is repeated; 1 for not at all.
        fold: Where visibility goes: "" (as it is), "segments" or "mask".
        skip: No row sees a key, so core answers without the kernel.
    """

    padding: Padding = ()
    kv_repeat: int = 1
    fold: str = ""
    skip: bool = False


def plan(request: AttentionRequest, capabilities: Capabilities) -> AttentionPlan:
    """Plans the call for an operation of these capabilities.

    Args:
        request: The request as the user made it.
        capabilities: The operation's declaration.

    Returns:
        The plan; its refusals say what no adaptation can bring about. What is left
        of features, dtypes and limits is for dispatch to compare.
    """
    adapted, steps, refusals = request, list[Adaptation](), list[Refusal]()
    adapted = _change_layout(adapted, capabilities, steps, refusals)
    repeat = 1
    if adapted.heads != adapted.kv_heads and "gqa" not in capabilities.features:
        repeat = adapted.heads // max(adapted.kv_heads, 1)
        adapted = dataclasses.replace(adapted, kv_heads=adapted.heads)
        cost = f"key and value are written {repeat} times as large"
        steps.append(Adaptation("repeat_kv", f"each kv head {repeat} times", cost))
    adapted, padding = _pad(adapted, capabilities, steps, refusals)
    adapted, fold = _fold(with_features(adapted), capabilities, steps)
    return AttentionPlan(
        with_features(_respecified(adapted)),
        tuple(steps),
        tuple(refusals),
        source=request,
        padding=padding,
        kv_repeat=repeat,
        fold=fold,
        skip=request.is_empty,
    )


def _respecified(request: AttentionRequest) -> AttentionRequest:
    """Returns the request with array shapes that follow its sizes and layout."""
    arrays = dict(request.arrays)
    length = {"query": request.q_len, "key": request.kv_len, "value": request.kv_len}
    for name in length:
        axes = {
            "b": request.batch,
            "t": length[name],
            "h": request.heads if name == "query" else request.kv_heads,
            "d": request.v_head_dim if name == "value" else request.head_dim,
        }
        shape = tuple(axes[axis] for axis in request.layout)
        arrays[name] = ArraySpec(shape, request.dtype)
    for name in ("bias", "mask"):
        if name in arrays and request.layout != "thd":
            shape = (1, 1, 1, 1, *arrays[name].shape)[-4:]
            rows = request.q_len if shape[2] != 1 else 1
            keys = request.kv_len if shape[3] != 1 else 1
            shape = (*shape[:2], rows, keys)
            arrays[name] = ArraySpec(shape, arrays[name].dtype)
    for side, tokens in (("q", request.q_len), ("kv", request.kv_len)):
        name = f"{side}_segment_ids"
        if name in arrays and request.layout != "thd":
            arrays[name] = ArraySpec((request.batch, tokens), "int32")
    return dataclasses.replace(request, arrays=tuple(sorted(arrays.items())))


def _change_layout(
    request: AttentionRequest,
    capabilities: Capabilities,
    steps: list[Adaptation],
    refusals: list[Refusal],
) -> AttentionRequest:
    if request.layout in capabilities.layouts:
        return request
    layout = next((name for name in capabilities.layouts if name != "thd"), None)
    if layout is None:
        hint = "pack the batch into tokens with segment ids"
        refusals.append(Refusal("layout", "layout", request.layout, "thd", hint))
        return request
    cost = "free, one axis is added"
    if request.layout[-3:] != layout[-3:]:
        cost = "query, key, value and output are transposed"
    steps.append(Adaptation("layout", f"{request.layout} to {layout}", cost))
    return dataclasses.replace(request, layout=layout)


def _pad(
    request: AttentionRequest,
    capabilities: Capabilities,
    steps: list[Adaptation],
    refusals: list[Refusal],
) -> tuple[AttentionRequest, Padding]:
    """Pads sizes up to the declared multiples; padded keys are hidden by lengths."""
    multiples = dict(capabilities.multiples)
    if "head_dim" in multiples:
        multiples.setdefault("v_head_dim", multiples["head_dim"])
    sizes = request.sizes
    changes: dict[str, int] = {}
    for axis, multiple in multiples.items():
        size = sizes.get(axis)
        if size is None or size % multiple == 0:
            continue
        symbolic = not isinstance(size, int)
        if axis not in PADDABLE or request.layout == "thd" or symbolic:
            hint = "pad the arrays, or choose another operation"
            allowed = f"a multiple of {multiple}"
            refusals.append(Refusal("multiple", axis, str(size), allowed, hint))
            continue
        changes[axis] = -(-size // multiple) * multiple
    if not changes:
        return request, ()
    detail = ", ".join(
        f"{axis} {sizes[axis]} to {new}" for axis, new in changes.items()
    )
    steps.append(Adaptation("pad", detail, "a copy of each padded array"))
    arrays = dict(request.arrays)
    pattern = request.mask_pattern
    if "kv_len" in changes:
        arrays.setdefault("kv_lengths", ArraySpec((request.batch,), "int32"))
    sizes = {**sizes, **changes}
    padded = dataclasses.replace(
        request,
        q_len=sizes["q_len"],
        kv_len=sizes["kv_len"],
        head_dim=sizes["head_dim"],
        v_head_dim=sizes["v_head_dim"],
        mask_pattern=pattern and pattern.padded(sizes["q_len"], sizes["kv_len"]),
        arrays=tuple(sorted(arrays.items())),
    )
    return padded, tuple(changes.items())


def _fold(
    request: AttentionRequest, capabilities: Capabilities, steps: list[Adaptation]
) -> tuple[AttentionRequest, str]:
    """Expresses visibility by segment ids or a mask where the kernel lacks it."""
    wanted = request.features & VISIBILITY
    lacking = wanted - capabilities.features
    if not lacking or request.layout == "thd":
        return request, ""
    arrays = dict(request.arrays)
    lengths = lacking & {"q_lengths", "kv_lengths"}
    # A mask takes the rest with them; without one the rest alone is refused.
    needs_mask = lacking != lengths and "mask" in capabilities.features
    if lengths and "segment_ids" in capabilities.features and not needs_mask:
        for name in ("q_lengths", "kv_lengths"):
            arrays.pop(name, None)
        arrays["q_segment_ids"] = ArraySpec((request.batch, request.q_len), "int32")
        arrays["kv_segment_ids"] = ArraySpec((request.batch, request.kv_len), "int32")
        detail = f"{' and '.join(sorted(lengths))} into segment ids"
        steps.append(Adaptation("fold_segments", detail, "one id per token is written"))
        folded = dataclasses.replace(request, arrays=tuple(sorted(arrays.items())))
        return folded, "segments"
    if "mask" not in capabilities.features:
        return request, ""
    shape = _mask_shape(request, arrays)
    for name in (
        "q_segment_ids",
        "kv_segment_ids",
        "q_lengths",
        "kv_lengths",
        "q_offset",
    ):
        arrays.pop(name, None)
    arrays["mask"] = ArraySpec(shape, "bool")
    dense = not {0, 1} & set(shape[2:])
    detail = f"{', '.join(sorted(wanted))} into a mask"
    cost = f"a boolean mask {'x'.join(map(str, shape))} is written"
    steps.append(Adaptation("fold_mask", detail, cost, materialises=dense))
    folded = dataclasses.replace(
        request,
        arrays=tuple(sorted(arrays.items())),
        causal=False,
        window=None,
        mask_pattern=None,
        q_offset=None,
    )
    return folded, "mask"


def _mask_shape(
    request: AttentionRequest, arrays: Mapping[str, ArraySpec]
) -> tuple[int, int, int, int]:
    mask = (1, 1, 1, 1, *(arrays["mask"].shape if "mask" in arrays else ()))[-4:]
    per_batch = {"q_segment_ids", "q_lengths", "kv_lengths"} & set(arrays)
    offset = arrays.get("q_offset")
    batched = bool(per_batch) or (offset is not None and offset.shape != ())
    positional = request.causal or request.window is not None
    positional |= request.mask_pattern is not None
    rows = positional or {"q_segment_ids", "q_lengths"} & set(arrays)
    keys = positional or {"q_segment_ids", "kv_lengths"} & set(arrays)
    return (
        request.batch if batched else mask[0],
        mask[1],
        request.q_len if rows else mask[2],
        request.kv_len if keys else mask[3],
    )


def operands(call: Call, the_plan: AttentionPlan) -> tuple[Arrays, dict[str, Any]]:
    """Applies the plan to the arrays; everything here is traced.

    Args:
        call: The call as bound.
        the_plan: What `plan` returned for it.

    Returns:
        Arrays by argument name (absent ones are None), and the static arguments.
    """
    request = the_plan.request
    assert isinstance(request, AttentionRequest)  # narrows the type
    arrays = dict(call.arrays)
    source = call.request
    assert isinstance(source, AttentionRequest)
    for name in ("query", "key", "value"):
        array = arrays[name].astype(request.dtype)
        arrays[name] = change_layout(array, source.layout, request.layout)
    for name in ("bias", "mask"):
        if name in arrays and request.layout != "thd":
            array = arrays[name]
            arrays[name] = array.reshape((1,) * (4 - array.ndim) + array.shape)
    for name in ("bias", "softmax_aux"):
        if name in arrays:
            arrays[name] = _within_logits(arrays[name], request.dtype)
    if source.layout == "thd" and request.layout != "thd":
        for name in ("q_segment_ids", "kv_segment_ids"):
            if name in arrays:
                arrays[name] = arrays[name][None]
    if the_plan.kv_repeat > 1:
        axis = request.layout.index("h")
        for name in ("key", "value"):
            arrays[name] = jnp.repeat(arrays[name], the_plan.kv_repeat, axis)
    _apply_padding(arrays, the_plan, source)
    if the_plan.fold == "segments":
        _apply_segments(arrays, request)
    elif the_plan.fold == "mask":
        _apply_mask(arrays, request, source)
    positional = request.causal or request.window is not None
    arrays.setdefault("q_offset", (request.q_offset or 0) if positional else 0)
    static = {
        "causal": request.causal,
        "window": request.window,
        "mask_pattern": request.mask_pattern,
        "softmax_scale": request.softmax_scale,
        "logits_soft_cap": request.logits_soft_cap,
        "dropout_prob": request.dropout_prob,
        "return_lse": request.return_lse,
        "return_weights": request.return_weights,
        "layout": request.layout,
        "mode": request.mode,
    }
    return arrays, static


def _within_logits(array: Any, dtype: str) -> Any:
    """Keeps numbers of a wider dtype finite in float32: -inf would empty a row (R6)."""
    if array.dtype != jnp.float64 or dtype == "float64":
        return array
    largest = float(np.finfo(np.float32).max)
    nearer = jnp.where(jnp.isfinite(array), jnp.clip(array, -largest, largest), array)
    return _replaced(array, nearer)


@jax.custom_jvp
def _replaced(array: Any, value: Any) -> Any:
    """Returns value with the derivative of array, of which it is a rounding."""
    return value


@_replaced.defjvp
def _replaced_jvp(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def change_layout(array: Any, source: str, target: str) -> Any:
    """Brings `[.., length, heads, ..]` arrays from one layout to another."""
    if source == "thd" and target != "thd":
        array, source = array[None], "bthd"
    if source != "thd" and target == "thd":
        return change_layout(array, source, "bthd")[0]
    return array if source == target else jnp.swapaxes(array, 1, 2)


def _apply_padding(
    arrays: Arrays, the_plan: AttentionPlan, source: AttentionRequest
) -> None:
    padding = dict(the_plan.padding)
    if not padding:
        return
    request = the_plan.request
    if "q_len" in padding:
        _drop_unseen_keys(arrays, request.layout, source)
    q_pad, kv_pad, d_pad, v_pad = (
        padding.get(axis, source.sizes[axis]) - source.sizes[axis] for axis in PADDABLE
    )
    length = request.layout.index("t")
    for name, tokens, dims in (
        ("query", q_pad, d_pad),
        ("key", kv_pad, d_pad),
        ("value", kv_pad, v_pad),
    ):
        widths = [(0, 0)] * 4
        widths[length], widths[3] = (0, tokens), (0, dims)
        arrays[name] = jnp.pad(arrays[name], widths)
    for name in ("bias", "mask"):
        if name in arrays:
            array = arrays[name]
            rows = q_pad if array.shape[2] > 1 else 0
            keys = kv_pad if array.shape[3] > 1 else 0
            arrays[name] = jnp.pad(array, ((0, 0), (0, 0), (0, rows), (0, keys)))
    for name, tokens in (("q_segment_ids", q_pad), ("kv_segment_ids", kv_pad)):
        if name in arrays:
            axes = ((0, 0), (0, tokens))
            arrays[name] = jnp.pad(arrays[name], axes, constant_values=-1)
    if kv_pad:
        given = arrays.get("kv_lengths")
        full = jnp.full((source.batch,), source.kv_len, jnp.int32)
        arrays["kv_lengths"] = full if given is None else jnp.minimum(given, full)


def _drop_unseen_keys(arrays: Arrays, layout: str, source: AttentionRequest) -> None:
    """Puts 0 for keys that by position only padded rows can see.

    Such rows come after the real ones, so a NaN there is no longer hidden (R7).
    """
    reach = 0 if source.causal else (source.window or (None, None))[1]
    if reach is None:
        return
    offset = arrays.get("q_offset", source.q_offset or 0)
    last = source.q_len - 1 + reach + offset
    if isinstance(last, int) and last >= source.kv_len - 1:
        return
    last = jnp.asarray(last, jnp.int32).reshape(-1, 1, 1, 1)
    others = [axis for axis in range(4) if axis != layout.index("t")]
    token = jnp.expand_dims(jnp.arange(source.kv_len, dtype=jnp.int32), others)
    for name in ("key", "value"):
        arrays[name] = jnp.where(token <= last, arrays[name], 0)


def _apply_segments(arrays: Arrays, request: AttentionRequest) -> None:
    for side, tokens in (("q", request.q_len), ("kv", request.kv_len)):
        name = f"{side}_segment_ids"
        ids = arrays.get(name)
        if ids is None:
            ids = jnp.zeros((request.batch, tokens), jnp.int32)
        lengths = arrays.pop(f"{side}_lengths", None)
        if lengths is not None:
            token = jnp.arange(tokens, dtype=jnp.int32)[None]
            ids = jnp.where(token < lengths[:, None], ids, -1)
        arrays[name] = ids


def _apply_mask(
    arrays: Arrays, request: AttentionRequest, source: AttentionRequest
) -> None:
    pattern = source.mask_pattern
    hidden_by = ("q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths")
    arrays["mask"] = visibility(
        q_len=request.q_len,
        kv_len=request.kv_len,
        mask=arrays.get("mask"),
        causal=source.causal,
        window=source.window,
        mask_pattern=pattern and pattern.padded(request.q_len, request.kv_len),
        q_offset=arrays.pop("q_offset", source.q_offset or 0),
        **{name: arrays.pop(name, None) for name in hidden_by},
    )
